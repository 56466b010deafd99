"""The steps of a mixture of experts: who goes where, both grouped products, and the sum with a shared expert.

Copies of tokens are sorted by expert (petune/kernels/grouped.py), M = tokens * chosen of them:

    share, routes = the router's    u = x[rows] W_up    m = act(gate) * up * share    d = combine(m W_down)

The share is multiplied in before the way down, so its gradient is a sum over what the activation gave, and
neither that product nor a copy of a token is kept: u is, or made again from x, which a norm gave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.block.dense import matmul32
from petune.kernels.block.mixture import DOWN, GATE, ROUTER, UP, learn
from petune.kernels.block.packed_linear import Rows
from petune.kernels.block.steps import Charge, Normalize, Run, Step, Values
from petune.kernels.configs import Level
from petune.kernels.dispatch import Ops
from petune.kernels.grouped import Routes, _gathered, product, routes_of
from petune.kernels.memory.op_cost import (
    SMALL,
    Cost,
    activate,
    activate_backward,
    add,
    grouped,
    low_rank,
    matmul,
)
from petune.kernels.memory.shape import BlockShape, Experts
from petune.kernels.reference import Act, wide


@dataclass(eq=False)
class _OfMixture(Step):
    """A step of the mixture number `at` of a block, of whose tensors the first is at `first`; norm: the step
    that gave h, from which h is made again where a weight's gradient asks for it."""

    h: str
    at: int
    first: int
    norm: Normalize | None
    rows = False

    def reading(self, *names: str) -> None:
        """Read these values on the way back, and h where it is there."""
        self.reads, self.soft = (*names, self.h) if self.norm is None else (*names, *self.norm.reads), ()
        if self.norm is not None:
            self.soft = (self.h,)

    def entered(self, run: Run, v: Values) -> Rows:
        """h, made only if it must be."""
        x = v.get(self.h)
        return Rows.of(x) if x is not None else self.norm.entered(run, v)  # type: ignore[union-attr]

    def makes_h_again(self, shape: BlockShape, there: bool) -> bool:
        """Whether its backward pass asks for h, which is gone."""
        return self.norm is not None and not there and shape.trained

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step."""
        return shape.width * shape.itemsize * self.makes_h_again(shape, there)

    def again(self, shape: BlockShape, rows: float, there: bool) -> Iterator[Charge]:
        """See Step."""
        if self.norm is not None and self.makes_h_again(shape, there):
            yield self.norm.charge(shape, rows)


@dataclass(eq=False)
class Route(_OfMixture):
    """Who goes where: index and share [m, chosen] of the experts that a token chooses, and the routes. probs:
    the softmax over all experts, kept where the shares are not divided by their sum.

    None of it is made again, so that both passes send a token the same way.
    """

    name: str
    chosen: int
    normed: bool
    rounded: bool

    def __post_init__(self) -> None:
        names = ("routes", "index", "share", *(() if self.normed else ("probs",)))
        self.takes, self.gives = (self.h,), tuple(f"{self.name}.{one}" for one in names)
        self.routes, self.index, self.share = self.gives[:3]
        self.probs = self.gives[-1]
        self.keeps = dict.fromkeys(self.gives, "input")
        self.trained = (self.first + ROUTER,)
        self.reading(*self.gives[1:])

    def forward(self, run: Run, v: Values) -> None:
        """See Step. Rounded where the routers of transformers round."""
        part = run.mixtures[self.at]
        scores = F.linear(v[self.h], part.router)
        probs = torch.softmax(scores, -1, dtype=torch.float32)
        share, index = probs.topk(self.chosen, -1)
        if self.normed:
            share = share / share.sum(-1, keepdim=True)
        else:
            v[self.probs] = probs
        v[self.share] = share.to(scores.dtype) if self.rounded else share
        v[self.index], v[self.routes] = index, tuple(routes_of(index, len(part.router)))
        for hear in part.listeners:
            hear(index)

    def backward(self, run: Run, v: Values) -> None:
        """See Step."""
        part, dshare = run.mixtures[self.at], wide(run.grads.pop(self.share))
        share, index = v[self.share].to(dshare.dtype), v[self.index]
        each = share * dshare
        total = each.sum(-1, keepdim=True)
        if self.normed:
            dscores = dshare.new_zeros(len(index), len(part.router)).scatter_(1, index, each - share * total)
        else:
            dscores = (v[self.probs].to(dshare.dtype) * -total).scatter_add_(1, index, each)
        dscores = dscores.to(part.router.dtype)
        if run.sink.needs[self.first + ROUTER]:
            run.sink.add(self.first + ROUTER, matmul32(dscores.T, self.entered(run, v).matrix()))
        if self.h in run.wants:
            run.give_own(self.h, dscores @ part.router)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        share = shape.itemsize if self.rounded else 4
        every = () if self.normed else (4 * shape.routed.number,)
        places = shape.routed.chosen * 8
        return dict(zip(self.gives, (2 * places, places, share * shape.routed.chosen, *every), strict=True))

    def beside(self, shape: BlockShape) -> int:
        """See Step. Scores and their softmax."""
        return shape.routed.number * (shape.itemsize + 4 * self.normed)

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.h: shape.width * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. The gradient of the scores, as it is summed and rounded."""
        return super().beside_back(shape, there) + shape.routed.number * (4 + shape.itemsize)

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step."""
        experts = shape.routed
        yield "matmul", matmul(rows, shape.width, experts.number, shape.itemsize)
        yield "memory", Cost(0, 12 * rows * experts.number)
        for _ in range(ROUTING):
            yield "memory", Cost(0, 16 * rows * experts.chosen)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step."""
        experts = shape.routed
        yield "memory", Cost(0, 8 * rows * experts.number)
        for _ in range(1 + shape.trained):
            yield "matmul", matmul(rows, shape.width, experts.number, shape.itemsize)
        yield "memory", add(rows, shape.width, shape.itemsize)


@dataclass(eq=False)
class Dispatched(_OfMixture):
    """u = x[rows] W^T + s b^T of gate | up, sorted by expert, and s = x[rows] a^T, its low-rank input."""

    routes: str
    s: str
    u: str

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.h, self.routes), (self.s, self.u)
        self.keeps = dict.fromkeys(self.gives, "all")
        self.trained = tuple(range(self.first + UP, self.first + UP + 3))
        self.reading(self.routes, self.s)

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        part, x, routes = run.mixtures[self.at].up, v[self.h], Routes(*v[self.routes])
        rows = tokens_of(routes)
        v[self.s] = s = None if part.a is None else product(x, part.a.mT, routes.ends, rows=rows)
        v[self.u] = product(x, part.weight.mT, routes.ends, rows=rows, low=s, up=_turned(part.b))

    def backward(self, run: Run, v: Values) -> None:
        """See Step."""
        part, du, routes = run.mixtures[self.at].up, run.grads.pop(self.u), Routes(*v[self.routes])
        ds = None if part.b is None else product(du, part.b, routes.ends)
        rows = tokens_of(routes)
        learn(
            run.sink, self.first + UP, part, routes.ends, du, v[self.s], ds, self.entered(run, v), x_rows=rows
        )
        if self.h in run.wants:
            dx = product(du, part.weight, routes.ends, low=ds, up=part.a)
            run.give_own(self.h, _gathered(dx, routes))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        experts = shape.routed
        return {
            self.s: experts.chosen * experts.up * shape.itemsize,
            self.u: experts.chosen * 2 * experts.columns * shape.itemsize,
        }

    def beside(self, shape: BlockShape) -> int:
        """See Step. The copies of tokens, and the update before it is added."""
        experts = shape.routed
        inside = shape.width + 2 * experts.columns * (experts.up > 0)
        return experts.chosen * inside * shape.itemsize

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.h: shape.width * shape.itemsize}

    def makes_h_again(self, shape: BlockShape, there: bool) -> bool:
        """See _OfMixture."""
        return self.norm is not None and not there and (shape.trained or shape.routed.up > 0)

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. Gradients of the copies, twice while they are put back in the order of tokens."""
        experts = shape.routed
        copies = experts.chosen * (2 * shape.width + experts.up) * shape.itemsize
        return super().beside_back(shape, there) + copies

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step."""
        experts, m = shape.routed, rows * shape.routed.chosen
        yield from _ahead(experts, m, shape.width, 2 * experts.columns, experts.up, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step."""
        experts, m = shape.routed, rows * shape.routed.chosen
        sizes = shape.width, 2 * experts.columns, experts.up
        yield from _back(experts, m, *sizes, shape.trained, shape.itemsize)
        yield "memory", Cost(0, (m + 2 * rows) * shape.width * shape.itemsize)  # put together, and added


@dataclass(eq=False)
class Combined(_OfMixture):
    """d = the sum over a token's experts of m W^T + s b^T with m = act(gate) * up * share, which lives in
    here alone, and s = m a^T. behind: which of the block's bottlenecks reads d, in float32."""

    routes: str
    share: str
    u: str
    s: str
    d: str
    act: Act
    behind: int | None = None
    keep: Level | None = None

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.u, self.share, self.routes), (self.s, self.d)
        self.keeps = {self.s: "input"} if self.keep is None else {self.s: "input", self.d: self.keep}
        self.trained = tuple(range(self.first + DOWN, self.first + DOWN + 3))
        self.reads = (self.routes, self.share, self.u, self.s)

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        part, routes = run.mixtures[self.at].down, Routes(*v[self.routes])
        m = gated(run.ops, v[self.u], _sorted(v[self.share], routes), self.act)
        v[self.s] = s = None if part.a is None else product(m, part.a.mT, routes.ends)
        y = product(m, part.weight.mT, routes.ends, low=s, up=_turned(part.b))
        v[self.d] = widened(run, self.behind, _gathered(y, routes))

    def backward(self, run: Run, v: Values) -> None:
        """See Step."""
        part, dd, routes = run.mixtures[self.at].down, run.grads.pop(self.d), Routes(*v[self.routes])
        rows, share = tokens_of(routes), _sorted(v[self.share], routes)
        ds = None if part.b is None else product(dd, part.b, routes.ends, rows=rows)
        dm = product(dd, part.weight, routes.ends, rows=rows, low=ds, up=part.a)
        du, dshare, m = dgated(run.ops, dm, v[self.u], share, self.act)
        learn(run.sink, self.first + DOWN, part, routes.ends, dd, v[self.s], ds, Rows.of(m), dy_rows=rows)
        if self.u in run.wants:
            run.grads[self.u] = du
        if self.share in run.wants:
            run.grads[self.share] = dshare[routes.inverse].view(-1, routes.chosen)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        low, wider = shape.routed.chosen * shape.routed.down * shape.itemsize, shape.itemsize
        wider = wider if self.behind is None else max(4, wider)
        return {self.s: low, self.d: shape.width * wider}

    def beside(self, shape: BlockShape) -> int:
        """See Step. The sum of each copy and the same in the order of tokens; m is gone by then."""
        return shape.routed.chosen * 2 * shape.width * shape.itemsize

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        experts = shape.routed
        return {
            self.u: experts.chosen * 2 * experts.columns * shape.itemsize,
            self.share: experts.chosen * max(4, shape.itemsize),
        }

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. dm and the same times the share, m, and what the activation gave; or the copies of dd."""
        experts = shape.routed
        return experts.chosen * (4 * experts.columns + shape.width + experts.down) * shape.itemsize

    def _activated(self, shape: BlockShape, rows: float) -> Iterator[Charge]:
        m, columns = rows * shape.routed.chosen, shape.routed.columns
        yield "memory", activate(m, columns, True, shape.itemsize)
        yield "memory", Cost(m * columns, 2 * m * columns * shape.itemsize)  # times the share

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step."""
        experts, m = shape.routed, rows * shape.routed.chosen
        yield from self._activated(shape, rows)
        yield from _ahead(experts, m, experts.columns, shape.width, experts.down, shape.itemsize)
        yield "memory", Cost(0, (3 * m + rows) * shape.width * shape.itemsize)  # in order, and summed

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step."""
        experts, m = shape.routed, rows * shape.routed.chosen
        sizes = experts.columns, shape.width, experts.down
        yield from _back(experts, m, *sizes, shape.trained, shape.itemsize)
        yield from self._activated(shape, rows)
        yield "memory", Cost(m * experts.columns, 4 * m * experts.columns * shape.itemsize)
        yield "memory", activate_backward(m, experts.columns, True, shape.itemsize)


@dataclass(eq=False)
class AddShared(_OfMixture):
    """y = d + sigmoid(x w^T) e of a shared expert's e, in place of d. behind: see Combined."""

    d: str
    e: str
    gate: str
    y: str
    behind: int | None = None
    keep: Level | None = None
    rows = True

    def __post_init__(self) -> None:
        self.takes, self.gives, self.over = (self.d, self.e, self.h), (self.y, self.gate), self.d
        self.keeps = {self.gate: "input"} if self.keep is None else {self.gate: "input", self.y: self.keep}
        self.trained = (self.first + GATE,)
        self.reading(self.e, self.gate)

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        part, d = run.mixtures[self.at], v[self.d]
        assert part.gate is not None
        v[self.gate] = gate = torch.sigmoid(v[self.h] @ part.gate.T)
        v[self.y] = torch.addcmul(d, gate.to(d.dtype), v[self.e].to(d.dtype), out=d)

    def backward(self, run: Run, v: Values) -> None:
        """See Step."""
        part, dy, gate = run.mixtures[self.at], run.grads.pop(self.y), v[self.gate]
        assert part.gate is not None
        dgate = ((wide(dy) * v[self.e]).sum(1, keepdim=True) * gate * (1 - gate)).to(gate.dtype)
        run.give(self.d, dy)
        if self.e in run.wants:
            run.grads[self.e] = dy * gate
        if run.sink.needs[self.first + GATE]:
            run.sink.add(self.first + GATE, matmul32(dgate.T, self.entered(run, v).matrix()))
        if self.h in run.wants:
            run.give_own(self.h, dgate * part.gate)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.gate: shape.itemsize}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return dict.fromkeys((self.e, self.h), shape.width * shape.itemsize)

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. The product whose rows are summed, in float32."""
        return super().beside_back(shape, there) + 4 * 2 * shape.width

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step."""
        yield "narrow", low_rank(rows, shape.width, 1, shape.itemsize)
        yield "memory", SMALL
        yield "memory", add(rows, shape.width, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        """See Step."""
        yield "memory", Cost(0, 6 * 4 * rows * shape.width)
        yield "memory", add(rows, shape.width, shape.itemsize)
        yield "memory", add(rows, shape.width, shape.itemsize)


ROUTING = 8  # kernels that sort tokens by expert and choose them, small beside the products


def tokens_of(routes: Routes) -> Tensor:
    """The token [M] of each sorted copy."""
    return routes.order // routes.chosen


def gated(ops: Ops, u: Tensor, share: Tensor, act: Act) -> Tensor:
    """act(gate) * up * share of gate | up [M, 2 n] and share [M]."""
    return _times(ops.activate(u, act, True)[0], share)


def dgated(ops: Ops, dm: Tensor, u: Tensor, share: Tensor, act: Act) -> tuple[Tensor, Tensor, Tensor]:
    """(the gradient of u, that of the share [M] in float32 at least, m again) of the gradient of what `gated`
    gave."""
    inner: Tensor = ops.activate(u, act, True)[0]
    dshare = (dm * inner).sum(1, dtype=torch.promote_types(dm.dtype, torch.float32))
    du: Tensor = ops.activate_backward(_times(dm, share), u, act, True)[0]
    return du, dshare, _times(inner, share)


def _times(x: Tensor, share: Tensor) -> Tensor:
    """Each row times its share, in the dtype of x."""
    return torch.mul(x, share[:, None], out=torch.empty_like(x))


def _sorted(share: Tensor, routes: Routes) -> Tensor:
    """Shares [tokens, chosen] in the order of the copies, [M]."""
    return share.reshape(-1)[routes.order]


def _turned(b: Tensor | None) -> Tensor | None:
    return None if b is None else b.mT


def widened(run: Run, behind: int | None, d: Tensor) -> Tensor:
    """What a bottleneck reads, in float32; as it is where there is none, or it is passed by."""
    return d if behind is None or run.bottlenecks[behind][0].tensors is None else wide(d)


# ------------------------------------------------------------------ costs


def _ahead(
    experts: Experts, m: float, inputs: int, outputs: int, rank: int, itemsize: int
) -> Iterator[Charge]:
    """A product of `m` sorted rows with its low-rank update."""
    if rank:
        yield "narrow", grouped(m, inputs, rank, experts.number, itemsize)
        yield "narrow", grouped(m, rank, outputs, experts.number, itemsize)
        yield "memory", Cost(0, 2 * m * outputs * itemsize)
    yield "matmul", grouped(m, inputs, outputs, experts.number, itemsize)


def _back(
    experts: Experts, m: float, inputs: int, outputs: int, rank: int, trained: bool, itemsize: int
) -> Iterator[Charge]:
    """The way back through it, with the gradients of what trains."""
    yield "matmul", grouped(m, outputs, inputs, experts.number, itemsize)
    if rank:
        yield "narrow", grouped(m, outputs, rank, experts.number, itemsize)
        yield "narrow", grouped(m, rank, inputs, experts.number, itemsize)
        yield "memory", Cost(0, 2 * m * inputs * itemsize)
        for columns in (inputs, outputs):
            yield "narrow", grouped(m, columns, rank, experts.number, itemsize)
    if trained:
        yield "matmul", grouped(m, outputs, inputs, experts.number, itemsize)
