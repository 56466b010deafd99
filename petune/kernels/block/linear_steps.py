"""The steps of linears: a group's low-rank input, its product, and the activation of an MLP with the product
behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from petune.kernels.block.packed_linear import FOLDED, SUMMED
from petune.kernels.block.product_cost import (
    added_back,
    bytes_within,
    bytes_within_back,
    dropping,
    low_input,
    result_bytes,
    returned,
    updated,
)
from petune.kernels.block.rows import LinearInput
from petune.kernels.block.steps import BlockRun, Charge, Normalize, OfNormed, Step, Values
from petune.kernels.configs import Level
from petune.kernels.memory.op_cost import Cost, activate, activate_backward, add, low_rank
from petune.kernels.memory.shape import BlockShape, GroupPlace
from petune.kernels.reference import Act

MEMORY = "memory"  # the value that is an encoder's states


@dataclass(eq=False)
class Low(Step):
    """s = x a^T, the low-rank input of a group's update; None where nothing is tuned."""

    x: str
    s: str
    at: int
    place: GroupPlace
    keep: Level
    differs = False  # the product's backward pass is this one's too

    def __post_init__(self) -> None:
        self.takes, self.gives, self.keeps = (self.x,), (self.s,), {self.s: self.keep}

    def forward(self, run: BlockRun, v: Values) -> None:
        v[self.s] = run.groups[self.at].low(v[self.x])

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        rank = shape.linears(self.place)[2]
        return {self.s: int(of_rows(shape, self.x, rank * shape.itemsize))}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield low_input(shape, self.place, of_rows(shape, self.x, rows))


@dataclass(eq=False)
class Product(OfNormed):
    """y = x W^T + bias + s b^T of a group. norm: the step that gave x, from which x need not be made again
    for the gradients of A. behind: which of the block's bottlenecks reads y, not rounded. filled: the norm
    wrote x beside room for s, as it does for the first group that reads x."""

    x: str
    s: str
    y: str
    at: int
    place: GroupPlace
    keep: Level | None
    norm: Normalize | None = None
    behind: int | None = None
    filled: bool = False
    long = True

    def __post_init__(self) -> None:
        self.takes, self.gives, self.trained = (self.x, self.s), (self.y,), self.place.tensors
        self.inlets = () if self.norm is None or not self.filled else (self.norm.inlet,)
        self.keeps = {} if self.keep is None else {self.y: self.keep}
        self.unscales = self.place.scaled and not self.place.unscaled_by_reader
        self.reading(self.x, self.s)
        self.reads += (self.y,) if self.unscales else ()

    def forward(self, run: BlockRun, v: Values) -> None:
        inlet = v[self.inlets[0]] if self.inlets else None
        v[self.y] = _product(run, self.at, self.behind, v[self.x], v[self.s], inlet)

    def backward(self, run: BlockRun, v: Values) -> None:
        """See Step. In the place of the gradient of s stands what an activation has made of that of b."""
        group = run.groups[self.at]
        dy, db = run.grads.pop(self.y), group.rescaled(run.grads.pop(self.s, None))
        dy = group.unscaled(run.sink, dy, v[self.y]) if self.unscales else dy
        wanted = self.x in run.wants
        dx, ds = group.dproducts(dy) if wanted or group.entry is not None else (None, group.dlow(dy))
        rows = self.entered(run, v)
        group.learn(run.sink, dy, group.entered(rows), v[self.s], ds, db=db)
        if dx is not None:
            dx = group.unentered(run.sink, dx, rows)
        if dx is not None and wanted:
            run.give_own(self.x, group.dupdated(dx, ds))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.y: int(of_rows(shape, self.x, result_bytes(shape, self.place, self.behind)))}

    def beside(self, shape: BlockShape) -> int:
        """See Step. What no norm wrote into the room before s is copied there."""
        inputs, _, rank = shape.linears(self.place)
        copied = (inputs + rank) * shape.itemsize if not self.filled and shape.room(self.place) else 0
        return int(of_rows(shape, self.x, copied + bytes_within(shape, self.place)))

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.x: int(of_rows(shape, self.x, shape.linears(self.place)[0] * shape.itemsize))}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        inputs, outputs, _ = shape.linears(self.place)
        made = inputs * shape.itemsize * self.makes_again(shape, there)
        own = outputs * shape.fp8 + made + bytes_within_back(shape, self.place)
        return int(of_rows(shape, self.x, own))

    def makes_again(self, shape: BlockShape, there: bool) -> bool:
        """See OfNormed. The gradients of A alone do not need x where an RMS norm gave it."""
        tuned = not (self.norm is None or self.norm.rms) and shape.linears(self.place)[2] > 0
        return self.norm is not None and not there and (shape.trained or tuned)

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield from updated(shape, self.place, of_rows(shape, self.x, rows))

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step. The gradient of an encoder's states is added to that of the blocks above."""
        inputs, rows = shape.linears(self.place)[0], of_rows(shape, self.x, rows)
        yield from returned(shape, self.place, rows)
        yield low_input(shape, self.place, rows)
        yield added_back(shape, self.place, rows)
        if found or self.x == MEMORY:
            yield "memory", add(rows, inputs, shape.itemsize)


@dataclass(eq=False)
class Activated(Step):
    """d = m W^T + bias + s b^T with m = act(gate) * up or act(up), which lives in here alone. above, at: the
    groups of up and of down.

    low: of the update of u, which the activation may add. drop: the dropout of m, or None. behind: which of
    the block's bottlenecks reads d, not rounded.
    """

    u: str
    low: str
    s: str
    d: str
    act: Act
    gated: bool
    above: int
    at: int
    place: GroupPlace
    drop: int | None = None
    keep: Level | None = None
    behind: int | None = None
    long = True

    def __post_init__(self) -> None:
        self.takes, self.gives, self.trained = (self.u, self.low), (self.s, self.d), self.place.tensors
        self.keeps = {self.s: "input"} if self.keep is None else {self.s: "input", self.d: self.keep}
        self.reads = (self.low, self.u, self.s, *((self.d,) if self.place.scaled else ()))

    def forward(self, run: BlockRun, v: Values) -> None:
        up, down, u = run.groups[self.above], run.groups[self.at], v[self.u]
        drop = None if self.drop is None else run.drops[self.drop]
        m, inlet = down.inlet(u)
        a = down.a if down.folds_input and drop is None else None
        low, scale = up.deferred(v[self.low]), up.deferred_scale
        s = run.ops.activate(u, self.act, self.gated, low, a, up.paired, m, down.drawn(), scale)[1]
        if drop is not None:
            m, inlet = drop(m, run.rows), None
        v[self.s] = s = down.low(m) if s is None else s
        v[self.d] = _product(run, self.at, self.behind, m, s, inlet)

    def backward(self, run: BlockRun, v: Values) -> None:
        up, down, u = run.groups[self.above], run.groups[self.at], v[self.u]
        drop = None if self.drop is None else run.drops[self.drop]
        low, dd = v[self.low], down.unscaled(run.sink, run.grads.pop(self.d), v.get(self.d))

        def again() -> Tensor:
            given = self.act, self.gated, up.deferred(low), None, up.paired
            m: Tensor = run.ops.activate(u, *given, scale=up.deferred_scale)[0]
            return m if drop is None else drop(m, run.rows)

        dm, ds = down.dproducts(dd)
        below = (ds, down.a) if ds is not None and down.folds_input and drop is None else None
        m = LinearInput.again(again)
        dm = down.unentered(run.sink, dm, m)
        if below is None:
            down.dupdated(dm, ds)
        if drop is not None:
            dm = drop(dm, run.rows)
        du, db, da, sums = run.ops.activate_backward(
            dm, u, self.act, self.gated, up.read(low), below, up.paired, down.drawn(), up.deferred_scale
        )
        down.learn(run.sink, dd, down.entered(m), v[self.s], ds, da=da)
        if self.u in run.wants:
            run.grads[self.u] = du
            up.learn_scale(run.sink, sums)
            if db is not None:
                run.grads[self.low] = db

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        rank = shape.linears(self.place)[2]
        return {self.s: rank * shape.itemsize, self.d: result_bytes(shape, self.place, self.behind)}

    def beside(self, shape: BlockShape) -> int:
        return (shape.columns + shape.room(self.place)) * shape.itemsize + bytes_within(shape, self.place)

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.u: shape.gu * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. dm, and m where the gradients of down need it; that of d before it was scaled."""
        made = shape.columns * (1 + (shape.writes_m or self.place.enters))
        return (made + shape.width * self.place.scaled) * shape.itemsize

    def _activated(self, shape: BlockShape, rows: float) -> Charge:
        deferred = shape.ranks.gu if shape.defers else 0
        below = shape.ranks.down if shape.ranks.down <= FOLDED else 0
        made = activate(rows, shape.columns, shape.gated, shape.itemsize, deferred, below)
        return "memory", made + Cost(hashes=dropping(shape, self.place) * rows * shape.columns * (below > 0))

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield self._activated(shape, rows)
        if shape.ranks.down > FOLDED:
            yield low_input(shape, self.place, rows)
        yield from updated(shape, self.place, rows)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step. Gradients of more than SUMMED ranks are products of their own."""
        ranks, columns = shape.ranks, shape.columns
        hashes = dropping(shape, self.place) * rows * columns
        yield from returned(shape, self.place, rows)
        folds, gates = 0 < ranks.down <= FOLDED, ranks.gu // (1 + shape.gated)
        above = ranks.gu if gates <= SUMMED else 0
        made = activate_backward(
            rows, columns, shape.gated, shape.itemsize, above, ranks.down if folds else 0
        )
        written = rows * columns * shape.itemsize * (folds and shape.writes_m)
        yield "memory", made + Cost(0, written, hashes * folds)
        if SUMMED < ranks.down <= FOLDED:
            yield "narrow", low_rank(rows, columns, ranks.down, shape.itemsize)
        if ranks.down > FOLDED:
            yield low_input(shape, self.place, rows)
            yield added_back(shape, self.place, rows)
        if SUMMED < gates <= FOLDED:
            yield "narrow", low_rank(rows, shape.gu, gates, shape.itemsize)

    def again(self, shape: BlockShape, rows: float, there: bool) -> Iterator[Charge]:
        if shape.makes_m_again or self.place.enters:
            yield self._activated(shape, rows)


def of_rows(shape: BlockShape, x: str, own: float) -> float:
    """Of the rows of x what `own` is of own tokens: more where x is an encoder's states."""
    return own * shape.across if x == MEMORY else own


def _product(
    run: BlockRun, at: int, behind: int | None, x: Tensor, s: Tensor | None, inlet: Tensor | None
) -> Tensor:
    """What a group makes of x: rounded, or as it was summed for a bottleneck that is not passed by."""
    if behind is None or run.bottlenecks[behind][0].tensors is None:
        return run.groups[at].product(x, s, inlet)
    return run.groups[at].sum32(x, s)
