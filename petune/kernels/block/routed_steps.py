"""The steps of a mixture's experts: both grouped products, and the sum over those that a token has chosen.

Copies of tokens are sorted by expert (petune/kernels/grouped.py), M = tokens * chosen of them:

    share, routes = the router's    u = x[rows] W_up    m = act(gate) * up * share    d = combine(m W_down)

The share is multiplied in before the way down, so its gradient is a sum over what the activation gave, and
neither that product nor a copy of a token is kept: u is, or made again from x, which a norm gave.
A quantised weight is made dense for each product and dropped: one of them is there at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from petune.kernels.block.mixture import DOWN, DOWN_BIAS, UP, UP_BIAS, added, learn, learn_bias
from petune.kernels.block.product_cost import item_before
from petune.kernels.block.router_steps import OfMixture, OwnOf, Route, widened
from petune.kernels.block.rows import LinearInput
from petune.kernels.block.steps import BlockRun, Charge, Step, Values
from petune.kernels.configs import Level
from petune.kernels.grouped import combined, dgated, gated, product
from petune.kernels.memory import op_cost
from petune.kernels.memory.op_cost import SMALL, Cost
from petune.kernels.memory.shape import BlockShape
from petune.kernels.reference import Act
from petune.models.routes import Routes
from petune.models.spec import RoutedMlp

SORTED = 2  # small kernels that a product asks of the routes: tokens of sorted rows, what these count


@dataclass(eq=False)
class Dispatched(OfMixture):
    """u = x[rows] W^T + s b^T of gate | up, sorted by expert, and s = x[rows] a^T, its low-rank input. part,
    come: copies here for each that own tokens make, and rows of x for each own token, where experts are cut
    over ranks."""

    routes: str
    s: str
    u: str
    part: float = 1.0
    come: float = 1.0
    long = True

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.h, self.routes), (self.s, self.u)
        self.keeps = dict.fromkeys(self.gives, "all")
        self.trained = (*range(self.first + UP, self.first + UP + 3), self.first + UP_BIAS)
        self.reading(self.h, self.routes, self.s)

    def forward(self, run: BlockRun, v: Values) -> None:
        mixture, x, routes = run.mixtures[self.at], v[self.h], Routes(*v[self.routes])
        part, rows = mixture.up, routes.tokens
        v[self.s] = s = None if part.a is None else product(x, part.a.mT, routes.ends, rows=rows)
        low, up = added(part, s, _ones(rows))
        v[self.u] = product(x, mixture.ahead(part), routes.ends, rows=rows, low=low, up=up)

    def backward(self, run: BlockRun, v: Values) -> None:
        mixture, du, routes = run.mixtures[self.at], run.grads.pop(self.u), Routes(*v[self.routes])
        part, first, ends = mixture.up, self.first + UP, routes.ends
        ds = None if part.b is None else product(du, part.b, routes.ends)
        rows = routes.tokens
        entered, turned = self.entered(run, v), mixture.transposed
        learn(run.sink, first, part, ends, du, v[self.s], ds, entered, x_rows=rows, transposed=turned)
        learn_bias(run.sink, self.first + UP_BIAS, part, ends, du, _ones(rows))
        if self.h in run.wants:
            dx = product(du, mixture.back(part), ends, low=ds, up=part.a)
            run.give_own(self.h, combined(dx, routes))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        copies = copies_of(shape, self.part)
        return {
            self.s: copies * shape.routed.up * shape.itemsize,
            self.u: copies * 2 * shape.routed.columns * shape.itemsize,
        }

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.h: math.ceil(self.come * shape.width) * shape.itemsize}

    def made_dense(self, shape: BlockShape) -> int:
        return 2 * _dense_bytes(shape)

    def makes_again(self, shape: BlockShape, there: bool) -> bool:
        return self.norm is not None and not there and (shape.trained or shape.routed.up > 0)

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. Gradients of the copies, after the copies that a weight's gradient reads."""
        experts = shape.routed
        copies = copies_of(shape, self.part) * (shape.width + experts.up) * shape.itemsize
        return super().beside_back(shape, there) + copies

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        experts, m = shape.routed, rows * copies_of(shape, self.part)
        yield from _ahead(shape, m, shape.width, 2 * experts.columns, experts.up)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        experts, m = shape.routed, rows * copies_of(shape, self.part)
        sizes = shape.width, 2 * experts.columns, experts.up
        yield from _back(shape, m, *sizes)
        # put together, and added
        yield "memory", Cost(0, (m + 2 * self.come * rows) * shape.width * shape.itemsize)


@dataclass(eq=False)
class Combined(OfMixture):
    """d = the sum over a token's experts of m W^T + s b^T with m = act(gate) * up * share, which lives in
    here alone, and s = m a^T. behind: which of the block's bottlenecks reads d, in float32. part, come: see
    Dispatched; there are as many d as x."""

    routes: str
    share: str
    u: str
    s: str
    d: str
    act: Act
    behind: int | None = None
    keep: Level | None = None
    part: float = 1.0
    come: float = 1.0
    long = True

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.u, self.share, self.routes), (self.s, self.d)
        self.keeps = {self.s: "input"} if self.keep is None else {self.s: "input", self.d: self.keep}
        self.trained = (*range(self.first + DOWN, self.first + DOWN + 3), self.first + DOWN_BIAS)
        self.reads = (self.routes, self.share, self.u, self.s)

    def forward(self, run: BlockRun, v: Values) -> None:
        mixture, routes = run.mixtures[self.at], Routes(*v[self.routes])
        part, share = mixture.down, routes.sorted(v[self.share])
        m = gated(v[self.u], share, self.act)
        v[self.s] = s = None if part.a is None else product(m, part.a.mT, routes.ends)
        low, up = added(part, s, share)
        y = product(m, mixture.ahead(part), routes.ends, low=low, up=up)
        del m
        v[self.d] = widened(run, self.behind, combined(y, routes))

    def backward(self, run: BlockRun, v: Values) -> None:
        mixture, dd, routes = run.mixtures[self.at], run.grads.pop(self.d), Routes(*v[self.routes])
        part, ends, turned = mixture.down, routes.ends, mixture.transposed
        rows, share = routes.tokens, routes.sorted(v[self.share])
        ds = None if part.b is None else product(dd, part.b, ends, rows=rows)
        dm = product(dd, mixture.back(part), ends, rows=rows, low=ds, up=part.a)
        du, dshare, m = dgated(dm, v[self.u], share, self.act)
        del dm
        s, own = v[self.s], LinearInput.of(m)
        learn(run.sink, self.first + DOWN, part, ends, dd, s, ds, own, dy_rows=rows, transposed=turned)
        learn_bias(run.sink, self.first + DOWN_BIAS, part, ends, dd, share, rows)
        if part.bias is not None:
            dshare = dshare + product(dd, part.bias[:, :, None], ends, rows=rows)[:, 0]
        if self.u in run.wants:
            run.grads[self.u] = du
        if self.share in run.wants:
            run.grads[self.share] = routes.unsorted(dshare)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {
            self.s: copies_of(shape, self.part) * shape.routed.down * shape.itemsize,
            self.d: math.ceil(self.come * shape.width) * item_before(shape, self.behind),
        }

    def beside(self, shape: BlockShape) -> int:
        """See Step. m, and what it makes of each copy."""
        return copies_of(shape, self.part) * (shape.width + shape.routed.columns) * shape.itemsize

    def made_dense(self, shape: BlockShape) -> int:
        return _dense_bytes(shape)

    def grads(self, shape: BlockShape) -> dict[str, int]:
        copies = copies_of(shape, self.part)
        return {
            self.u: copies * 2 * shape.routed.columns * shape.itemsize,
            self.share: math.ceil(self.come * shape.routed.chosen) * max(4, shape.itemsize),
        }

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. m and dm, or m and the copies of dd that a weight's gradient reads."""
        experts = shape.routed
        inside = experts.down + experts.columns + max(experts.columns, shape.width * shape.trained)
        return copies_of(shape, self.part) * inside * shape.itemsize

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        experts, m = shape.routed, rows * copies_of(shape, self.part)
        yield "memory", op_cost.activate(m, experts.columns, True, shape.itemsize)
        yield from _ahead(shape, m, experts.columns, shape.width, experts.down)
        summed = (m + self.come * rows) * shape.width * shape.itemsize
        yield "memory", Cost(m * shape.width, summed)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        experts, m = shape.routed, rows * copies_of(shape, self.part)
        sizes = experts.columns, shape.width, experts.down
        yield from _back(shape, m, *sizes)
        again = Cost(4 * m * experts.columns, m * experts.columns * shape.itemsize)  # m, and of shares
        yield "memory", op_cost.activate_backward(m, experts.columns, True, shape.itemsize) + again


def experts(
    name: str, core: RoutedMlp, own: OwnOf, route: Route, act: Act, behind: int | None, keep: Level | None
) -> list[Step]:
    """d = the sum over the experts of a token, all of which are here."""
    u, low, routes = f"{name}.u", f"{name}.s_down", route.routes
    summed = Combined(*own, routes, route.share, u, low, f"{name}.d", act, behind, keep)
    return [Dispatched(*own, routes, f"{name}.s", u), summed]


def copies_of(shape: BlockShape, part: float) -> int:
    """Rows that experts compute on for each token. part: of each copy, where ranks share the experts."""
    return math.ceil(part * shape.routed.chosen)


def _ones(rows: Tensor) -> Tensor:
    """What each of these rows counts in a product that nothing is weighed in, [M]."""
    return torch.ones(len(rows), device=rows.device)


# ------------------------------------------------------------------ costs


def _dense_bytes(shape: BlockShape) -> int:
    """Of the weights of down of all experts, made dense."""
    experts = shape.routed
    return experts.number * experts.columns * shape.width * shape.itemsize * bool(experts.made)


def _ahead(shape: BlockShape, m: float, inputs: int, outputs: int, rank: int) -> Iterator[Charge]:
    """A product of `m` sorted rows with its low-rank update."""
    experts, itemsize = shape.routed, shape.itemsize
    yield from _made(shape, inputs, outputs, rank)
    if rank:
        yield "narrow", op_cost.grouped(m, inputs, rank, experts.number, itemsize)
    yield "grouped", op_cost.grouped(m, inputs + rank, outputs, experts.number, itemsize)


def _made(shape: BlockShape, inputs: int, outputs: int, rank: int) -> Iterator[Charge]:
    """What is made of tensors for a product and dropped: sorted places and what each row counts; quantised
    weights made dense, wider ones rounded; both factors scaled and rounded."""
    experts = shape.routed
    for _ in range(SORTED):
        yield "memory", SMALL
    if experts.made:
        yield "memory", op_cost.dense_into(experts.number, inputs * outputs, experts.made, shape.itemsize)
    elif shape.weight_bytes != shape.itemsize:
        yield "memory", op_cost.cast(experts.number * inputs * outputs, shape.weight_bytes, shape.itemsize)
    for columns in (inputs, outputs) if rank else ():
        yield "memory", op_cost.cast(experts.number * columns * rank, 4, shape.itemsize)


def _back(shape: BlockShape, m: float, inputs: int, outputs: int, rank: int) -> Iterator[Charge]:
    """The way back through it, with the gradients of what trains, those of factors in float32 in the end."""
    experts, itemsize = shape.routed, shape.itemsize
    yield from _made(shape, inputs, outputs, rank)
    yield "grouped", op_cost.grouped(m, outputs + rank, inputs, experts.number, itemsize)
    if rank:
        yield "narrow", op_cost.grouped(m, outputs, rank, experts.number, itemsize)
        yield "memory", op_cost.copy(experts.number * rank, inputs, itemsize)  # scaled
        for columns in (inputs, outputs):
            yield "narrow", op_cost.grouped(m, columns, rank, experts.number, itemsize)
            yield "memory", op_cost.cast(experts.number * columns * rank, itemsize, 4)
    if shape.trained:
        yield "grouped", op_cost.grouped(m, outputs, inputs, experts.number, itemsize)
        yield "memory", op_cost.cast(experts.number * inputs * outputs, itemsize, shape.weight_bytes)
