"""The steps by which a sub-layer that is cut across ranks is entered and left.

They are run over all rows at once, never in tiles, and again wherever what they give is made again: so every
rank has to keep the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from petune.kernels.block.steps import BlockRun, Step, Values
from petune.kernels.block.turns import then
from petune.kernels.configs import Level
from petune.kernels.memory.shape import BlockShape
from petune.models.boundary import Connection


@dataclass(eq=False)
class _Crossing(Step):
    """y of x across ranks: in its place where the connection is whole, else a value of its own. at: of which
    sub-layer."""

    x: str
    y: str
    at: int
    connection: Connection
    rows = False

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {} if self.connection == "whole" else {self.y: shape.width * shape.itemsize}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {} if self.connection == "whole" else {self.x: shape.width * shape.itemsize}

    def said(self, run: BlockRun, x: Tensor, way: Callable[[Tensor], Tensor]) -> Tensor:
        """What a way of the boundary makes of rows: of all as they lie, or of those of each sequence."""
        return way(x) if self.connection == "whole" else flat(way(batched(run, x)))


@dataclass(eq=False)
class Enter(_Crossing):
    """y = x as every rank needs it, which is x itself where the connection is whole. at: of which
    sub-layer."""

    shares = True

    def __post_init__(self) -> None:
        whole = self.connection == "whole"
        self.takes, self.gives = (self.x,), (self.y,)
        self.keeps = {} if whole else {self.y: "all"}
        self.over = self.x if whole else None

    def talks(self, back: bool) -> bool:
        return back or self.connection != "whole"

    def forward(self, run: BlockRun, v: Values) -> None:
        whole = self.connection == "whole"
        v[self.y] = v[self.x] if whole else self.said(run, v[self.x], run.boundaries[self.at].enter)

    def backward(self, run: BlockRun, v: Values) -> None:
        way = partial(run.boundaries[self.at].enter_backward, own=True)
        then(partial(run.give_own, self.x, self.said(run, run.grads.pop(self.y), way)))


@dataclass(eq=False)
class Leave(_Crossing):
    """y = the sum over the ranks of x, in its place where the connection is whole. at: of which sub-layer.
    held: x is read on the way back, and y lies beside it."""

    keep: Level | None
    held: bool = False

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.x,), (self.y,)
        self.keeps = {} if self.keep is None else {self.y: self.keep}
        self.over = self.x if self.connection == "whole" and not self.held else None

    def talks(self, back: bool) -> bool:
        return not back or self.connection != "whole"

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {} if self.over is not None else {self.y: shape.width * shape.itemsize}

    def forward(self, run: BlockRun, v: Values) -> None:
        way = partial(run.boundaries[self.at].leave, own=not self.held)
        v[self.y] = self.said(run, v[self.x], way)

    def backward(self, run: BlockRun, v: Values) -> None:
        way = run.boundaries[self.at].leave_backward
        run.grads[self.x] = self.said(run, run.grads.pop(self.y), way)


def batched(run: BlockRun, x: Tensor) -> Tensor:
    """Rows [batch * tokens, width] as [batch, tokens, width]."""
    return x.view(run.batch, len(x) // run.batch, x.shape[-1])


def flat(x: Tensor) -> Tensor:
    """And back."""
    return x.flatten(0, 1)
