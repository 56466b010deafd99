"""Several ways through a fused stack, for passes of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from petune.models.stack import Call, Stack, Whole
from petune.rng.context import Running


@dataclass(frozen=True)
class Ways:
    """A way through a fused stack (petune.models.stack.Whole) by the first of `every` that takes a pass and
    does not decline it."""

    every: Sequence[Whole]

    def takes(self, stack: Stack, call: Call) -> bool:
        """See petune.models.stack.Whole."""
        return any(way.takes(stack, call) for way in self.every)

    def room_for(self, stack: Stack, hidden: Tensor, here: Running) -> int | None:
        """See petune.models.stack.Whole."""
        rooms = (way.room_for(stack, hidden, here) for way in self.every)
        return next((room for room in rooms if room is not None), None)

    def __call__(self, stack: Stack, call: Call, here: Running, below: Tensor | None = None) -> Call | None:
        """See petune.models.stack.Whole."""
        gone = (way(stack, call, here, below) for way in self.every if way.takes(stack, call))
        return next((advanced for advanced in gone if advanced is not None), None)
