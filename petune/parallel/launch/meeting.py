"""Meetings of all ranks through the rendezvous store, as text: who is there, what each gives, whether all
agree.

One collector, rank 0, waits for what the others give and publishes it as classes of equal values: four
requests a rank and meeting, and few bytes where all give the same. In a form where each reads what every
other gives a meeting is as many requests as there are pairs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from petune.errors import DistributedError, Problem
from petune.parallel.launch import orders
from petune.parallel.launch.beats import SPARE_S, Beat, PeerLost, Pulse, beat_key, beat_of, replaced
from petune.parallel.launch.rendezvous import Membership, note_meeting
from petune.parallel.launch.seal import Sealed

PAUSE_S = 0.002  # before the second look at the store; each is longer than the one before
LONGEST_S = 0.1  # of them, where ranks are few
LOOKS_A_SECOND = 1000  # at the store, of all ranks but the collector together, while they wait for long
HERE = "here"  # the key under which rank 0 says who did not start
_TOLD = 32  # numbers and rows of ranks that an error names

Runs = list[tuple[int, int]]  # ranks in ascending order, as first and last of each run without a gap


def check_in(here: Membership, store: Sealed, limit_s: float) -> None:
    """Wait until every rank is here. Raises DistributedError with those that are not."""
    until, beats = time.monotonic() + limit_s, [beat_key(rank) for rank in range(here.world)]
    found, missing = dict[str, str](), list[int]()
    try:
        store.set(beats[here.rank], Beat().text)
        for _ in looks(here, store, beats if here.rank == 0 else [HERE], found):
            if time.monotonic() > until:
                missing = [rank for rank, text in enumerate(store.read_all(beats)) if text is None]
                break
            if orders.newer():
                raise replaced()
            if orders.given().ends:
                raise PeerLost("a rank was lost and is not replaced", "consequence")
            # again and again: somebody else may have written over it
            store.set(beats[here.rank], Beat().text)
        if here.rank == 0:
            store.set(HERE, json.dumps(missing))
    except RuntimeError:
        raise DistributedError(f"{here.holder}, which holds the rendezvous, is gone") from None
    missing = json.loads(found.get(HERE, "[]")) or missing
    if missing:
        if here.holds:
            time.sleep(SPARE_S)  # the others find out by its store
        what, waited = f"{named(missing)} of {here.world} did not start", f"waited {limit_s:.0f} s"
        remedy = f"start every rank; each must reach {here.host}:{here.port}"
        raise DistributedError(what, found=waited, remedy=remedy)


class Meetings:
    """The meetings of one generation of ranks, in the order in which all of them call for them: those of one
    thread of each, by the `name` that no other thread's have."""

    def __init__(
        self, here: Membership, store: Sealed, pulse: Pulse, silence_s: float, name: str = "meet"
    ) -> None:
        self.here, self.store, self.pulse, self.silence_s = here, store, pulse, silence_s
        self.held, self.name = 0, name
        if here.rank == 0:
            pulse.kept[name] = {HERE: "[]"}

    def gather(self, text: str, check: Callable[[], None] = lambda: None) -> list[str]:
        """What every rank gives, by rank. Waits as long as all are alive, and may be ended by `check`, which
        is called again and again. Raises PeerLost when one fails or falls silent meanwhile."""
        given = [""] * self.here.world
        for value, runs in self._meet(text, check).items():
            for first, last in runs:
                given[first : last + 1] = [value] * (last + 1 - first)
        return given

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raise DistributedError, the same on every rank, unless all ranks have the same facts."""
        everyone = [(json.loads(text), runs) for text, runs in self._meet(json.dumps(dict(facts))).items()]
        problems = []
        for key in dict.fromkeys(key for own, _ in everyone for key in own):
            ranks: dict[str, list[int]] = {}
            for own, runs in everyone:
                having = ranks.setdefault(str(own.get(key, "nothing")), [])
                having += (rank for first, last in runs for rank in range(first, last + 1))
            if len(ranks) > 1:
                first, *others = (f"{value} ({named(which)})" for value, which in ranks.items())
                problems.append(
                    Problem(f"the ranks do not have the same {key}", expected=first, found=", ".join(others))
                )
        if problems:
            self.read_by_all()
            raise DistributedError(
                [*problems, Problem("every rank needs the same recipe, data, model and packages")]
            )

    def _meet(self, text: str, check: Callable[[], None] = lambda: None) -> dict[str, Runs]:
        """What ranks give: each value with the ranks that give it, in the order of the first of them."""
        self.pulse.formed = True  # nobody meets the others before
        keys = [f"{self.name}/{self.held}/{rank}" for rank in range(self.here.world)]
        own, answer = keys[self.here.rank], f"{self.name}/{self.held}/all"
        self.pulse.kept[self.name] = {**self.pulse.kept.get(self.name, {}), own: text}
        self.store.set(own, text)
        if self.here.rank == 0:
            found = json.dumps(_classes(self._await(keys, check)))
            self.store.set(answer, found)
            self.pulse.kept[self.name] = {answer: found}
            if self.held:  # whoever is here has read what the last meeting was about
                self.store.delete_key(f"{self.name}/{self.held - 1}/all")
        else:
            (found,) = self._await([answer], check)
            self.pulse.kept[self.name] = {}
        if not self.held:
            note_meeting()
        self.store.delete_key(own)
        self.held += 1
        classes: dict[str, Runs] = json.loads(found)
        return classes

    def _await(self, keys: Sequence[str], check: Callable[[], None]) -> list[str]:
        """What keys hold, waited for as long as all ranks are alive and `check` does not raise."""
        found: dict[str, str] = {}
        for _ in looks(self.here, self.store, keys, found):
            check()
            if lost := self.pulse.lost(self.silence_s):
                raise lost
        return [found[key] for key in keys]

    def steps(self) -> str:
        """At which step each rank was when it beat last, in words."""
        texts = self.store.read_all([beat_key(rank) for rank in range(self.here.world)])
        ranks: dict[int, list[int]] = {}
        for rank, text in enumerate(texts):
            if beat := beat_of(text):
                ranks.setdefault(beat.step, []).append(rank)
        return ", ".join(f"{named(which)} at step {step}" for step, which in ranks.items())

    def read_by_all(self) -> None:
        """Before every rank raises what the last meeting was about: the rank that holds the store, which ends
        with it, waits until all have read."""
        self.part("read", 5 if self.here.holds else 0)

    def part(self, word: str, limit_s: float) -> None:
        """Say a word to rank 0, which waits until all have said it, for `limit_s` seconds at most."""
        keys = [f"{word}/{rank}" for rank in range(self.here.world)]
        own, until = keys[self.here.rank], time.monotonic() + limit_s
        with suppress(RuntimeError):
            self.pulse.kept[word] = {own: "1"}
            self.store.set(own, "1")
            for _ in looks(self.here, self.store, keys if self.here.rank == 0 else [], {}):
                if time.monotonic() > until:
                    break


def looks(here: Membership, store: Sealed, keys: Sequence[str], found: dict[str, str]) -> Iterator[None]:
    """Look at the store until there are texts of all keys, and put them in `found`; comes back between two
    looks.

    A look is one small request while a key is missing. torch's own wait hears of nothing meanwhile, and
    writes a line to the terminal whenever its time is up.
    """
    others = 0 if here.rank == 0 else here.world  # the collector looks alone
    longest = max(LONGEST_S, others / LOOKS_A_SECOND)
    pause = max(PAUSE_S, longest / 16 if longest > LONGEST_S else 0.0)
    while absent := [key for key in keys if key not in found]:
        if store.check(absent):
            texts = zip(absent, store.texts(absent), strict=True)
            found |= {key: text for key, text in texts if text is not None}
        if len(found) < len(keys):
            yield
            time.sleep(pause)
            pause = min(1.5 * pause, longest)


def _classes(values: Sequence[str]) -> dict[str, Runs]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return {value: runs_of(which) for value, which in ranks.items()}


def runs_of(ranks: Iterable[int]) -> Runs:
    """Ranks as runs without a gap."""
    runs: Runs = []
    for rank in sorted(ranks):
        first = runs.pop()[0] if runs and runs[-1][1] == rank - 1 else rank
        runs.append((first, rank))
    return runs


def named(ranks: Sequence[int]) -> str:
    """Ranks in words: by number, many in a row by the first and the last, of many rows the first."""
    found: list[str] = []
    for first, last in runs_of(ranks):
        row = range(first, last + 1)
        found += [f"{first} to {last}"] if len(row) > 3 else map(str, row)
    more = f" and more, {len(ranks)} in all" if len(found) > _TOLD else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(found[:_TOLD])}{more}"
