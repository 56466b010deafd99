"""The steps by which a sub-layer that is cut across ranks is entered and left.

They are run over all rows at once, never in tiles, and again wherever what they give is made again: so every
rank has to keep the same.
"""

from __future__ import annotations

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
        x = v[self.x]
        v[self.y] = x if self.connection == "whole" else flat(run.boundaries[self.at].enter(batched(run, x)))

    def backward(self, run: BlockRun, v: Values) -> None:
        boundary, dy = run.boundaries[self.at], run.grads.pop(self.y)
        whole = self.connection == "whole"
        if whole:
            dx = boundary.enter_backward(dy, own=True)
        else:
            dx = flat(boundary.enter_backward(batched(run, dy), own=True))
        then(partial(run.give_own, self.x, dx))


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
        boundary, x = run.boundaries[self.at], v[self.x]
        own = not self.held
        if self.connection == "whole":
            v[self.y] = boundary.leave(x, own=own)
        else:
            v[self.y] = flat(boundary.leave(batched(run, x), own=own))

    def backward(self, run: BlockRun, v: Values) -> None:
        boundary, dy = run.boundaries[self.at], run.grads.pop(self.y)
        whole = self.connection == "whole"
        run.grads[self.x] = (
            boundary.leave_backward(dy) if whole else flat(boundary.leave_backward(batched(run, dy)))
        )


def batched(run: BlockRun, x: Tensor) -> Tensor:
    """Rows [batch * tokens, width] as [batch, tokens, width]."""
    return x.view(run.batch, len(x) // run.batch, x.shape[-1])


def flat(x: Tensor) -> Tensor:
    """And back."""
    return x.flatten(0, 1)
