"""The order in which a block's steps run, worked out once: what is dropped after each, what is run again on
the way back.

A pass is a list of sections. A section that `tiles` is run once for each tile of rows: what enters it is cut
into tiles, what it leaves is put together again. Tiles are worth it around an MLP's activation, by far the
widest value: that section is the longest run of steps there that treat every row for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from petune.kernels.block.attention_steps import Attend
from petune.kernels.block.linear_steps import Activated, Product
from petune.kernels.block.steps import Add, AddNormalize, BlockRun, Normalize, Step, Values
from petune.kernels.configs import LEVELS, Level


class Action(NamedTuple):
    """A step's forward or backward pass, and the values that nobody asks for any more after it."""

    step: Step
    back: bool
    run: Callable[[BlockRun, Values], None]
    drops: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Actions in a row. enters: values that are cut into tiles, where it `tiles`; leaves: values that are put
    together again. returns: values whose gradients it takes or gives."""

    actions: tuple[Action, ...]
    tiles: bool
    enters: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    returns: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ScheduledPass:
    """One pass. drops: of each section, the whole values that nobody asks for after its tiles. kept: what a
    forward pass keeps, in order. wants: of the values on the way back, those whose gradient somebody
    needs."""

    sections: tuple[Section, ...]
    drops: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...] = ()
    wants: frozenset[str] = frozenset()


class Schedules:
    """The passes of one program, each made when it is first asked for."""

    def __init__(self, inputs: tuple[str, ...], steps: tuple[Step, ...], y: str) -> None:
        self.inputs, self.steps, self.y = inputs, steps, y
        self.maker = {name: step for step in steps for name in step.gives}
        self.wide = _widest(steps)
        self._forward: dict[Level, ScheduledPass] = {}
        self._backward: dict[tuple[Level, tuple[bool, ...], tuple[bool, ...]], ScheduledPass] = {}

    def kept(self, keep: Level) -> tuple[str, ...]:
        """What a rung keeps, the inputs first."""
        least = LEVELS.index(keep)
        own = (
            name
            for step in self.steps
            for name in step.gives
            if name in step.keeps and LEVELS.index(step.keeps[name]) <= least
        )
        return *self.inputs, *own

    # ------------------------------------------------------------ forward

    def forward(self, keep: Level) -> ScheduledPass:
        """The forward pass of a rung."""
        if keep not in self._forward:
            kept = self.kept(keep)
            parts = self.steps[: self.wide.start], self.steps[self.wide], self.steps[self.wide.stop :]
            sections = [[(step, False) for step in _paired(part)] for part in parts]
            self._forward[keep] = _passed(sections, self.inputs, (*kept, self.y), kept)
        return self._forward[keep]

    # ------------------------------------------------------------ backward

    def backward(self, keep: Level, needs: tuple[bool, ...], given: tuple[bool, ...]) -> ScheduledPass:
        """The backward pass of a rung. needs: which of the block's tensors train; given: which of its inputs
        need a gradient."""
        key = keep, needs, given
        if key not in self._backward:
            self._backward[key] = self._returning(*key)
        return self._backward[key]

    def wanted(self, needs: Sequence[bool], given: Sequence[bool]) -> frozenset[str]:
        """The values whose gradient somebody needs."""
        found = {name for name, need in zip(self.inputs, given, strict=True) if need}
        for step in self.steps:
            if not found.isdisjoint(step.takes) or any(needs[place] for place in step.trained):
                found.update(step.gives)
        return frozenset(found)

    def _returning(self, keep: Level, needs: tuple[bool, ...], given: tuple[bool, ...]) -> ScheduledPass:
        wants, kept = self.wanted(needs, given), self.kept(keep)
        steps = [step for step in self.steps if step.differs and not wants.isdisjoint(step.gives)]
        wide = [step for step in steps if step in self.steps[self.wide]]
        whole = self._narrowest(wide)  # steps of the run that are better not tiled on the way back
        after = [step for step in steps if step in self.steps[self.wide.stop :]]
        before = [step for step in steps if step in self.steps[: self.wide.start]] + wide[:whole]
        there = set(kept)
        sections: list[list[tuple[Step, bool]]] = [self._with_remade(after, there)]
        outside, inside = self._remade_for_tiles(wide[whole:], there)
        sections[0] += outside
        sections += [inside, self._with_remade(before, there)]
        return _passed(sections, kept, (), (), wants)

    def _with_remade(self, steps: Sequence[Step], there: set[str]) -> list[tuple[Step, bool]]:
        """Steps on the way back, each behind those that make again what it reads and is gone."""
        found: list[tuple[Step, bool]] = []
        for step in reversed(steps):
            again: list[Step] = []
            for name in step.reads:
                self._make(name, there, again)
            found += [(one, False) for one in _paired(again)] + [(step, True)]
            there.difference_update(name for one in again if one.cheap for name in one.gives)
        return found

    def _make(self, name: str, there: set[str], again: list[Step]) -> None:
        """Put the steps that make a value, and all they need, into `again`."""
        if name in there:
            return
        step = self.maker[name]
        for one in step.takes:
            self._make(one, there, again)
        again.append(step)
        there.update(step.gives)

    def _remade_for_tiles(
        self, steps: Sequence[Step], there: set[str]
    ) -> tuple[list[tuple[Step, bool]], list[tuple[Step, bool]]]:
        """(what has to be made again of all rows before, the way back of one tile)."""
        inside = set(there)
        found = self._with_remade(steps, inside)
        own = self.steps[self.wide]
        outside = [one for one, back in found if not back and not _of(one, own)]
        there.update(name for one in outside if not one.cheap for name in one.gives)
        return [(one, False) for one in outside], [
            (one, back) for one, back in found if back or _of(one, own)
        ]

    def _narrowest(self, steps: Sequence[Step]) -> int:
        """How many of the first steps of a run are left to the untiled part of the way back: there the fewest
        gradients cross.

        Only such that read nothing which the run has made, for that lives within a tile.
        """
        made = {
            name for step in self.steps[self.wide] for name in step.gives if step.keeps.get(name) != "input"
        }
        grads, crossing = {self.y}, []
        for at in range(len(steps), 0, -1):
            step = steps[at - 1]
            grads = grads - set(step.gives) | set(step.takes) - set(_lows(step))
            free = all(made.isdisjoint(earlier.reads) for earlier in steps[: at - 1])
            crossing.append((len(grads) if free else len(self.steps), -at, at - 1))
        return min(crossing, default=(0, 0, 0))[2]


def _lows(step: Step) -> tuple[str, ...]:
    """What a step takes and gives no gradient of its own."""
    return (step.s,) if isinstance(step, Product) else (step.low,) if isinstance(step, Activated) else ()


def _of(step: Step, run: Sequence[Step]) -> bool:
    return (step.add if isinstance(step, AddNormalize) else step) in run


def _widest(steps: Sequence[Step]) -> slice:
    """The longest run of steps of rows around the activation; empty where there is none."""
    at = next((place for place, step in enumerate(steps) if isinstance(step, Activated)), None)
    if at is None:
        return slice(len(steps), len(steps))
    start, stop = at, at
    while start > 0 and steps[start - 1].rows:
        start -= 1
    while stop < len(steps) and steps[stop].rows:
        stop += 1
    return slice(start, stop)


def _paired(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps, a sum and the norm of it as one."""
    at = 0
    while at < len(steps):
        step, following = steps[at], steps[at + 1] if at + 1 < len(steps) else None
        if isinstance(step, Add) and isinstance(following, Normalize) and step.fits(following):
            yield AddNormalize(step, following)
            at += 1
        else:
            yield step
        at += 1


# ------------------------------------------------------------------ what lives how long


def _passed(
    sections: Sequence[Sequence[tuple[Step, bool]]],
    there: Sequence[str],
    ends: Sequence[str],
    kept: tuple[str, ...],
    wants: frozenset[str] = frozenset(),
) -> ScheduledPass:
    """The pass of these steps, whose middle section may run in tiles. there: values it begins with; ends:
    those that have to be there at its end."""
    flat = [one for section in sections for one in section]
    last = _last_uses(flat) | dict.fromkeys(ends, len(flat))
    alive, begins, found, drops = set(there), 0, [], []
    for section, tiled in zip(sections, (False, True, False), strict=True):
        stop = begins + len(section)
        given = [name for step, back in section if not back for name in step.gives]
        used = {name for step, back in section for name in _uses(step, back)}
        enters = tuple(sorted(used & alive))
        actions, local = [], set(alive)
        for at, (step, back) in enumerate(section, begins):
            if not back:
                local.update(step.gives)
            gone = tuple(sorted(name for name in local if last.get(name, -1) <= at))
            local.difference_update(gone)
            actions.append(Action(step, back, step.backward if back else step.forward, gone))
        leaves = tuple(name for name in given if name in local)
        returns = frozenset(name for step, back in section if back for name in (*step.takes, *step.gives))
        found.append(Section(tuple(actions), tiled, enters, leaves, returns))
        drops.append(tuple(sorted(alive - local)))
        alive, begins = local, stop
    return ScheduledPass(tuple(found), tuple(drops), kept, wants)


def _uses(step: Step, back: bool) -> tuple[str, ...]:
    """What an action asks for."""
    if back:
        return *step.reads, *step.soft
    return *step.takes, *(step.inlets if isinstance(step, Product) else ())


def _last_uses(flat: Sequence[tuple[Step, bool]]) -> dict[str, int]:
    """Of each value the last action that asks for it. What may be gone is not kept for its reader beyond
    attention, whose own values are many."""
    last: dict[str, int] = {}
    for at, (step, back) in enumerate(flat):
        for name in _uses(step, back):
            if not (back and name in step.soft and _is_past_attention(flat, name, at)):
                last[name] = at
    return last


def _is_past_attention(flat: Sequence[tuple[Step, bool]], name: str, at: int) -> bool:
    """Whether attention runs, either way, between the making of a value and the action `at`."""
    made = max(
        (place for place in range(at) if not flat[place][1] and name in flat[place][0].gives), default=at
    )
    return any(isinstance(step, Attend) for step, _ in flat[made:at])
