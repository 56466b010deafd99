"""The step of a vector that scales what a sub-layer gives, a number for each feature (LayerScale, Touvron et
al. 2021, arXiv:2103.17239)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from petune.kernels.block.steps import BlockRun, Charge, Step, Values
from petune.kernels.memory.op_cost import Cost, drop
from petune.kernels.memory.shape import BlockShape
from petune.kernels.reference import wide


@dataclass(eq=False)
class ScaleBy(Step):
    """y = vector * x, rounded once, in place of x unless that is read on the way back. at: which of the
    block's vectors; first: its place among the tensors. learns: it trains, so that its gradient, the sum over
    rows of dy * x, reads x; held: others read x."""

    x: str
    y: str
    at: int
    first: int
    learns: bool = False
    held: bool = False

    def __post_init__(self) -> None:
        self.takes, self.gives, self.keeps = (self.x,), (self.y,), {}
        self.reads, self.trained = ((self.x,), (self.first,)) if self.learns else ((), ())
        self.over = None if self.held or self.learns else self.x

    def forward(self, run: BlockRun, v: Values) -> None:
        x = v[self.x]
        out = torch.empty_like(x) if self.over is None else x
        v[self.y] = torch.mul(x, run.vectors[self.at], out=out)

    def backward(self, run: BlockRun, v: Values) -> None:
        """See Step. The gradient of y may be somebody else's too."""
        dy, vector = run.grads.pop(self.y), run.vectors[self.at]
        if self.learns and run.sink.needs[self.first]:
            dx, sums = run.ops.unscale(dy, v[self.x], wide(vector))
            run.sink.add(self.first, sums)
        else:
            dx = torch.mul(dy, vector, out=torch.empty_like(dy))
        run.give(self.x, dx)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {} if self.over is not None else {self.y: shape.width * shape.itemsize}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.x: shape.width * shape.itemsize}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step. It reads x and writes y, as dropout does."""
        yield "memory", drop(rows, shape.width, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step. The gradient of a vector reads x besides."""
        read = Cost(0, rows * shape.width * shape.itemsize * self.learns)
        yield "memory", drop(rows, shape.width, shape.itemsize) + read
