"""How a run tells what it does: one protocol, plain lines for it, and the log file that keeps every line
whatever is shown."""

from __future__ import annotations

import errno
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from petune.errors import MachineError
from petune.files.safetensors import writing
from petune.log import printable, say

# of an output: who read it has gone, its terminal was closed, its disk is full
_UNDELIVERED = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT)


class Reporter(Protocol):
    """What a run calls. `record` has step, epoch, loss, lr, grad_norm, tokens, tokens_per_s; an evaluation
    step, epoch and its scores.

    One that draws on a terminal may have more: `ranks` is told what each rank of a plan holds, `close` is
    called however a rank ends, `in_ranks` says as MODULE:NAME what the first rank is to make to speak
    with, and `aside` is what the process that started the ranks says meanwhile.
    """

    def header(self, lines: Sequence[str], total_steps: int) -> None:
        """Once, before the first step."""

    def step(self, record: Mapping[str, Any]) -> None:
        """After every optimizer step."""

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """After every evaluation."""

    def note(self, line: str) -> None:
        """Something worth knowing."""

    def done(self, lines: Sequence[str]) -> None:
        """Once, at the end."""


class PlainReporter:
    """Reporter of plain lines through `write`, petune's logger by default: about twenty step lines a run,
    every evaluation and note."""

    def __init__(self, write: Callable[[str], None] = say) -> None:
        self._write = write

    def write(self, line: str) -> None:
        """Show a line, with nothing in it that a terminal would obey."""
        self._write(printable(line))

    def header(self, lines: Sequence[str], total_steps: int) -> None:
        self.every = max(1, total_steps // 20)
        self.total = total_steps
        for line in lines:
            self.write(line)

    def step(self, record: Mapping[str, Any]) -> None:
        """Show the first, the last and every twentieth part of the steps."""
        if record["step"] == 1 or record["step"] % self.every == 0 or record["step"] == self.total:
            self.write(step_line(record, self.total))

    def evaluated(self, record: Mapping[str, Any]) -> None:
        self.write(score_line(record))

    def note(self, line: str) -> None:
        self.write(line)

    def done(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)


class Logged:
    """Reporter that passes everything on, keeps every line in `run.log` and every record in
    `metrics.jsonl`."""

    def __init__(
        self, inner: Reporter, log: Path, metrics: Path, lost: Callable[[OSError], None] | None = None
    ) -> None:
        """`lost` is told when what `inner` says cannot be delivered any more; it is asked nothing from then
        on."""
        self.inner, self.log, self.metrics, self.lost = inner, log, metrics, lost
        self.gone: OSError | None = None
        self.total = 0
        self.detached = False

    def detach(self) -> None:
        """Write to no file any more: the folder they are in is gone, or another run's."""
        self.detached = True

    def write(self, line: str) -> None:
        """A line for the log alone, with the time."""
        self._append(self.log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(line)}\n")

    def write_error(self, error: BaseException) -> None:
        """The whole traceback, for the log alone."""
        with suppress(MachineError):  # on a full disk the error itself is what matters
            self.write("".join(traceback.format_exception(error)).rstrip())

    def _keep(self, record: Mapping[str, Any]) -> None:
        self._append(self.metrics, json.dumps(dict(record)) + "\n")

    def _append(self, path: Path, text: str) -> None:
        """Add to a file that is not a link, in one call: a line is there whole or, on a full disk, cut."""
        if self.detached:
            return
        with writing(path):
            fd = os.open(
                path,
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
                0o666,
            )
            try:
                rest = memoryview(text.encode())
                while rest:
                    rest = rest[os.write(fd, rest) :]
            finally:
                os.close(fd)

    def _show(self, say: Callable[..., None], *arguments: Any) -> None:
        """Let the inner reporter say it, while somebody reads."""
        if self.gone is not None:
            return
        try:
            say(*arguments)
        except OSError as error:
            if self.lost is None or error.errno not in _UNDELIVERED:
                raise
            self.gone = error
            self.lost(error)

    def ranks(self, held: Sequence[Mapping[str, Any]]) -> None:
        """Tell a reporter that draws the ranks of a plan what each of them holds."""
        if (show := getattr(self.inner, "ranks", None)) is not None:
            show(held)

    def header(self, lines: Sequence[str], total_steps: int) -> None:
        self.total = total_steps
        for line in lines:
            self.write(line)
        self._show(self.inner.header, lines, total_steps)

    def step(self, record: Mapping[str, Any]) -> None:
        self.write(step_line(record, self.total))
        self._keep(record)
        self._show(self.inner.step, record)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        self.write(score_line(record))
        self._keep(record)
        self._show(self.inner.evaluated, record)

    def note(self, line: str) -> None:
        self.write(line)
        self._show(self.inner.note, line)

    def done(self, lines: Sequence[str]) -> None:
        """Log and pass on. Raises the OSError of an output that was lost when no stop could heed it any
        more."""
        for line in lines:
            self.write(line)
        if self.gone is not None:
            raise self.gone
        self.inner.done(lines)


class Silent(Logged):
    """What a process says that is not the one to speak: nothing, and no file is touched."""

    def __init__(self) -> None:
        super().__init__(PlainReporter(lambda line: None), Path(os.devnull), Path(os.devnull))

    def write(self, line: str) -> None:
        """Nothing."""

    def _keep(self, record: Mapping[str, Any]) -> None:
        """Nothing."""


class Trackers:
    """The experiment trackers a recipe names, through accelerate. Nothing is imported and no network is
    touched when it names none."""

    def __init__(self, names: Sequence[str]) -> None:
        """Raises MachineError for one that is not installed."""
        self.kinds: list[Any] = []
        self.active: list[Any] = []
        if not names:
            return
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

        PartialState()
        ready = {str(name) for name in get_available_trackers()}
        for name in names:
            if name not in ready:
                what = f"tracker {name} is not installed"
                raise MachineError(what, where="trackers", found=", ".join(sorted(ready)) or "none")
            self.kinds.append(LOGGER_TYPE_TO_CLASS[name])

    def start(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Begin to log; those that write files write them to `folder`."""
        for kind in self.kinds:
            tracker = (
                kind("petune", logging_dir=str(folder)) if kind.requires_logging_directory else kind("petune")
            )
            if hasattr(tracker, "start"):
                tracker.start()
            flat = {
                key: value for key, value in settings.items() if isinstance(value, int | float | str | bool)
            }
            tracker.store_init_configuration(flat)
            self.active.append(tracker)

    def places(self) -> list[str]:
        """Where each tracker shows the run, a line each: its address or folder, as far as it says one."""
        return [f"tracker {tracker.name}: {_place_of(tracker)}" for tracker in self.active]

    def log(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a record under its step."""
        for tracker in self.active:
            numbers = {
                key: value
                for key, value in record.items()
                if key != "step" and isinstance(value, int | float)
            }
            tracker.log(numbers, step=record["step"])

    def finish(self) -> None:
        """Flush and close."""
        for tracker in self.active:
            tracker.finish()


def _place_of(tracker: Any) -> str:
    """The address of a run at a tracker, else the folder it writes to (wandb offline: `dir`, mlflow:
    `info.artifact_uri`)."""
    for path in ("url", "get_url", "get_output_log_web_page", "log_dir", "dir", "info.artifact_uri"):
        found = tracker.tracker
        for name in path.split("."):
            found = getattr(found, name, None)
        found = found() if callable(found) else found
        if isinstance(found, str) and found:
            return found
    return str(getattr(tracker, "logging_dir", None) or "started; it says no address")


def step_line(record: Mapping[str, Any], total: int) -> str:
    """One step as text."""
    return (
        f"step {record['step']}/{total}  epoch {record['epoch']:.2f}  loss {record['loss']:.4f}  lr"
        f" {record['lr']:.2e}  grad {record['grad_norm']:.3f}  {record['tokens_per_s']:,.0f} tokens/s"
    )


def score_line(record: Mapping[str, Any]) -> str:
    """One evaluation as text."""
    scores = "  ".join(
        f"{name.removeprefix('eval_')} {value:.4f}"
        for name, value in record.items()
        if name.startswith("eval_")
    )
    return f"evaluation at step {record['step']}  {scores}"
