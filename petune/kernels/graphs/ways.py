"""Several ways through a fused stack: for passes of different sizes, and for several on the way at once, as a
stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from petune.kernels.block.halved_stack import HalvedStack
from petune.kernels.graphs.replay import Graphs
from petune.models.stack import Arguments, Stack
from petune.models.stack_protocols import Whole
from petune.rng.context import Running


class Lanes:
    """A way through a fused stack (stack_protocols.Whole) by the first of several `Graphs` whose
    recordings are idle: none may be replayed between another's two passes in the same memory, so each pass on
    the way has a lane with memory of its own.

    most: how many there may be, each made when all before it are taken. A pass beyond them runs block by
    block.
    """

    def __init__(self, most: int, make: Callable[[], Graphs] | None = None) -> None:
        self.most, self.make = most, make or partial(Graphs, staged=True)
        self.lanes = [self.make()]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has no recordings, as one of Graphs."""
        return Lanes, (self.most, self.make)

    def _free(self) -> Graphs | None:
        """An idle lane; None where there are as many as there may be, and all are taken."""
        for lane in self.lanes:
            if lane.idle:
                return lane
        if len(self.lanes) == self.most:
            return None
        lane = self.make()
        lane.said, lane.other = self.lanes[0].said, self.lanes[0]
        self.lanes.append(lane)
        return lane

    def takes(self, stack: Stack, call: Arguments) -> bool:
        lane = self._free()
        return lane is not None and lane.takes(stack, call)

    def room_for(self, stack: Stack, hidden: Tensor, here: Running) -> int | None:
        return self.lanes[0].room_for(stack, hidden, here)

    def __call__(
        self, stack: Stack, calls: Sequence[Arguments], here: Running, below: Tensor | None = None
    ) -> Arguments | None:
        lane = self._free()
        return None if lane is None else lane(stack, calls, here, below)


@dataclass(frozen=True)
class Ways:
    """A way through a fused stack (stack_protocols.Whole) by the first of `every` that takes a pass and
    does not decline it."""

    every: Sequence[Whole]

    def takes(self, stack: Stack, call: Arguments) -> bool:
        return any(way.takes(stack, call) for way in self.every)

    def room_for(self, stack: Stack, hidden: Tensor, here: Running) -> int | None:
        rooms = (way.room_for(stack, hidden, here) for way in self.every)
        return next((room for room in rooms if room is not None), None)

    def __call__(
        self, stack: Stack, calls: Sequence[Arguments], here: Running, below: Tensor | None = None
    ) -> Arguments | None:
        gone = (way(stack, calls, here, below) for way in self.every if way.takes(stack, calls[0]))
        return next((advanced for advanced in gone if advanced is not None), None)


def recorded(most: int, staged: bool) -> Graphs | Lanes:
    """The way through a stack by recordings. most: passes on the way at once of all stages of a rank, as all
    of them may be of one; staged: see Graphs."""
    return Graphs(staged=staged) if most == 1 else Lanes(most)


def way_through(passes: int, staged: bool, overlapped: bool) -> Whole | None:
    """The way through all blocks of a stack, None where they run one by one. passes: those that may be on the
    way at once as recordings, 0 for none; staged: see Graphs; overlapped: whether ranks hide what they say
    behind another half."""
    ways: list[Whole] = [recorded(passes, staged)] if passes else []
    ways += [HalvedStack()] if overlapped else []
    return Ways(ways) if len(ways) > 1 else next(iter(ways), None)
