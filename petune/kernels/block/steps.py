"""The kinds of step that a fused block is made of, each with both passes written by hand.

A step takes values and gives others, by name. Tensors are [m, width], m all the tokens of the call or those
of one tile. What its backward pass looks up are its `reads`; a value that is gone by then is made again by
the forward pass of the step that gave it. `keeps` says from which rung of the memory ladder on a value is
kept instead. A step of `rows` treats every row for itself, so that it may run in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from petune.kernels.block.attention import How
from petune.kernels.block.called import BoundCore
from petune.kernels.block.mixture import MixturePart
from petune.kernels.block.packed_linear import Group
from petune.kernels.block.rows import LinearInput, Sink
from petune.kernels.block.turns import Turns
from petune.kernels.configs import Level
from petune.kernels.dispatch import Ops
from petune.kernels.memory import op_cost
from petune.kernels.memory.op_cost import SMALL, Cost, CostKind
from petune.kernels.memory.shape import BlockShape, GroupPlace
from petune.models.boundary import Boundary
from petune.models.tuned_parts import BottleneckPart

_MIDDLE: Level = "projections"
Charge = tuple[CostKind, Cost]  # a kernel: the rate that bounds it, and what it costs
# the same elements at every call; rows of the whole, None for all
Dropping = Callable[[Tensor, "slice | None"], Tensor]
NormTensors = tuple[Tensor, *tuple[Tensor | None, ...]]  # weight; of a LayerNorm then bias or None
Values = dict[str, Any]  # by name: tensors, None, or what attention keeps


@dataclass(eq=False)
class BlockRun:
    """One pass of a block: its operations and tensors as they are at this moment.

    norms: of each norm, see NormTensors. drops: of each dropout of the block, None where nothing drops out.
    hows: of each attention. angles: cos and sin [p, d] of rotary positions, p dividing m; reach: what
    queries there are multiplied by, [p]. wants: the values whose gradient somebody needs. grads:
    gradients found so far, by the name of the value, of q, k and v apart where attention gives them so.
    rows: those of the tile in work, None for all. bottlenecks: each with its own dropout. boundaries: of
    each sub-layer that is cut across ranks, by its number; batch: rows of equal length, where a sequence
    is cut. sinks: of each attention that has some. turns: where another pass goes in turns with this one.
    called: the cores that are called as they are. vectors: that scale what sub-layers give. kept: the
    values that are kept for the way back; None on it.
    """

    ops: Ops
    groups: Sequence[Group]
    norms: Sequence[NormTensors]
    drops: Sequence[Dropping | None]
    hows: Sequence[How]
    angles: tuple[Tensor, Tensor] | None
    sink: Sink = field(default_factory=lambda: Sink(()))
    wants: frozenset[str] = frozenset()
    grads: Values = field(default_factory=dict)
    rows: slice | None = None
    bottlenecks: Sequence[tuple[BottleneckPart, Dropping | None]] = ()
    mixtures: Sequence[MixturePart] = ()
    boundaries: Mapping[int, Boundary] = field(default_factory=dict)
    batch: int = 1
    sinks: Sequence[Tensor] = ()
    turns: Turns | None = None
    called: Sequence[BoundCore] = ()
    vectors: Sequence[Tensor] = ()
    kept: frozenset[str] | None = None
    reach: Tensor | None = None

    def at(self, rows: slice | None) -> None:
        """Tell the groups which rows of the call they are given."""
        self.rows = rows
        for group in self.groups:
            group.rows = rows

    def give(self, name: str, grad: Tensor) -> None:
        """Add a gradient that may be somebody else's too, if it is wanted."""
        if name in self.wants:
            self.grads[name] = self.grads[name] + grad if name in self.grads else grad

    def give_own(self, name: str, grad: Tensor) -> None:
        """Add a gradient that nobody else holds: what was found before is added in place."""
        found = self.grads.pop(name, None)
        self.grads[name] = grad if found is None else grad.add_(found)


class Step:
    """See the file. soft: a value whose absence `backward` gets along with. over: a value in whose place the
    first that it gives is written. hands: a value that gets the gradient of what it gives as it is, beside
    those that it makes. trained: places of its parameters among a block's tensors."""

    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    soft: tuple[str, ...] = ()
    over: str | None = None
    hands: str | None = None
    trained: tuple[int, ...] = ()
    keeps: Mapping[str, Level]
    rows: ClassVar[bool] = True
    differs: ClassVar[bool] = True  # whether it has a backward pass of its own
    # what it gives is the value that it is over itself, which others may read still
    shares: ClassVar[bool] = False
    cheap: ClassVar[bool] = False  # what it gives is made again for every reader rather than held
    long: ClassVar[bool] = False  # both passes take a large product, behind which what ranks say is hidden

    def forward(self, run: BlockRun, v: Values) -> None:
        """Put what it gives into `v`."""
        raise NotImplementedError

    def backward(self, run: BlockRun, v: Values) -> None:
        """Take the gradients of what it gave out of `run.grads`, put those of what it took there and those of
        what trains into the sink."""
        raise NotImplementedError

    def talks(self, back: bool) -> bool:
        """Whether its pass, that for the way back or the other, goes on the stream of what ranks say, while
        another call may compute; see turns.py. No step of rows does."""
        return False

    # What it takes of time and memory, for the plan of a step: bytes of a row, kernels of so many rows.

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """Bytes of what it gives, but for what it writes in place of what it takes."""
        return {}

    def beside(self, shape: BlockShape) -> int:
        """Bytes alive within its forward pass alone."""
        return 0

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """Bytes of the gradients that its backward pass makes, but for those that it hands on as they are."""
        return {}

    def made_dense(self, shape: BlockShape) -> int:
        """Bytes of weights that are made dense in either pass, whatever the rows, and counted by no group."""
        return 0

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """Bytes alive within its backward pass alone. there: its soft value is."""
        return 0

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """Its forward pass."""
        yield from ()

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """Its backward pass, but for what it makes again. found: what it takes has a gradient already."""
        yield from ()

    def again(self, shape: BlockShape, rows: float, there: bool) -> Iterator[Charge]:
        """What its backward pass makes again within it."""
        yield from ()


@dataclass(eq=False)
class Normalize(Step):
    """h = norm(x). at: place among the norms; first: among the tensors; into: the group that reads h, which
    says where it is written, and its place among the groups."""

    x: str
    h: str
    rms: bool
    eps: float
    at: int
    first: int
    into: tuple[int, GroupPlace] | None = None

    def __post_init__(self) -> None:
        self.inlet = f"{self.h}.inlet"
        self.stats = (f"{self.h}.rstd",) if self.rms else (f"{self.h}.mean", f"{self.h}.rstd")
        self.takes, self.gives = (self.x,), (self.h, self.inlet, *self.stats)
        self.reads = (*self.stats, self.x)
        self.trained = tuple(range(self.first, self.first + (1 if self.rms else 2)))
        self.keeps = dict.fromkeys(self.stats, _MIDDLE)

    def forward(self, run: BlockRun, v: Values) -> None:
        self.total(run, v, v[self.x], None)

    def total(self, run: BlockRun, v: Values, x: Tensor, residual: Tensor | None) -> Tensor:
        """The norm of x, or of residual + x, which it returns."""
        like = x if residual is None else residual
        out, v[self.inlet] = (None, None) if self.into is None else run.groups[self.into[0]].inlet(like)
        norm = run.ops.rms_norm if self.rms else run.ops.layer_norm
        h, *stats, total = norm(x, *run.norms[self.at], self.eps, residual=residual, out=out)
        v[self.h] = h if out is None else out
        v.update(zip(self.stats, stats, strict=True))
        read: Tensor = total
        return read

    def made(self, run: BlockRun, x: Tensor) -> Tensor:
        """h alone."""
        h: Tensor = (run.ops.rms_norm if self.rms else run.ops.layer_norm)(x, *run.norms[self.at], self.eps)[
            0
        ]
        return h

    def entered(self, run: BlockRun, v: Values) -> LinearInput:
        """h as the matrix that entered a group, made only if it must be."""
        x = v[self.x]
        if self.rms:
            return LinearInput.again(lambda: self.made(run, x), (x, v[self.stats[0]], run.norms[self.at][0]))
        return LinearInput.again(lambda: self.made(run, x))

    def backward(self, run: BlockRun, v: Values) -> None:
        """See Step. What has reached x by another way is added by the same kernel."""
        dh, found = run.grads.pop(self.h), run.grads.pop(self.x, None)
        trains = any(run.sink.needs[place] for place in self.trained)
        back = run.ops.rms_norm_backward if self.rms else run.ops.layer_norm_backward
        stats = (v[name] for name in self.stats)
        run.grads[self.x], *own = back(dh, v[self.x], run.norms[self.at][0], *stats, found, trains)
        for place, grad in zip(self.trained, own, strict=True):
            run.sink.add(place, grad)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step. Behind h there is room for the low-rank input of the group that reads it."""
        room = 0 if self.into is None else shape.room(self.into[1])
        return {self.h: (shape.width + room) * shape.itemsize, **dict.fromkeys(self.stats, 4)}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.x: shape.width * shape.itemsize}

    def charge(self, shape: BlockShape, rows: float, residual: bool = False) -> Charge:
        """The kernel ahead."""
        cost = op_cost.rms_norm if self.rms else op_cost.layer_norm
        return "memory", cost(rows, shape.width, shape.itemsize, residual)

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield self.charge(shape, rows)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        cost = op_cost.rms_norm_backward if self.rms else op_cost.layer_norm_backward
        yield "memory", cost(rows, shape.width, shape.itemsize, found)
        if shape.trained:  # sums of what each program has found, rounded
            for _ in range(2 * len(self.trained)):
                yield "memory", SMALL


class OfNormed(Step):
    """A step whose gradients of what trains read x, which `norm` gave, so that it may be made again; without
    a norm x is kept."""

    norm: Normalize | None

    def reading(self, x: str, *names: str) -> None:
        """Read these values on the way back, and x where it is there."""
        self.entry, self.reads, self.soft = x, (*names, x), ()
        if self.norm is not None:
            self.reads, self.soft = (*names, *self.norm.reads), (x,)

    def entered(self, run: BlockRun, v: Values) -> LinearInput:
        """x, made only if it must be."""
        x = v.get(self.entry)
        return LinearInput.of(x) if x is not None else self.norm.entered(run, v)  # type: ignore[union-attr]  # x is kept where there is none

    def makes_again(self, shape: BlockShape, there: bool) -> bool:
        """Whether its backward pass asks for x, which is gone."""
        return self.norm is not None and not there and shape.trained

    def again(self, shape: BlockShape, rows: float, there: bool) -> Iterator[Charge]:
        if self.norm is not None and self.makes_again(shape, there):
            yield self.norm.charge(shape, rows)


@dataclass(eq=False)
class DropStep(Step):
    """y = drop(x), x itself where nothing drops out. at: which of the block's dropouts. held: x is read on
    the way back."""

    x: str
    y: str
    at: int
    held: bool = False

    def __post_init__(self) -> None:
        self.takes, self.gives, self.keeps = (self.x,), (self.y,), {}
        self.over = None if self.held else self.x

    def forward(self, run: BlockRun, v: Values) -> None:
        drop = run.drops[self.at]
        v[self.y] = v[self.x] if drop is None else drop(v[self.x], run.rows)

    def backward(self, run: BlockRun, v: Values) -> None:
        drop, dy = run.drops[self.at], run.grads.pop(self.y)
        run.grads[self.x] = dy if drop is None else drop(dy, run.rows)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.y: shape.width * shape.itemsize} if self.held and shape.dropouts else {}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        if shape.dropouts:
            yield "memory", op_cost.drop(rows, shape.width, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        yield from self.ahead(shape, rows, sequence)


@dataclass(eq=False)
class Add(Step):
    """y = x + scale branch, in place of the branch unless that is held for the way back. normed: a norm reads
    y, so that its backward pass does. factor: the number of the block's vectors that y is multiplied by, read
    in every pass."""

    branch: str
    x: str
    y: str
    normed: bool = False
    scale: float = 1.0
    held: bool = False
    factor: int | None = None

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.branch, self.x), (self.y,)
        self.keeps = {self.y: "projections"} if self.normed else {}
        self.over = None if self.held else self.branch

    def fits(self, norm: Normalize) -> bool:
        """Whether one kernel makes the sum and its norm."""
        return norm.x == self.y and self.scale == 1 and self.factor is None

    def forward(self, run: BlockRun, v: Values) -> None:
        branch = v[self.branch]
        v[self.y] = y = torch.add(v[self.x], branch, alpha=self.scale, out=None if self.held else branch)
        if self.factor is not None:
            y.mul_(run.vectors[self.factor])

    def backward(self, run: BlockRun, v: Values) -> None:
        dy = run.grads.pop(self.y)
        if self.factor is not None:  # as wide as it may be, rounded once
            dy = torch.mul(dy, run.vectors[self.factor], out=torch.empty_like(dy))
        run.give(self.branch, dy if self.scale == 1 else dy * self.scale)
        run.give(self.x, dy)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.y: shape.width * shape.itemsize} if self.held else {}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        row = shape.width * shape.itemsize  # of a product with a factor, both gradients are one tensor
        own = {} if self.scale == 1 else {self.branch: row}
        return own if self.factor is None else {**own, self.x: row}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield "memory", op_cost.add(rows, shape.width, shape.itemsize)
        if self.factor is not None:
            yield "memory", op_cost.drop(rows, shape.width, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        for _ in range((self.scale != 1) + (self.factor is not None)):
            yield "memory", op_cost.drop(rows, shape.width, shape.itemsize)


@dataclass(eq=False)
class AddNormalize(Step):
    """Both at once, by one kernel; there is no such pair on the way back."""

    add: Add
    norm: Normalize

    def __post_init__(self) -> None:
        self.takes, self.gives, self.keeps = self.add.takes, (*self.add.gives, *self.norm.gives), {}

    def forward(self, run: BlockRun, v: Values) -> None:
        v[self.add.y] = self.norm.total(run, v, v[self.add.branch], v[self.add.x])

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.add.y: shape.width * shape.itemsize, **self.norm.sizes(shape)}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield self.norm.charge(shape, rows, residual=True)
