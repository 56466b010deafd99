"""The ranks of one run as a process group: joining it, agreeing at the start, meeting, and saying who failed.

Everything but tensors goes through the rendezvous store as text, so nothing is pickled. A thread of every
rank writes a beat to the store once a second and reads the others': a rank that is killed or frozen is named,
whatever the main thread waits for, and a process whose peers or launcher are gone does not outlive them for
long.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from petune.errors import DistributedError, MachineError, PetuneError, Problem, Stopped
from petune.log import printable, warn
from petune.parallel.launch import lasting, orders
from petune.parallel.launch.orders import Standing, replaces
from petune.parallel.launch.rendezvous import (
    ERROR_FILE,
    Place,
    client,
    connect,
    first_line,
    joined,
    lacks_files,
    launched,
    own_gpu,
    place,
    restarted,
    started,
    stay_on_this_machine,
    too_many_files,
    write_error_file,
)
from petune.parallel.launch.seal import Sealed, refused

__all__ = [
    "PeerLost",
    "agree",
    "at_step",
    "barrier",
    "check",
    "explain",
    "gather",
    "join",
    "joined",
    "launched",
    "leave",
    "limit",
    "place",
    "quit_process",
    "rejoin",
    "replaces",
    "report",
    "restarted",
    "settle",
    "started",
    "survives",
    "unsettle",
]

BEAT_S = 1.0
LOOKS = 4  # at whether a rank was stopped, for every beat
STOPPED = "stopped"  # the key that such a rank writes behind its beat
SILENT_S = 3 * BEAT_S  # a rank that has not beaten for this long is named when a collective fails
FORMING_S = 3.0  # how long a rank may take to leave a group that is only being formed and has lost another
SPARE_S = 1.0  # the main thread's own timeout may come first: it unwinds better than a thread can

Kind = Literal["own", "lost", "consequence"]
DeviceType = Literal["cpu", "cuda"]


class PeerLost(DistributedError):
    """Another rank failed. `kind`: lost, this says which rank and how; consequence, only that the group
    broke, and others know why."""

    def __init__(self, what: str, kind: Kind, remedy: str | None = None) -> None:
        super().__init__(what, remedy=remedy)
        self.kind: Kind = kind


# ------------------------------------------------------------ joining and leaving


@dataclass
class _Session:
    """What this module remembers while the process is in a group. `server` keeps the store alive on the rank
    that holds it."""

    place: Place
    store: Sealed
    for_torch: Sealed  # which torch holds the C++ side of alone
    server: Store | None
    pulse: Pulse
    device_type: DeviceType
    timeout_s: float
    start_timeout_s: float
    meetings: int = 0


_session: _Session | None = None
_reported: int | None = None


def join(device_type: DeviceType, timeout_s: float = 60, start_timeout_s: float = 300) -> tuple[int, int]:
    """Join the group this process was started for: (rank, number of ranks), with torch's default group made
    (gloo, or nccl for cuda).

    `timeout_s`: how long a collective may wait and a rank be silent; `start_timeout_s`: how long to wait for
    every rank to start. Raises DistributedError naming who is missing or what cannot be reached, MachineError
    without a GPU for this rank.
    """
    here = place()
    if here is None:
        raise DistributedError(
            "this process is not one of several ranks", remedy="start it with petune train, torchrun or srun"
        )
    if _session is not None:
        raise DistributedError("this process has joined a group already")
    _enter(here, device_type, timeout_s, start_timeout_s)
    return here.rank, here.world


def _enter(here: Place, device_type: DeviceType, timeout_s: float, start_timeout_s: float) -> None:
    """Meet the others and make torch's default group, those of this generation."""
    global _session
    stay_on_this_machine(here)
    device = own_gpu(here) if device_type == "cuda" else None
    server, store = connect(here, start_timeout_s)
    _check_in(here, store, start_timeout_s)
    pulse = Pulse(here, client(here, start_timeout_s), timeout_s)
    for_torch = client(here, timeout_s)
    _session = _Session(here, store, for_torch, server, pulse, device_type, timeout_s, start_timeout_s)
    pulse.start()
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=PrefixStore("torch", for_torch) if device_type == "cpu" else for_torch.beneath("torch"),
            rank=here.rank,
            world_size=here.world,
            timeout=timedelta(seconds=timeout_s),
            # bound to it, NCCL splits groups off, which ends in a crash after an abort
            device_id=None if orders.generation() else device,
        )
    except Exception as error:
        raise explain(error) from None


def inside() -> bool:
    """Whether this process is in a group now."""
    return _session is not None


def leave() -> None:
    """End a good run: wait for every rank, then take the group down. After a failure use `quit_process`
    instead."""
    global _session
    if _session is None:
        return
    barrier()
    session = _session
    # or one would wait for what another, who does not beat any more, said at the last meeting
    _all_say(session, "met", 5)
    session.pulse.stop()
    dist.destroy_process_group()
    _all_say(session, "gone", 5 if session.server is not None else 0)  # whoever holds the store goes last
    _tell_refused()
    _session = None


def _all_say(session: _Session, word: str, limit_s: float) -> None:
    """Say a word to all, and wait until all have said it, for `limit_s` seconds at most."""
    keys = [f"{word}/{rank}" for rank in range(session.place.world)]
    own = keys[session.place.rank]
    with suppress(RuntimeError):
        session.pulse.kept = {**session.pulse.kept, own: "1"}
        session.store.set(own, "1")
        _wait(session.store, keys, time.monotonic() + limit_s)


def _tell_refused() -> None:
    """Say how many values of somebody else were met."""
    if number := refused():
        warn(
            f"the rendezvous held {number} values that are not of this run; they were ignored: who else"
            " writes to its port?"
        )


def quit_process(code: int) -> NoReturn:
    """End this process at once with `code`: torch's threads hang or abort an ordinary exit while a collective
    is under way."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def limit(groups: Iterable[dist.ProcessGroup]) -> None:
    """Give `groups` the timeout of the default group; torch gives every new group half an hour."""
    if _session is not None:
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_session.timeout_s), group)


def _check_in(here: Place, store: Sealed, limit_s: float) -> None:
    """Wait until every rank is here. Raises DistributedError with those that are not."""
    until, keys = time.monotonic() + limit_s, [f"beat/{rank}" for rank in range(here.world)]
    try:
        while True:
            # again and again: somebody else may have written over it
            store.set(keys[here.rank], json.dumps(asdict(Beat())))
            now = time.monotonic()
            values = _wait(store, keys, min(until, now + BEAT_S))
            missing = [rank for rank, value in enumerate(values) if value is None]
            if not missing or now > until:
                break
            check()
            if orders.given().ends:
                raise PeerLost("a rank was lost and is not replaced", "consequence")
    except RuntimeError:
        raise DistributedError(f"{here.holder}, which holds the rendezvous, is gone") from None
    if missing:
        if here.holds:
            time.sleep(SPARE_S)  # the others find out by its store
        raise DistributedError(
            f"{_ranks(missing)} of {here.world} did not start",
            found=f"waited {limit_s:.0f} s",
            remedy=f"start every rank; each must reach {here.host}:{here.port}",
        )


def _wait(store: Sealed, keys: list[str], until: float) -> list[str | None]:
    """Wait for keys, one per rank, and read them; None for those that are missing at monotonic time
    `until`."""
    values: list[str | None] = [None] * len(keys)
    pause = 0.002
    while True:
        values = [
            store.read(key) if value is None else value for key, value in zip(keys, values, strict=True)
        ]
        if None not in values or time.monotonic() > until:
            return values
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


# ------------------------------------------------------------ meeting


def gather(text: str) -> list[str]:
    """What every rank gives, by rank. Waits as long as all are alive. Raises PeerLost when one fails or falls
    silent meanwhile."""
    session = _required()
    session.pulse.formed = True  # nobody meets the others before
    keys = [f"meet/{session.meetings}/{rank}" for rank in range(session.place.world)]
    own = keys[session.place.rank]
    session.pulse.kept = {**session.pulse.kept, own: text}
    session.store.set(own, text)
    while None in (values := _wait(session.store, keys, time.monotonic() + 0.3)):
        if lost := session.pulse.lost(session.timeout_s):
            raise lost
    session.pulse.kept = {own: text}
    if session.meetings:  # whoever is here has read what the last meeting was about
        session.store.delete_key(f"meet/{session.meetings - 1}/{session.place.rank}")
    session.meetings += 1
    return [value for value in values if value is not None]


def barrier() -> None:
    """Wait, however long it takes, until every rank is here: for what rank 0 does alone. Raises PeerLost as
    `gather` does."""
    gather("")


def agree(facts: Mapping[str, str]) -> None:
    """Raise DistributedError, the same on every rank, unless all ranks have the same facts: recipe, data,
    versions, model."""
    everyone = [json.loads(text) for text in gather(json.dumps(dict(facts)))]
    problems = []
    for key in dict.fromkeys(key for own in everyone for key in own):
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(everyone):
            ranks.setdefault(str(own.get(key, "nothing")), []).append(rank)
        if len(ranks) > 1:
            first, *others = (f"{value} ({_ranks(which)})" for value, which in ranks.items())
            problems.append(
                Problem(f"the ranks do not have the same {key}", expected=first, found=", ".join(others))
            )
    if problems:
        barrier()  # everyone has read, so nobody takes the store away
        raise DistributedError(
            [*problems, Problem("every rank needs the same recipe, data, model and packages")]
        )


def at_step(step: int) -> None:
    """Note the step this rank is at: others name it should this rank fall silent."""
    if _session is not None:
        _session.pulse.own.step = step


# ------------------------------------------------------------ outliving another rank


_standing = Standing()


def settle(whole: str | None) -> None:
    """From here on this rank can wait, with its model where it is, until a rank that is lost has been
    replaced.

    whole: why all ranks of this plan must be started anew instead, if so. Without petune's launcher and
    --restarts nothing happens.
    """
    _stand(Standing(orders.generation(), whole=whole))


def unsettle() -> None:
    """From here on the loss of a rank is the end of this one."""
    _stand(Standing())


def _stand(standing: Standing) -> None:
    global _standing
    if replaces() and _session is not None:
        orders.stand(_session.place.rank, standing)
        _standing = standing


def _replaced() -> PeerLost:
    return PeerLost("a rank was lost and is being replaced", "consequence")


def check() -> None:
    """Raise PeerLost if a rank has been replaced: what collectives gave since then is worth nothing, as
    NCCL's were aborted."""
    if orders.newer():
        raise _replaced()


def survives(error: Exception) -> bool:
    """Whether `error` comes of the loss of a rank that petune's launcher has replaced, which is waited for.
    Then `rejoin`."""
    if not replaces():
        return False
    if not orders.newer() and not isinstance(explain(error), PeerLost):
        return False
    return _await_order(_required().pulse)


def _await_order(pulse: Pulse) -> bool:
    """Tell the launcher who is silent, which kills them, and wait for its word; whether ranks have been
    replaced."""
    if silent := pulse.silent(SILENT_S):
        _stand(
            replace(
                _standing, silent={str(rank): pulse.silence_of(rank, age) for rank, age in silent.items()}
            )
        )
    until = time.monotonic() + SILENT_S + 2 * BEAT_S
    while not (ordered := orders.newer()) and not orders.given().ends and time.monotonic() < until:
        time.sleep(orders.POLL_S)
    return ordered


# the whole group, from when this rank has aborted it until it forgets it
_aborted: dist.ProcessGroup | None = None


def _free_main_thread() -> None:
    """Abort NCCL's collectives, in which the main thread may wait for a rank that is gone; gloo's end when
    its connections close.

    Once freed, the main thread finds no group to begin another collective on: it would make a connection of
    one that is being ended.
    """
    global _aborted
    if _session is None or _session.device_type != "cuda" or not dist.is_initialized():
        return
    torchs = dist.distributed_c10d
    lasting.refuse()
    _aborted = torchs.GroupMember.WORLD
    torchs._update_default_pg(None)
    _abort_at_once(list(torchs._world.pg_names))


def _forget_groups() -> None:
    """Have torch forget its groups, so that others can be made."""
    global _aborted
    torchs = dist.distributed_c10d
    if _aborted is not None:
        torchs._world.pg_names.clear()  # torch would abort them once more
        torchs._update_default_pg(_aborted)
        torchs._abort_process_group()
        _aborted = None
    elif dist.is_initialized():
        dist.destroy_process_group()
    torchs._world.group_count = 0  # torch names groups by it, and counts one that was only half made


def _abort_at_once(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort groups side by side: freeing one waits for the device, and so for the collective of another that
    nobody has aborted."""
    threads = [threading.Thread(target=group.abort, name="petune-abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rejoin() -> None:
    """Leave the broken group and join the one of the newest order in the same place. Raises as `join`;
    PeerLost on yet another loss."""
    session = _required()
    session.pulse.ended.set()
    session.pulse.threads[1].join()  # it may be about to abort
    _free_main_thread()
    lasting.release()
    _forget_groups()
    gc.collect()  # whoever waits for this rank is freed when the last reference to the old connections goes
    os.environ[orders.GENERATION] = str(orders.given().generation)
    _enter(session.place, session.device_type, session.timeout_s, session.start_timeout_s)


# ------------------------------------------------------------ the beat


@dataclass
class Beat:
    """What a rank says of itself once a second."""

    count: int = 0
    step: int = 0
    failed: str | None = None
    stopped: bool = False  # what failed is that this rank was told to stop before there was anything to save
    left: bool = False


class Pulse:
    """Writes this rank's beat, reads the others', and ends the process when one is silent and the main thread
    cannot see it.

    One thread beats, another watches, because a read of the store has no timeout: a frozen store would hold a
    single thread for good. Ages are counted from when something was seen to change here, so clocks of
    machines need not agree.
    """

    def __init__(self, here: Place, store: Sealed, silence_s: float) -> None:
        self.here, self.store, self.silence_s = here, store, silence_s
        self.own = Beat()
        # what others may still have to read: written again with each beat, lest somebody wrote over it
        self.kept: dict[str, str] = {}
        self.beats = [Beat() for _ in range(here.world)]
        self.answered = time.monotonic()  # when the store last did
        self.heard = [self.answered] * here.world
        self.broken = False  # the connection to the store is
        self.formed = False  # the groups of this generation are, on this rank
        self.ended = threading.Event()
        self.threads = [
            threading.Thread(target=work, name="petune-pulse", daemon=True)
            for work in (self._beat, self._watch)
        ]

    def start(self) -> None:
        """Begin to beat."""
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Say that this rank leaves in peace, and stop."""
        self.ended.set()
        self.threads[0].join(5)
        self.own.left = True
        with suppress(RuntimeError):
            self.publish(self.store)

    def publish(self, store: Sealed) -> None:
        """Write the own beat through `store`: a client serves one thread, and this is called by two."""
        store.set(f"beat/{self.here.rank}", json.dumps(asdict(self.own)))

    def _beat(self) -> None:
        looks = 0
        while not self.ended.wait(BEAT_S / LOOKS):
            looks += 1
            try:
                if looks % LOOKS and self.store.read(STOPPED) is None:
                    continue
                self.own.count += 1
                self.publish(self.store)
                for key, said in self.kept.items():
                    self.store.set(key, said)
                texts = [self.store.read(f"beat/{rank}") for rank in range(self.here.world)]
            except RuntimeError:
                self.broken = True
                return
            self.answered = time.monotonic()
            for rank, text in enumerate(texts):
                beat = _beat_of(text)
                # an older one is a copy
                if beat is not None and beat.count >= self.beats[rank].count and beat != self.beats[rank]:
                    self.beats[rank], self.heard[rank] = beat, self.answered
                    if beat.stopped and rank != self.here.rank and callable(signal.getsignal(signal.SIGTERM)):
                        # the handler of this rank knows best how to stop here
                        os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self.ended.wait(BEAT_S / 4):
            now = time.monotonic()
            if now - last > SILENT_S:  # this very process was frozen or starved: it cannot judge the others
                self.answered, self.heard = now, [now] * self.here.world
            last = now
            # leave the main thread a moment to end by itself
            if self.broken and not self.ended.wait(SILENT_S):
                _give_up(PeerLost(f"{self.here.holder}, which holds the rendezvous, is gone", "consequence"))
            elif orders.newer():
                return self._follow()
            elif (lost := self._silence(self.silence_s + SPARE_S)) and not (
                replaces() and _await_order(self)
            ):
                _give_up(lost)

    def _follow(self) -> None:
        """See that the main thread leaves a broken group. Where it cannot, as gloo may wait long for a dead
        rank, this one is replaced.

        That is soon where groups are being formed, which takes no time: gloo waits for the connection of a
        dead rank as long as for any answer, and for those of a mesh, which have no limit yet, half an hour.
        One that has its groups may compute or save meanwhile.
        """
        _free_main_thread()
        if not self.ended.wait(self.silence_s if self.formed else FORMING_S):
            os.kill(os.getpid(), signal.SIGKILL)

    def silent(self, limit_s: float) -> dict[int, float]:
        """Ranks not heard for `limit_s` seconds, and for how long; empty while the store itself does not
        answer."""
        now = time.monotonic()
        if now - self.answered > SILENT_S or self.ended.is_set():
            return {}
        ages = {
            rank: now - heard
            for rank, heard in enumerate(self.heard)
            if rank != self.here.rank and not self.beats[rank].left
        }
        return {rank: age for rank, age in ages.items() if age > limit_s}

    def _silence(self, limit_s: float) -> PeerLost | None:
        if silent := self.silent(limit_s):
            who = [self.silence_of(rank, age) for rank, age in silent.items()]
            return PeerLost(
                ", ".join(who),
                "lost",
                remedy="it is frozen, or its machine or network is gone; go on with --resume",
            )
        if (age := time.monotonic() - self.answered) > limit_s:
            what = f"{self.here.holder}, which holds the rendezvous, has not answered for {age:.0f} s"
            return PeerLost(
                what, "lost", remedy="it is frozen, or its machine or network is gone; go on with --resume"
            )
        return None

    def silence_of(self, rank: int, age: float) -> str:
        """What to say of a rank that is silent."""
        return f"rank {rank} has not answered for {age:.0f} s (last seen at step {self.beats[rank].step})"

    def lost(self, limit_s: float) -> PeerLost | Stopped | None:
        """Who has failed, was stopped, or has been silent for `limit_s` seconds, as an error; None while all
        is well."""
        if orders.newer():
            return _replaced()
        for rank, beat in enumerate(self.beats):
            if beat.stopped and rank != self.here.rank:
                return Stopped(beat.failed or "stopped")
            if beat.failed and rank != self.here.rank:
                return PeerLost(f"rank {rank} failed: {beat.failed}", "consequence")
        return self._silence(limit_s)


def _beat_of(text: str | None) -> Beat | None:
    """A rank's beat; None of what is none."""
    try:
        return None if text is None else Beat(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _give_up(error: PeerLost) -> NoReturn:
    """End the process from the beating thread: the main thread waits in a collective that no exception
    reaches."""
    code = report(error) if _reported is None else _reported
    quit_process(code)


# ------------------------------------------------------------ saying who failed


_SIGNS = re.compile(
    r"gloo|pair closure|Connection (closed|reset|refused)|Broken pipe|NCCL|ProcessGroup|Socket", re.IGNORECASE
)


def explain(error: BaseException) -> BaseException:
    """What a failed collective means: which rank is frozen, has failed or is gone. Any other error is given
    back as it is."""
    if isinstance(error, PetuneError):
        return error
    if lacks_files(error):
        return too_many_files()
    if not isinstance(error, RuntimeError):
        return error
    if not isinstance(error, dist.DistError) and not _SIGNS.search(str(error)):
        return error
    if _session is None:
        return DistributedError("the process group failed", found=first_line(error))
    session, late = _session, "timed out" in str(error).lower()
    # The silence of a rank that froze a moment ago is not long enough yet; of one that died, petune's
    # launcher knows at once.
    until = time.monotonic() + (SILENT_S + 2 * BEAT_S if late or not launched() else 0)
    while not (lost := session.pulse.lost(SILENT_S)) and time.monotonic() < until:
        time.sleep(0.1)
    if lost:
        return lost
    if late:
        beats = session.pulse.beats
        steps = ", ".join(f"rank {rank} at step {beat.step}" for rank, beat in enumerate(beats))
        return DistributedError(
            f"the ranks are alive but did not meet within {session.timeout_s:.0f} s", found=steps
        )
    return PeerLost(f"the connection to another rank broke: {first_line(error)}", "consequence")


def report(error: BaseException) -> int:
    """Tell the launcher, and the other ranks, how this rank failed; its exit code.

    The first report counts. Under torchrun and srun, where nobody else speaks for it, the rank prints its
    error itself.
    """
    global _reported
    error = explain(error)
    code, text = _spoken(error)
    if _reported is not None:
        return _reported
    _reported = code
    here = place()
    kind = error.kind if isinstance(error, PeerLost) else "own"
    trace = "".join(traceback.format_exception(error)) if code == 1 else ""
    if path := os.environ.get(ERROR_FILE):
        with suppress(OSError):
            write_error_file(Path(path), here.rank if here else 0, code, kind, text, trace)
    if not launched():
        print(printable(f"rank {here.rank}: {text}" if here else text), file=sys.stderr, flush=True)
    if _session is not None and kind == "own":
        _session.pulse.own.failed, _session.pulse.own.stopped = text, code == Stopped.code
        with suppress(RuntimeError):
            _session.pulse.publish(_session.store)
            if code == Stopped.code:
                _session.store.set(STOPPED, "1")
        if code == Stopped.code and _session.server is not None:
            time.sleep(2 * BEAT_S / LOOKS)  # the others read it in this process
    _tell_refused()
    return code


def _spoken(error: BaseException) -> tuple[int, str]:
    """The exit code and the words for any error."""
    if isinstance(error, PetuneError):
        return error.code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return MachineError.code, f"out of memory: {first_line(error)}"
    return 1, f"internal error: {type(error).__name__}: {first_line(error)}"


def _required() -> _Session:
    if _session is None:
        raise DistributedError("this process has not joined a group")
    return _session


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
