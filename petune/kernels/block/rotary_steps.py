"""The steps of rotary positions, and of what positions multiply queries by behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from petune.kernels.block.steps import BlockRun, Charge, Step, Values
from petune.kernels.memory.op_cost import rope_, rope_backward, rope_unscale
from petune.kernels.memory.shape import BlockShape
from petune.models.spec import Attention, Pairs

SIDE_BY_SIDE: tuple[Pairs, ...] = ("neighbours", "twins")


def angles_in(run: BlockRun) -> tuple[Tensor, Tensor]:
    """cos and sin of a block that reads them."""
    assert run.angles is not None, "a block with rotary positions is given their angles"
    return run.angles


def turning(
    core: Attention, raw: str, sizes: tuple[int, int, int], scaled: int | None, read: bool
) -> list[Step]:
    """The steps that make the value `raw` of {raw}.raw. sizes: heads, those of keys, and their width; scaled:
    the group whose results are, None where none are; read: see Rotate."""
    heads, kv_heads, head_dim = sizes
    last = core.reach is None
    turned = raw if last else f"{raw}.turned"
    given = f"{raw}.raw", turned, heads + kv_heads, head_dim, last and read, core.pairs in SIDE_BY_SIDE
    found: list[Step] = [Rotate(*given) if scaled is None else RotateScaled(*given, scaled)]
    return found if last else [*found, Reach(turned, raw, heads * head_dim, read, scaled is not None)]


@dataclass(eq=False)
class Rotate(Step):
    """q | k | v with q and k turned by their positions, in place. width: of a head; read: attention reads it,
    and not only what is made of it for that; neighbours: two columns side by side are turned, see Pairs."""

    raw: str
    qkv: str
    heads: int  # that are turned
    width: int
    read: bool = True
    neighbours: bool = False

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.raw,), (self.qkv,)
        self.keeps = {self.qkv: "projections"} if self.read else {}
        self.over = self.raw

    def forward(self, run: BlockRun, v: Values) -> None:
        v[self.qkv] = run.ops.rope_(v[self.raw], *angles_in(run), self.heads, self.neighbours, self.width)

    def backward(self, run: BlockRun, v: Values) -> None:
        """See Step. The gradients come one by one from attention."""
        given = *run.grads.pop(self.qkv), *angles_in(run)
        run.grads[self.raw] = run.ops.rope_backward(*given, self.neighbours)

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.raw: shape.qkv * shape.itemsize}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield "memory", rope_(rows, shape.qkv, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        yield "memory", rope_backward(rows, shape.qkv, shape.itemsize)


@dataclass(eq=False)
class RotateScaled(Rotate):
    """The same of results that are scaled, and the way back through that. at: their group."""

    at: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keeps, self.reads = {self.qkv: "projections"}, (self.qkv,)

    def backward(self, run: BlockRun, v: Values) -> None:
        scale = run.groups[self.at].scale
        if scale is None:  # its tuning is passed by
            super().backward(run, v)
            return
        given = *run.grads.pop(self.qkv), v[self.qkv], *angles_in(run)
        run.grads[self.raw], sums = run.ops.rope_unscale(*given, scale, self.neighbours)
        run.groups[self.at].learn_scale(run.sink, sums)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        yield "memory", rope_unscale(rows, shape.qkv, shape.itemsize)


@dataclass(eq=False)
class Reach(Step):
    """q | k | v with q multiplied by what its position says, in place of what was turned unless that is held
    for the way back. columns: of q."""

    turned: str
    qkv: str
    columns: int
    read: bool = True  # see Rotate
    held: bool = False

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.turned,), (self.qkv,)
        self.keeps = {self.qkv: "projections"} if self.read else {}
        self.over, self.hands = None if self.held else self.turned, self.turned

    def forward(self, run: BlockRun, v: Values) -> None:
        v[self.qkv] = qkv = v[self.turned].clone() if self.held else v[self.turned]
        _stretch(qkv[:, : self.columns], run.reach)

    def backward(self, run: BlockRun, v: Values) -> None:
        """See Step. The gradients come one by one from attention."""
        dq, *others = run.grads.pop(self.qkv)
        _stretch(dq, run.reach)
        run.grads[self.turned] = dq, *others

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.qkv: shape.qkv * shape.itemsize} if self.held else {}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield "memory", rope_(rows, shape.qkv if self.held else shape.queries, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        yield "memory", rope_(rows, shape.queries, shape.itemsize)


def _stretch(q: Tensor, reach: Tensor | None) -> None:
    """q [m, ...], of any strides, times reach [p], in place; p divides m."""
    assert reach is not None, "a block whose queries are multiplied is given by what"
    q.unflatten(0, (-1, len(reach))).mul_(reach.view(-1, *(1 for _ in q.shape[1:])))
