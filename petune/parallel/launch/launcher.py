"""Starting every rank of a run on this machine with torch's elastic agent, and saying in one message how it
ended.

The agent starts and watches the ranks and can start all of them anew. What is added: how a stop and a failure
end (ranks that save are waited for, ranks that hang are killed within seconds), which of several errors is
the cause, which failures are worth a restart, and that a rank which died is replaced alone where the others
can wait for it (petune.parallel.launch.replacing). The agent is kept because it does the rest well
(environments, output, a full restart), and a replacement needs of it only that another process stands in its
table. The rendezvous listens on 127.0.0.1 alone, every rank dies with this process, and no report of the
agent's own reaches the user.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from petune.errors import (
    DataError,
    DistributedError,
    FileError,
    MachineError,
    PetuneError,
    Stopped,
    TrainingFault,
    UsageError,
)
from petune.log import say
from petune.parallel.launch.host_memory import HostMemory
from petune.parallel.launch.rendezvous import (
    CONNECTIONS,
    ERROR_FILE,
    LAUNCHER,
    UNMET,
    lacks_files,
    make_room,
    serve,
    too_many_files,
)
from petune.parallel.launch.replacing import Replacing
from petune.parallel.launch.seal import SECRET, Sealed, new_secret

GRACE_S = 2.0  # how long the other ranks may take to end by themselves once one has failed
LOCALHOST = "127.0.0.1"
STOPPED = Stopped.code
INTERRUPTED = 130
# how a stop ends a rank that trains nothing yet, whoever sent it
_ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by which a stop is asked for
_STOPS = (STOPPED, INTERRUPTED, *(-number for number in _ASKS))
_KINDS = {
    kind.code: kind
    for kind in (UsageError, DataError, FileError, MachineError, DistributedError, TrainingFault, Stopped)
}


def launch(
    command: Sequence[str],
    num_ranks: int,
    *,
    restarts: int = 0,
    log_folder: Path | None = None,
    on_line: Callable[[str], None] = say,
) -> None:
    """Run `command` as `num_ranks` ranks on this machine and return when all have ended well.

    Rank 0 keeps this process's standard output and error; what another rank prints is appended to
    `log_folder`/rank-N.log (made if need be; None: dropped once the run ends). SIGTERM and Ctrl-C are passed
    on to every rank, and the ranks are waited for; a second Ctrl-C ends them. A rank that is killed or frozen
    is replaced, or all start anew where that cannot be, up to `restarts` times, each said through `on_line`;
    whatever a rank reports itself is final. Raises the PetuneError of the rank that failed first, its text in
    front of anything else and with the rank's number, or KeyboardInterrupt. When it ends, however it ends, no
    rank is left.
    """
    with _noting_signals() as stops, _quiet(), tempfile.TemporaryDirectory(prefix="petune-") as scratch:
        failure = _run(
            command, num_ranks, restarts, _Files(Path(scratch), log_folder or Path(scratch)), stops, on_line
        )
    if failure is not None:
        _show_cursor()
        raise failure


def _run(
    command: Sequence[str],
    num_ranks: int,
    restarts: int,
    files: _Files,
    stops: list[int],
    on_line: Callable[[str], None],
) -> PetuneError | KeyboardInterrupt | None:
    """Run the agent; what went wrong. In a function of its own, so that an error that is kept does not keep
    the store's port open."""
    make_room(CONNECTIONS * num_ranks)
    arguments = ["-I", "-S", str(Path(__file__).with_name("rank_entry.py")), *command]
    spec = WorkerSpec(
        role="petune",
        local_world_size=num_ranks,
        entrypoint=sys.executable,
        # the agent expands ${local_rank}, and so $$
        args=tuple(word.replace("$", "$$") for word in arguments),
        rdzv_handler=_Rendezvous(files.secret),
        max_restarts=restarts,
        monitor_interval=0.1,
        event_log_handler="null",
    )
    if restarts:
        files.replacing = Replacing(files.scratch / "orders")
    agent = _Agent(spec, files, stops, on_line)
    try:
        agent.run()
    except OSError as error:
        if lacks_files(error):
            return too_many_files()
        raise
    return agent.failure


@contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """SIGTERM, SIGINT and, unless it is to be ignored (nohup), SIGHUP in the order they came, where a process
    can catch them: its main thread. The agent is kept from doing so."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    theirs = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "none"
    kept = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, *kept)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE")
        if theirs is not None:
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = theirs


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the agent's banners from the user: whatever they tell, `judge` tells in a line."""
    nowhere = logging.NullHandler()
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torchelastic-events-null")]
    passed_on = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(nowhere)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, passed_on, strict=True):
            logger.removeHandler(nowhere)
            logger.propagate = propagate


def _show_cursor() -> None:
    """A rank killed while it showed progress leaves the terminal without one."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


# ------------------------------------------------------------ what the agent is given


class _Rendezvous(RendezvousHandler):
    """One machine meets itself: for every start a new store on the loopback, which the ranks use too."""

    def __init__(self, secret: str) -> None:
        self.number, self.secret = 0, secret

    def get_backend(self) -> str:
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self.number += 1
        self.store = serve(LOCALHOST)
        whole = Sealed(self.store, self.secret, "agent", 60)
        return RendezvousInfo(whole, 0, 1, RendezvousStoreInfo(LOCALHOST, self.store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "petune"

    def shutdown(self) -> bool:
        return True


class _Files(LogsSpecs):
    """Where a rank's output and its error go, and what else it finds in its environment."""

    def __init__(self, scratch: Path, folder: Path) -> None:
        super().__init__()
        self.scratch, self.folder = scratch, folder
        self.secret = new_secret()  # what the ranks of this launch know each other by
        self.errors: dict[int, Path] = {}
        self.starts: dict[int, int] = {}  # size of a rank's log when it started
        self.replacing: Replacing | None = None  # where ranks may be started anew
        self.unmet = scratch / "unmet"  # there until the ranks of this start have all met
        self.unmet.touch()
        self.met_before = False  # those of an earlier start

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"the folder for logs cannot be made: {error.strerror}"
            raise MachineError(what, where=str(self.folder), remedy="give another `out`") from None
        self.met_before = self.begun()
        self.unmet.touch()
        threads = str(max(1, _cores() // len(envs)))
        for rank, env in envs.items():
            self.errors[rank] = self.scratch / f"error-{env['TORCHELASTIC_RESTART_COUNT']}-{rank}.json"
            env |= {LAUNCHER: str(os.getpid()), ERROR_FILE: str(self.errors[rank]), SECRET: self.secret}
            env |= {UNMET: str(self.unmet)}
            env |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
            env |= self.replacing.environment() if self.replacing else {}
            self.note_start(rank)
            if rank:
                env["PETUNE_RANK_LOG"] = str(self.log(rank))
            else:  # torch's C++ tells a lost connection at length, and rank 0 owns the terminal
                env["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")
        streams = {rank: os.devnull if rank else "" for rank in envs}
        errors = {rank: str(path) for rank, path in self.errors.items()}
        return LogsDest(stdouts=streams, stderrs=dict(streams), error_files=errors)

    def begun(self) -> bool:
        """Whether all ranks have met, now or in an earlier start: before, no run has begun."""
        return self.met_before or not self.unmet.exists()

    def note_start(self, rank: int) -> None:
        """What a rank said before it starts is not this process's."""
        self.errors[rank].unlink(missing_ok=True)
        self.starts[rank] = self.log(rank).stat().st_size if rank and self.log(rank).exists() else 0

    def reports(self) -> list[Report]:
        """What the ranks reported, earliest first."""
        found = []
        for path in self.errors.values():
            # a rank that is no petune may write what it likes
            with suppress(OSError, ValueError, KeyError, TypeError):
                found.append(Report(**json.loads(path.read_text(encoding="utf-8"))["petune"]))
        return sorted(found, key=lambda report: report.time)

    def last_words(self, rank: int) -> str | None:
        """The last line a rank but the first printed since it started."""
        if not rank or not self.log(rank).exists():
            return None
        lines = self.log(rank).read_bytes()[self.starts[rank] :].decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), None)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------ the agent


class _Agent(LocalElasticAgent):
    """torch's agent for one machine, with petune's way to stop and to fail.

    torch's own would, as soon as one rank has ended with any code but 0, send SIGTERM to the rest and wait 30
    s for each to die, though a rank that is saving must not be disturbed and one that is frozen hears no
    SIGTERM; and it would restart after every kind of error.
    """

    def __init__(
        self, spec: WorkerSpec, files: _Files, stops: list[int], on_line: Callable[[str], None]
    ) -> None:
        super().__init__(spec, files, exit_barrier_timeout=5)
        self.files, self.stops, self.on_line = files, stops, on_line
        self.replacing, self.frozen = files.replacing, dict[int, str]()
        self.memory = HostMemory()
        self.passed_on = 0
        self.deadline: float | None = None
        self.failure: PetuneError | KeyboardInterrupt | None = None
        self.whole: str | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.passed_on = 0
        if self.replacing:
            self.replacing.begin()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pass_on_stops()
        self._tend()
        codes = self._codes()
        # a rank that stopped lets the others save
        bad = {rank: code for rank, code in codes.items() if code not in (None, 0, STOPPED)}
        if bad and self._replace(worker_group, bad, codes):
            return RunResult(state=WorkerState.HEALTHY)
        # one that met nobody does not: others may wait for it, where no signal and no word reaches them
        early = self.files.unmet.exists() and any(code in _STOPS for code in codes.values())
        if early and not self.stops:
            self._signal(signal.SIGTERM)
        if bad or early:
            self._end_the_rest()
        elif None in codes.values():
            return RunResult(state=WorkerState.HEALTHY)
        # all have ended: it only reads their codes
        result: RunResult = super()._monitor_workers(worker_group)
        if not result.is_failed():
            self.failure = None
            return result
        self.failure, again = self._judge(bad, self.files.reports())
        if not again or self.stops:
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            why = f", as {self.whole}" if self.whole else ""
            self.on_line(f"{self.failure}\nall ranks start again{why}: {self._count(worker_group)}")
        return result

    def _judge(
        self, bad: Mapping[int, int], reports: Sequence[Report]
    ) -> tuple[PetuneError | KeyboardInterrupt, bool]:
        """`judge` of this launch as it stands."""
        files, shortage = self.files, self.memory.shortage
        return judge(bad, self._codes(), reports, self.stops, files.last_words, shortage, files.begun())

    def _count(self, worker_group: WorkerGroup) -> str:
        restarts = worker_group.spec.max_restarts
        return f"restart {restarts - self._remaining_restarts + 1} of {restarts}"

    def _tend(self) -> None:
        """Kill ranks that are frozen where they can be replaced, and keep a spare process for the next."""
        context, codes = self._pcontext, self._codes()
        if not self.replacing or not isinstance(context, SubprocessContext):
            return
        if line := self.replacing.all_train(codes):
            self.on_line(line)
        if not self._remaining_restarts or self.stops:
            return
        for rank, text in self.replacing.silent(codes).items():
            self.frozen[rank] = text
            self._kill([rank])
        if None in codes.values() and (line := self.replacing.keep_spare(context, codes)):
            self.on_line(line)

    def _replace(
        self, worker_group: WorkerGroup, bad: Mapping[int, int], codes: Mapping[int, int | None]
    ) -> bool:
        """Start ranks that died in their places, while the others keep their models; whether it was done."""
        context, replacing = self._pcontext, self.replacing
        if not replacing or not isinstance(context, SubprocessContext):
            return False
        self.whole = replacing.whole(codes)
        lost = replacing.lost(codes) if self._remaining_restarts and not self.stops else []
        failure, again = self._judge(bad, [])
        if not lost or not again:
            return False
        if self.frozen.keys() & bad.keys():
            failure = DistributedError(
                ", ".join(self.frozen.pop(rank) for rank in bad if rank in self.frozen)
            )
        who = f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
        self.on_line(
            f"{str(failure).splitlines()[0]}\n{who} replaced, the others keep their model:"
            f" {self._count(worker_group)}"
        )
        self._remaining_restarts -= 1
        self._kill(lost)
        for rank, handler in replacing.replace(context, lost).items():
            self.files.note_start(rank)
            context.subprocess_handlers[rank] = handler
            worker_group.workers[rank].id = handler.proc.pid
        return True

    def _codes(self) -> dict[int, int | None]:
        """The exit code of every rank, negative for a signal; None while it runs."""
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            return {}
        return {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}

    def _pass_on_stops(self) -> None:
        """Give every rank the signals that came; a second Ctrl-C sets a time after which the ranks are
        killed, a third is that time."""
        for number in self.stops[self.passed_on :]:
            self.passed_on += 1
            self._signal(number)
        interrupts = self.stops.count(signal.SIGINT)
        if self.deadline is None and interrupts > 1:
            self.deadline = time.monotonic() + GRACE_S
        if interrupts > 2 or (self.deadline is not None and time.monotonic() > self.deadline):
            self._kill()

    def _signal(self, number: int) -> None:
        """Send every rank that runs a signal."""
        for rank, code in self._codes().items():
            if code is None:
                with suppress(ProcessLookupError):
                    os.kill(self._pids()[rank], number)

    def _end_the_rest(self) -> None:
        """Let the ranks that have lost a peer end by themselves, so that their logs are whole; then kill."""
        if self.replacing:
            self.replacing.end()
        until = time.monotonic() + GRACE_S
        while (
            None in self._codes().values()
            and time.monotonic() < until
            and self.stops.count(signal.SIGINT) < 3
        ):
            time.sleep(0.02)
        self._kill()

    def _kill(self, ranks: Sequence[int] | None = None) -> None:
        """SIGKILL, which a frozen process heeds too, to whatever runs in the process group of these ranks;
        None: of all."""
        pids = self._pids()
        for rank in pids if ranks is None else ranks:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pids[rank], signal.SIGKILL)
        until = time.monotonic() + GRACE_S
        while (
            any(self._codes()[rank] is None for rank in (pids if ranks is None else ranks))
            and time.monotonic() < until
        ):
            time.sleep(0.01)

    def _pids(self) -> dict[int, int]:
        return self._pcontext.pids() if isinstance(self._pcontext, SubprocessContext) else {}

    # torch's parameters have changed between versions
    def _shutdown(self, *arguments: Any, **named: Any) -> None:
        self._kill()
        if self.replacing:
            self.replacing.close()
        super()._shutdown(*arguments, **named)


# ------------------------------------------------------------ how it ended


@dataclass(frozen=True)
class Report:
    """What a rank wrote when it failed; see group.report."""

    rank: int
    code: int
    kind: str
    text: str
    trace: str
    time: float


def judge(
    bad: Mapping[int, int],
    codes: Mapping[int, int | None],
    reports: Sequence[Report],
    stops: Sequence[int],
    last_words: Callable[[int], str | None],
    shortage: Callable[[], tuple[str, str] | None] = lambda: None,
    begun: bool = True,
) -> tuple[PetuneError | KeyboardInterrupt, bool]:
    """Which of all that happened is the cause, as the error to raise, and whether starting again may help.

    `bad`: rank and exit code of those seen to fail first, negative for a signal; `codes`: of all in the end;
    `reports`: by time. `shortage`: what the kernel says of memory, where it has killed for want of it.
    `begun`: whether the ranks have met; before, SIGTERM and SIGINT are a stop, whoever sent them.
    """
    asked = {*stops}
    if not begun:
        asked |= {*_ASKS}
        bad = {rank: -signal.SIGINT if code == INTERRUPTED else code for rank, code in bad.items()}
        reports = [report for report in reports if report.code != INTERRUPTED]
    if stops.count(signal.SIGINT) > 1 or INTERRUPTED in bad.values():
        return KeyboardInterrupt(), False
    causes = [report for report in reports if report.kind != "consequence"]
    failures = [report for report in causes if report.code != STOPPED]
    if first := [report for report in failures if report.rank in bad]:
        return _reported(first[0], causes)
    killed = {rank: -code for rank, code in bad.items() if code < 0}
    if unasked := {rank: number for rank, number in killed.items() if number not in asked}:
        lack = shortage() if signal.SIGKILL in unasked.values() else None
        return (_starved(unasked, *lack), False) if lack else (_killed(unasked, last_words), True)
    if told := failures or causes:
        return _reported(told[0], causes)
    if killed or (stops and not begun):
        return _stopped([*killed.values(), *stops][0], begun), False
    if reports and all(code == DistributedError.code for code in bad.values()):
        return _reported(reports[0], reports)
    rank, code = next((rank, code) for rank, code in [*bad.items(), *codes.items()] if code)
    kind = _KINDS.get(code, PetuneError)
    return kind(f"rank {rank} ended with exit code {code} and did not say why", found=last_words(rank)), False


def _reported(report: Report, reports: Sequence[Report]) -> tuple[PetuneError | KeyboardInterrupt, bool]:
    """The error a rank reported. The rank is named unless the text names another, or all say the same."""
    if report.code == INTERRUPTED:
        return KeyboardInterrupt(), False
    texts = [other.text for other in reports]
    shared = len(texts) > 1 and len(set(texts)) == 1
    plain = shared or report.kind != "own" or report.code == STOPPED
    error = _KINDS.get(report.code, PetuneError)(
        report.text if plain else f"rank {report.rank}: {report.text}"
    )
    if report.trace:
        error.add_note(report.trace)
    return error, report.kind == "lost"


def _stopped(number: int, begun: bool) -> Stopped:
    """A stop of ranks that did not listen for one, and so had nothing to save."""
    name = signal.Signals(number).name
    if begun:
        return Stopped(
            f"stopped by {name} outside training", remedy="go on from the last checkpoint with --resume"
        )
    return Stopped(f"stopped by {name} before training began; nothing was written", remedy="start it again")


def _who(signals: Mapping[int, int]) -> str:
    return ", ".join(
        f"rank {rank} was killed by {signal.Signals(number).name}" for rank, number in signals.items()
    )


def _starved(signals: Mapping[int, int], limit: str, found: str) -> MachineError:
    """Ranks that the kernel killed because the host's memory, or what this job may have of it, ran out."""
    knobs = (
        "fewer processes, a smaller model or dtype: bf16, a smaller batch_size or data.max_length, or a"
        " higher limit"
    )
    remedy = f"take {knobs}; then go on from the last checkpoint with --resume"
    return MachineError(
        f"the host's memory ran out: {_who(signals)}", expected=limit, found=found, remedy=remedy
    )


def _killed(signals: Mapping[int, int], last_words: Callable[[int], str | None]) -> DistributedError:
    """Ranks that died of signals nobody here sent."""
    memory = "if memory ran out, take a smaller batch_size; " if signal.SIGKILL in signals.values() else ""
    words = next((words for rank in signals if (words := last_words(rank))), None)
    found = words and f"as its last line: {words}"
    remedy = f"{memory}go on from the last checkpoint with --resume"
    return DistributedError(_who(signals), found=found, remedy=remedy)
