"""The step of a bottleneck, the small network that a method puts behind the linear by which a sub-layer is
left, beside the sub-layer, or behind the sum that it ends with; and that sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.block.dense import matmul32
from petune.kernels.block.steps import Add, BlockRun, Charge, Normalize, Step, Values
from petune.kernels.configs import Level
from petune.kernels.memory.op_cost import Cost, activate, activate_backward, add_low, matmul
from petune.kernels.memory.shape import BlockShape
from petune.kernels.reference import wide
from petune.models.tuned_parts import BottleneckPart


@dataclass(eq=False)
class Bottleneck(Step):
    """n = y + up(drop(act(down(y)))), or with x for the y that is read, summed in float32 and rounded once.

    y comes in float32 and is rounded for `down` alone; it comes rounded, and n is y, while the bottleneck is
    passed by. features: of the bottleneck; at: which of the block's; first: the place of its first tensor;
    x: what it reads beside the sub-layer, in the dtype of the block, or None. total: of a y that `AddWide`
    gives, the rounded sum, which takes its gradient; x is that sum then, or the norm of it.
    """

    y: str
    n: str
    features: int
    at: int
    first: int
    keep: Level | None
    x: str | None = None
    total: str | None = None

    def __post_init__(self) -> None:
        # what enters `down` and the activation
        self.read, self.z = self.reads = self.x or f"{self.n}.y", f"{self.n}.z"
        made = self.reads if self.x is None else (self.z,)
        taken = dict.fromkeys(name for name in (self.y, self.x, self.total) if name is not None)
        self.takes, self.gives = tuple(taken), (self.n, *made)
        own = self.total or self.y  # whose gradient that of n is, or a part of
        self.hands = None if self.x in (None, own) else own
        self.trained = tuple(range(self.first, self.first + 4))
        self.keeps = dict.fromkeys(made if self.keep is None else (self.n, *made), "projections")

    def forward(self, run: BlockRun, v: Values) -> None:
        part, y = run.bottlenecks[self.at][0], v[self.y]
        v.update(dict.fromkeys(self.gives, None) | {self.n: v[self.total or self.y]})
        if part.tensors is None:
            return
        down, down_bias, up, up_bias = part.tensors
        if self.x is None:
            v[self.read] = y.to(down.dtype)
        v[self.z] = z = F.linear(v[self.read].to(down.dtype), down, down_bias)
        v[self.n] = run.ops.add_low(up_bias.expand_as(y), y, (self._inner(run, part, z), up))

    def _inner(self, run: BlockRun, part: BottleneckPart, z: Tensor) -> Tensor:
        """What `up` reads."""
        return self._dropped(run, run.ops.activate(z, part.activation, False)[0])

    def _dropped(self, run: BlockRun, inner: Tensor) -> Tensor:
        drop = run.bottlenecks[self.at][1]
        return inner if drop is None else drop(inner, run.rows)

    def backward(self, run: BlockRun, v: Values) -> None:
        """See Step. The gradient of n may be somebody else's too."""
        part, dn = run.bottlenecks[self.at][0], run.grads.pop(self.n)
        if part.tensors is None:
            run.give(self.total or self.y, dn)
            normed = self.x if self.total not in (None, self.x) else None
            if normed is not None:  # whose norm waits for a gradient
                run.give(normed, torch.zeros_like(dn))
            return
        (down, _, up, _), z = part.tensors, v[self.z]
        dinner = self._dropped(run, dn @ up)
        dz = run.ops.activate_backward(dinner, z, part.activation, False)[0]
        self._learn(run, self.first, dz, lambda: v[self.read].to(down.dtype))
        self._learn(run, self.first + 2, dn, lambda: self._inner(run, part, z), part.scale)
        if self.x is not None:
            run.give(self.total or self.y, dn)
        into = self.x or self.y
        if into in run.wants:  # of x others may have made a gradient already
            found = dn if self.x is None else run.grads.get(into)
            run.grads[into] = dz @ down if found is None else torch.addmm(found, dz, down)

    def _learn(
        self, run: BlockRun, first: int, dy: Tensor, x: Callable[[], Tensor], scale: float = 1.0
    ) -> None:
        """Add the gradients of one linear, weight and bias, that train."""
        if run.sink.needs[first]:
            run.sink.add(first, matmul32(dy.T, x()).mul_(scale))
        if run.sink.needs[first + 1]:
            wide = torch.promote_types(dy.dtype, torch.float32)
            run.sink.add(first + 1, dy.sum(0, dtype=wide).mul_(scale))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        whole, inner = shape.width * shape.itemsize, self.features * shape.itemsize
        return dict.fromkeys(self.gives, whole) | {self.z: inner}

    def beside(self, shape: BlockShape) -> int:
        """See Step. What `up` reads."""
        return self.features * shape.itemsize

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.x or self.y: shape.width * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. What `up` reads, its gradient, and that of what enters the activation."""
        return 3 * self.features * shape.itemsize

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        if self.x is None:
            yield "memory", Cost(0, (4 + shape.itemsize) * rows * shape.width)  # y rounded
        yield "matmul", matmul(rows, shape.width, self.features, shape.itemsize)
        yield "memory", activate(rows, self.features, False, shape.itemsize)
        yield "matmul", add_low(rows, shape.width, shape.itemsize, self.features)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        product = matmul(rows, shape.width, self.features, shape.itemsize)
        yield "matmul", product
        yield "memory", activate_backward(rows, self.features, False, shape.itemsize)
        yield "memory", Cost(0, rows * shape.width * shape.itemsize)  # the gradient of up's bias
        yield "matmul", product
        yield "matmul", product
        yield "matmul", product + Cost(0, rows * shape.width * shape.itemsize)  # with the gradient of n

    def again(self, shape: BlockShape, rows: float, there: bool) -> Iterator[Charge]:
        yield "memory", activate(rows, self.features, False, shape.itemsize)


@dataclass(eq=False)
class AddWide(Add):
    """The same as `Add`, whose sum a bottleneck adds to: y, kept for what reads it, and `wide`, in float32 at
    least, of which y is the rounded form. Neither is written over the branch."""

    wide: str = ""

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.branch, self.x), (self.y, self.wide)
        self.keeps = {self.y: "projections"}

    def fits(self, norm: Normalize) -> bool:
        """See Add. The kernel of both gives no wide sum."""
        return False

    def forward(self, run: BlockRun, v: Values) -> None:
        x, total = v[self.x], wide(v[self.x])
        add = torch.add if total is x else Tensor.add_
        v[self.wide] = total = add(total, v[self.branch], alpha=self.scale)
        if self.factor is not None:
            total.mul_(run.vectors[self.factor])
        v[self.y] = total.to(x.dtype)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step. In float32 both are one."""
        wider = 4 * shape.width if shape.itemsize < 4 else 0
        return {self.y: shape.width * shape.itemsize, self.wide: wider}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield from super().ahead(shape, rows, sequence)
        if shape.itemsize < 4:
            yield "memory", Cost(0, 16 * rows * shape.width)  # x widened, the sum, which is read and rounded
