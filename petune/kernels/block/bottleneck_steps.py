"""The step of a bottleneck, the small network that a method puts behind the linear by which a sub-layer is
left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.block.dense import matmul32
from petune.kernels.block.steps import Charge, Run, Step, Values
from petune.kernels.configs import Level
from petune.kernels.memory.op_cost import Cost, activate, activate_backward, add_low, matmul
from petune.kernels.memory.shape import BlockShape
from petune.models.tuned_linear import BottleneckPart


@dataclass(eq=False)
class Bottleneck(Step):
    """n = y + up(drop(act(down(y)))), summed in float32 and rounded once.

    y comes in float32 and is rounded for `down` alone; it comes rounded, and n is y, while the bottleneck is
    passed by. features: of the bottleneck; at: which of the block's; first: the place of its first tensor.
    """

    y: str
    n: str
    features: int
    at: int
    first: int
    keep: Level | None

    def __post_init__(self) -> None:
        # what enters `down` and the activation
        self.rounded, self.z = self.reads = f"{self.n}.y", f"{self.n}.z"
        self.takes, self.gives = (self.y,), (self.n, *self.reads)
        self.trained = tuple(range(self.first, self.first + 4))
        kept = self.reads if self.keep is None else (self.n, *self.reads)
        self.keeps = dict.fromkeys(kept, "projections")

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        part, y = run.bottlenecks[self.at][0], v[self.y]
        v[self.n], v[self.rounded], v[self.z] = y, None, None
        if part.tensors is None:
            return
        down, down_bias, up, up_bias = part.tensors
        v[self.rounded] = rounded = y.to(down.dtype)
        v[self.z] = z = F.linear(rounded, down, down_bias)
        v[self.n] = run.ops.add_low(up_bias.expand_as(y), y, (self._inner(run, part, z), up))

    def _inner(self, run: Run, part: BottleneckPart, z: Tensor) -> Tensor:
        """What `up` reads."""
        return self._dropped(run, run.ops.activate(z, part.activation, False)[0])

    def _dropped(self, run: Run, inner: Tensor) -> Tensor:
        drop = run.bottlenecks[self.at][1]
        return inner if drop is None else drop(inner, run.rows)

    def backward(self, run: Run, v: Values) -> None:
        """See Step. The gradient of n may be somebody else's too."""
        part, dn = run.bottlenecks[self.at][0], run.grads.pop(self.n)
        if part.tensors is None:
            run.give(self.y, dn)
            return
        (down, _, up, _), z = part.tensors, v[self.z]
        dinner = self._dropped(run, dn @ up)
        dz = run.ops.activate_backward(dinner, z, part.activation, False)[0]
        self._learn(run, self.first, dz, lambda: v[self.rounded])
        self._learn(run, self.first + 2, dn, lambda: self._inner(run, part, z))
        if self.y in run.wants:
            run.grads[self.y] = torch.addmm(dn, dz, down)

    def _learn(self, run: Run, first: int, dy: Tensor, x: Callable[[], Tensor]) -> None:
        """Add the gradients of one linear, weight and bias, that train."""
        if run.sink.needs[first]:
            run.sink.add(first, matmul32(dy.T, x()))
        if run.sink.needs[first + 1]:
            run.sink.add(first + 1, dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        whole, inner = shape.width * shape.itemsize, self.features * shape.itemsize
        return dict(zip(self.gives, (whole, whole, inner), strict=True))

    def beside(self, shape: BlockShape) -> int:
        """See Step. What `up` reads."""
        return self.features * shape.itemsize

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.y: shape.width * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. What `up` reads, its gradient, and that of what enters the activation."""
        return 3 * self.features * shape.itemsize

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step."""
        yield "memory", Cost(0, (4 + shape.itemsize) * rows * shape.width)  # y rounded
        yield "matmul", matmul(rows, shape.width, self.features, shape.itemsize)
        yield "memory", activate(rows, self.features, False, shape.itemsize)
        yield "matmul", add_low(rows, shape.width, shape.itemsize, self.features)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step."""
        product = matmul(rows, shape.width, self.features, shape.itemsize)
        yield "matmul", product
        yield "memory", activate_backward(rows, self.features, False, shape.itemsize)
        yield "memory", Cost(0, rows * shape.width * shape.itemsize)  # the gradient of up's bias
        yield "matmul", product
        yield "matmul", product
        yield "matmul", product + Cost(0, rows * shape.width * shape.itemsize)  # with the gradient of n

    def again(self, shape: BlockShape, rows: float, there: bool) -> Iterator[Charge]:
        """See Step."""
        yield "memory", activate(rows, self.features, False, shape.itemsize)
