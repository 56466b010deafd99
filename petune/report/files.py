"""The files of a run folder as a page reads them: whatever is there, also of a run in progress or one that is
damaged. What cannot be read is named among `faults`, never raised.

No link is followed and nothing is written. A file that is not there is no fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from petune.errors import FileError, PetuneError, nearest
from petune.files.json_fields import check_seal
from petune.files.lock import RunLock
from petune.files.safetensors import open_regular, read_bytes, read_json
from petune.recipe import yaml_lines
from petune.report.results import records_in
from petune.report.words import is_number

RunState = Literal["finished", "running", "stopped"]  # of a run that is reported
_T = TypeVar("_T")
_MOST = 256 << 20  # bytes of metrics.jsonl that are read
_TAIL = 32 << 10  # and of run.log
_DEEP = 3  # folders below the one that is searched for runs


def _json_file(name: str) -> cached_property[dict[str, Any]]:
    """What a JSON file of the folder holds, read once; empty where it is not there."""
    return cached_property(lambda run: run._json(name))


@dataclass
class RunFiles:
    """What the files of the run in `path` say. faults: in words, a line each.

    ending: what summary.json will hold, of a run that is just writing its last files.
    """

    path: Path
    faults: list[str] = field(default_factory=list)
    ending: Mapping[str, Any] | None = None

    @cached_property
    def state(self) -> RunState:
        """How far it is, by names and the lock alone."""
        if self.ending is not None or (self.path / "summary.json").is_file():
            return "finished"
        return "running" if RunLock(self.path).is_held() else "stopped"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting the run began with."""
        path = self.path / "resolved.yaml"
        found = self._attempt(lambda: yaml_lines.read(read_bytes(path), path.name))
        if found is None:
            return {}
        self.faults += [f"{one.where}: {one.what}" for one in found.problems]
        if not isinstance(found.tree, dict):
            self.faults.append("resolved.yaml: is no mapping of settings")
        return found.tree if isinstance(found.tree, dict) else {}

    setup = _json_file("setup.json")  # what was known before the first step
    scores = _json_file("eval.json")  # what `petune eval` found last
    environment = _json_file("env.json")  # versions and machine
    forecast = _json_file("forecast.json")  # the memory of each rank as it was predicted
    # held-out rows with the answers of the untouched base and the tuned model
    answers = _json_file("answers.json")

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What came of it; empty before its end."""
        if self.ending is not None:
            return dict(self.ending)
        found = self._json("summary.json")
        self._attempt(lambda: check_seal(found, self.path / "summary.json"))
        return found

    @cached_property
    def ranks(self) -> dict[str, Any]:
        """How the ranks of a run in progress are, and when that was; empty for every other."""
        return self._json("ranks.json") if self.state == "running" else {}

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Every whole record of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        if not os.path.lexists(path):
            return []
        lines = (self._attempt(lambda: _end_of(path, _MOST)) or b"").decode("utf-8", "replace").splitlines()
        found = records_in(lines)
        cut = len([line for line in lines if line.strip()]) - len(found)
        if cut > (self.state != "finished"):  # the last line of a run that was cut off may be half
            self.faults.append(f"metrics.jsonl: {cut} of {len(lines)} lines cannot be read")
        return found

    @cached_property
    def log(self) -> list[str]:
        """The last lines of run.log."""
        path = self.path / "run.log"
        text = self._attempt(lambda: _end_of(path, _TAIL)) if os.path.lexists(path) else b""
        return (text or b"").decode("utf-8", "replace").splitlines()[-40:]

    # ------------------------------------------------------------ what follows from them

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.resolve().name

    @property
    def method(self) -> str:
        """The name of the method."""
        found = self.settings.get("method")
        return str(found.get("name", "?") if isinstance(found, Mapping) else found or "?")

    @property
    def plan(self) -> str:
        """The parallel plan in words."""
        said = self.setup.get("plan")
        found = said.get("words") if isinstance(said, Mapping) else None
        if found is None:
            axes = self.settings.get("parallel")
            found = " x ".join(axes) if isinstance(axes, Mapping) and axes else "one process"
        return str(found)

    @property
    def step(self) -> int:
        """The last step that has a record."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def planned(self) -> int | None:
        """The steps there are to be, where that is known."""
        steps = self.setup.get("steps")
        total = steps.get("total") if isinstance(steps, Mapping) else None
        total = self.summary.get("steps") if total is None else total
        return total if isinstance(total, int) and total > 0 else None

    @property
    def metric(self) -> str:
        """The metric that decides which state is the best."""
        return str(self.summary.get("metric") or self.setup.get("metric") or "loss")

    def score(self, when: str) -> float | None:
        """The metric `before` or `after`, while it runs the latest; None where it is not known."""
        scores = self.summary.get(when)
        if isinstance(scores, Mapping):
            value = scores.get(self.metric)
        else:
            key = f"eval_{self.metric}"
            found = [(record["step"], record[key]) for record in self.records if key in record]
            values = [value for step, value in found if (step == 0) == (when == "before")]
            value = values[-1] if values else None
        return float(value) if is_number(value) else None

    @property
    def began(self) -> float:
        """When it began, seconds since the epoch; 0 where nothing says so."""
        noted = self.setup.get("began")
        if is_number(noted):
            return float(noted)
        try:
            return (self.path / "resolved.yaml").stat().st_mtime
        except OSError:
            return 0.0

    def read(self) -> RunFiles:
        """The same, once all files that say whether it can be read are read: `faults` is complete."""
        for name in ("settings", "setup", "summary", "environment", "records", "scores"):
            getattr(self, name)
        return self

    # ------------------------------------------------------------ reading

    def _attempt(self, read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except PetuneError as error:
            self.faults += [f"{Path(one.where or '').name}: {one.what}" for one in error.problems]
        except (OSError, ValueError, RecursionError) as error:
            self.faults.append((str(error).splitlines() or ["a file cannot be read"])[0])
        return None

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return (self._attempt(lambda: read_json(path)) or {}) if os.path.lexists(path) else {}


def _end_of(path: Path, most: int) -> bytes:
    """The last `most` bytes of a file, from a line's beginning."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most))
        text = file.read(most) or b""
    return text.partition(b"\n")[2] if size > most else text


def is_run(path: Path) -> bool:
    """Whether a run began in this folder."""
    return (path / "resolved.yaml").is_file()


def no_run(folder: Path) -> FileError:
    """The refusal of a folder in which no run began; it names those beside it that are called alike."""
    meant = nearest(folder.name, (run.name for run in find_runs(folder.parent, 1)))
    remedy = "give what `out` was; petune runs lists them"
    if meant:
        remedy = f"did you mean: {' or '.join(str(folder.with_name(name)) for name in meant)}"
    return FileError(
        "this is not a run folder", where=str(folder), expected="a folder with resolved.yaml", remedy=remedy
    )


def find_runs(folder: Path, deep: int = _DEEP) -> list[Path]:
    """The run folders in `folder` (itself, if it is one) and up to `deep` levels below, by name.

    Links are not followed, and what is closed to this user below `folder` is passed by. Raises
    PermissionError for a `folder` that is.
    """
    if is_run(folder):
        return [folder]
    try:
        below = sorted(one.name for one in os.scandir(folder) if one.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [] if deep == 0 else [run for name in below for run in _open_runs(folder / name, deep - 1)]


def _open_runs(folder: Path, deep: int) -> list[Path]:
    """`find_runs` of a folder that may be another user's own."""
    try:
        return find_runs(folder, deep)
    except PermissionError:
        return []


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run that no other of them has: its folder's, with as many of the folders above as that
    takes."""
    parts = [run.path.resolve().parts for run in runs]
    for length in range(1, max((len(one) for one in parts), default=1) + 1):
        found = ["/".join(one[-length:]) for one in parts]
        if len(set(found)) == len(set(parts)):
            break
    return found if runs else []
