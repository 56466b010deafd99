"""Several ways through a fused stack, for passes of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from petune.kernels.block.halved_stack import HalvedStack
from petune.kernels.graphs.lanes import recorded
from petune.models.stack import Arguments, Stack
from petune.models.stack_protocols import Whole
from petune.rng.context import Running


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


def way_through(passes: int, staged: bool, overlapped: bool) -> Whole | None:
    """The way through all blocks of a stack, None where they run one by one. passes: those that may be on the
    way at once as recordings, 0 for none; staged: see Graphs; overlapped: whether ranks hide what they say
    behind another half."""
    ways: list[Whole] = [recorded(passes, staged)] if passes else []
    ways += [HalvedStack()] if overlapped else []
    return Ways(ways) if len(ways) > 1 else next(iter(ways), None)
