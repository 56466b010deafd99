"""The heartbeat of the ranks: each shows that it lives, and one that falls silent is named.

A thread of every rank writes a beat to the store, up to four times a second. Who reads them are watchers, one
for every eight ranks in a row, which are those of a host as most hosts are: a watcher's own beat says who of
its ranks is silent and for how long, rank 0's own who of all is, and that one beat is what everybody reads.
So all beats together cost the store a few requests a rank, where everyone reading everyone's costs as many as
there are pairs.

Nobody is trusted to live: the ranks of a watcher that is silent are read by rank 0 itself, and a rank 0 that
is silent is noticed by everyone. A rank that fails says so under a key that rank 0 reads and passes on.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from petune.errors import DistributedError, Stopped
from petune.parallel.launch import orders
from petune.parallel.launch.rendezvous import Membership
from petune.parallel.launch.seal import Sealed

BEAT_S = 1.0  # between two beats of a rank, where there are many
LOOKS = 4  # beats in that time where there are few
MANY = 512  # beats in that time of all ranks together, from which on each makes fewer
SILENT_S = 3 * BEAT_S  # a rank that has not beaten for this long is named when a collective fails
SPARE_S = 1.0  # the main thread's own timeout may come first: it unwinds better than a thread can
HOST = 8  # ranks whose beats one watcher reads; which hosts they are on does not matter
NAMED = 32  # ranks that a beat tells of at the most, those silent longest: all read it, again and again
SHOWN = 64  # ranks of a run, up to which each tells of its steps, for people who look at it
FAILED = "failed"  # the key under which a rank says that it has failed

# whose end it is: this rank's own, that of one that was lost, or only what followed
EndKind = Literal["own", "lost", "consequence"]


class PeerLost(DistributedError):
    """Another rank failed. `kind`: lost, this says which rank and how; consequence, only that the group
    broke, and others know why."""

    def __init__(self, what: str, kind: EndKind, remedy: str | None = None) -> None:
        super().__init__(what, remedy=remedy)
        self.kind: EndKind = kind


def replaced() -> PeerLost:
    """The error of a rank that finds another replaced."""
    return PeerLost("a rank was lost and is being replaced", "consequence")


@dataclass
class Beat:
    """What a rank says of itself. silent: of the ranks it watches those not heard for two beats or more, each
    with seconds and the step it was last at. failed: on rank 0, the Failure of a rank, as a mapping. work:
    seconds of its last step, the most bytes it has held, and its device, where people look at ranks."""

    count: int = 0
    step: int = 0
    left: bool = False
    silent: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    failed: Mapping[str, Any] | None = None
    work: tuple[float, int, str] | None = None

    @property
    def text(self) -> str:
        """As it is written to the store, without what is at its default."""
        return json.dumps({name: value for name, value in vars(self).items() if value not in (None, {})})


def beat_of(text: str | None) -> Beat | None:
    """A rank's beat; None of what is none."""
    try:
        return None if text is None else Beat(**json.loads(text))
    except (ValueError, TypeError):
        return None


def beat_key(rank: int) -> str:
    """Where the beat of a rank is found."""
    return f"beat/{rank}"


@dataclass(frozen=True)
class Failure:
    """What a rank says when it fails. stopped: it was told to stop before there was anything to save."""

    rank: int
    text: str
    stopped: bool


@dataclass(frozen=True)
class Health:
    """A rank as others heard it last: how long ago, and what it said. work: as in Beat; None where it is not
    known here."""

    rank: int
    age_s: float
    step: int
    work: tuple[float, int, str] | None = None


class Pulse:
    """Writes this rank's beat, reads those it has to, and tells of ranks that are silent while the main
    thread cannot see it.

    One thread beats, another watches, because a read of the store has no timeout: a frozen store would hold a
    single thread for good. Ages are counted from when something was seen to change here, so clocks of
    machines need not agree; one that is handed on may be too young by a beat for each of two hands. `lost` is
    called by the watching thread with whoever is gone, as long as that lasts; `follow` once, when the
    launcher has replaced a rank.
    """

    def __init__(
        self,
        here: Membership,
        store: Sealed,
        silence_s: float,
        lost: Callable[[PeerLost], None],
        follow: Callable[[], None],
    ) -> None:
        self.here, self.store, self.silence_s = here, store, silence_s
        self.on_loss, self.on_order = lost, follow
        self.beat_s = BEAT_S * min(1.0, max(1 / LOOKS, here.world / MANY))
        self.watch_s = BEAT_S * min(2.0, max(1 / LOOKS, here.world / MANY))
        self.own = Beat()
        # what others may still have to read, by who has said it: written again with each beat, lest somebody
        # wrote over it
        self.kept: dict[str, Mapping[str, str]] = {}
        self.wards = _wards(here.rank, here.world) if here.rank % HOST == 0 else ()
        self.others = tuple(range(HOST, here.world, HOST)) if here.rank == 0 else (0,)
        self.answered = time.monotonic()  # when the store last did
        # the newest beat of every rank that is read here, and when it was seen to change
        self.heard: dict[int, tuple[Beat, float]] = {
            rank: (Beat(), self.answered) for rank in (*self.wards, *self.others)
        }
        self.failure: Failure | None = None  # of another rank
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
            self.store.set(beat_key(self.here.rank), self.own.text)

    def fail(self, text: str, stopped: bool, store: Sealed) -> None:
        """Tell all ranks that this one has failed, through `store`: a client serves one thread."""
        failure = vars(Failure(self.here.rank, text, stopped))
        if self.here.rank == 0:
            self.own.failed = failure
            key, said = beat_key(0), self.own.text
        else:
            key, said = FAILED, json.dumps(failure)
            self.kept[FAILED] = {key: said}
        with suppress(RuntimeError):
            store.set(key, said)

    # ------------------------------------------------------------ the thread that beats

    def _beat(self) -> None:
        while not self.ended.wait(self.beat_s):
            self.own.count += 1
            try:
                self._listen()
                self._hear_of_failure()
                self.own.silent = self._told()
                self.store.set(beat_key(self.here.rank), self.own.text)
                for kept in list(self.kept.values()):
                    for key, said in kept.items():
                        self.store.set(key, said)
            except RuntimeError:
                self.broken = True
                return
            self.answered = time.monotonic()

    def _listen(self) -> None:
        """Read the beats that this rank has to, and note which have changed."""
        now, heard = time.monotonic(), self.heard
        if now - self.answered > SILENT_S:
            heard = self._as_if_now()
        wanted = {rank: heard[rank] for rank in (*self.wards, *self.others)}
        for watcher in self.others if self.here.rank == 0 else ():
            beat, at = heard[watcher]
            if now - at > 2 * BEAT_S:  # nobody else reads its ranks; what it said of them last goes on
                for rank in _wards(watcher, self.here.world):
                    age, step = beat.silent.get(str(rank), (0.0, 0))
                    wanted[rank] = heard.get(rank, (Beat(step=step), at - age))
        texts = self.store.read_all([beat_key(rank) for rank in wanted])
        now = time.monotonic()
        for (rank, (old, _)), text in zip(list(wanted.items()), texts, strict=True):
            beat_now = beat_of(text)
            # an older one is a copy
            if beat_now is not None and beat_now.count >= old.count and beat_now != old:
                wanted[rank] = beat_now, now
        self.heard = wanted

    def _as_if_now(self) -> dict[int, tuple[Beat, float]]:
        """What was heard, at this moment: a process that was frozen or starved cannot judge the others."""
        now = time.monotonic()
        return {rank: (beat, now) for rank, (beat, _) in self.heard.items()}

    def _told(self) -> dict[str, tuple[float, int]]:
        """What the beat of this rank says of others: a watcher's of its wards, rank 0's of all."""
        if not self.wards:
            return {}
        late = [
            (age, rank, step)
            for rank, (age, step) in self._ages().items()
            if age > 2 * BEAT_S and (rank in self.wards or self.here.rank == 0)
        ]
        return {str(rank): (age, step) for age, rank, step in sorted(late, reverse=True)[:NAMED]}

    def _hear_of_failure(self) -> None:
        """Note that another rank has failed: rank 0 by its word, the others by rank 0's."""
        if self.failure is not None:
            return
        if self.here.rank == 0:
            text = self.store.read(FAILED)
            said = None if text is None else json.loads(text)
            self.own.failed = said or self.own.failed
        else:
            said = self.heard[0][0].failed
        if said is None or said["rank"] == self.here.rank:
            return
        self.failure = Failure(**said)
        if self.failure.stopped and callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)  # the handler of this rank knows best how to stop here

    # ------------------------------------------------------------ the thread that watches

    def _watch(self) -> None:
        last = time.monotonic()
        while not self.ended.wait(self.watch_s):
            now = time.monotonic()
            if now - last > SILENT_S:
                self.answered, self.heard = now, self._as_if_now()
            last = now
            # leave the main thread a moment to end by itself
            if self.broken and not self.ended.wait(SILENT_S):
                self.on_loss(
                    PeerLost(f"{self.here.holder}, which holds the rendezvous, is gone", "consequence")
                )
            elif orders.newer():
                return self.on_order()
            elif lost := self._silence(self.silence_s + SPARE_S):
                self.on_loss(lost)

    # ------------------------------------------------------------ who is silent

    def _ages(self) -> dict[int, tuple[float, int]]:
        """Seconds since each rank was heard, as far as it is known here, with the step it was at; those who
        have left are not among them."""
        now, found = time.monotonic(), dict[int, tuple[float, int]]()
        heard = self.heard
        for rank, (beat, at) in heard.items():
            if not beat.left:
                found[rank] = now - at, beat.step
        for beat, at in heard.values():
            if now - at <= 2 * BEAT_S:  # the word of one that is silent itself is worth nothing
                for name, (age, step) in beat.silent.items():
                    found.setdefault(int(name), (age + now - at, step))
        found.pop(self.here.rank, None)
        return found

    def health(self) -> list[Health]:
        """This rank and those it hears of: on rank 0 its watch, the other watchers, and who is silent."""
        heard = self.heard
        found = [Health(self.here.rank, 0.0, self.own.step, self.own.work)]
        for rank, (age, step) in self._ages().items():
            found.append(Health(rank, age, step, heard[rank][0].work if rank in heard else None))
        return sorted(found, key=lambda one: one.rank)

    def silent(self, limit_s: float) -> dict[int, str]:
        """What to say of each rank not heard for `limit_s` seconds; nothing while the store is silent."""
        if time.monotonic() - self.answered > SILENT_S or self.ended.is_set():
            return {}
        return {
            rank: f"rank {rank} has not answered for {age:.0f} s (last seen at step {step})"
            for rank, (age, step) in sorted(self._ages().items())
            if age > limit_s
        }

    def _silence(self, limit_s: float) -> PeerLost | None:
        who = ", ".join(self.silent(limit_s).values())
        if not who and (age := time.monotonic() - self.answered) > limit_s:
            who = f"{self.here.holder}, which holds the rendezvous, has not answered for {age:.0f} s"
        remedy = "it is frozen, or its machine or network is gone; go on with --resume"
        return PeerLost(who, "lost", remedy=remedy) if who else None

    def lost(self, limit_s: float) -> PeerLost | Stopped | None:
        """Who has failed, stopped, or been silent for `limit_s` seconds, as an error, or None."""
        if orders.newer():
            return replaced()
        if (failure := self.failure) is not None:
            if failure.stopped:
                return Stopped(failure.text or "stopped")
            return PeerLost(f"rank {failure.rank} failed: {failure.text}", "consequence")
        return self._silence(limit_s)


def _wards(watcher: int, world: int) -> tuple[int, ...]:
    """The ranks whose beats a watcher reads: those of its host."""
    return tuple(range(watcher + 1, min(watcher + HOST, world)))
