"""Recordings for a stack that has several passes on the way at once, as a stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from petune.kernels.graphs.replay import Graphs
from petune.models.stack import Arguments, Stack
from petune.rng.context import Running


def _of_a_stage() -> Graphs:
    return Graphs(staged=True)


class Lanes:
    """A way through a fused stack (stack_protocols.Whole) by the first of several `Graphs` whose
    recordings are idle: none may be replayed between another's two passes in the same memory, so each pass on
    the way has a lane with memory of its own.

    most: how many there may be, each made when all before it are taken. A pass beyond them runs block by
    block.
    """

    def __init__(self, most: int, make: Callable[[], Graphs] = _of_a_stage) -> None:
        self.most, self.make = most, make
        self.lanes = [make()]

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


def recorded(most: int, staged: bool) -> Graphs | Lanes:
    """The way through a stack by recordings. most: passes on the way at once of all stages of a rank, as all
    of them may be of one; staged: see Graphs."""
    return Graphs(staged=staged) if most == 1 else Lanes(most)
