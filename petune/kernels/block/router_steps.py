"""The steps around the experts of a mixture: who goes where, and the sum with a shared expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.block.dense import matmul32
from petune.kernels.block.mixture import GATE, ROUTER, ROUTER_BIAS
from petune.kernels.block.steps import BlockRun, Charge, Normalize, OfNormed, Values
from petune.kernels.configs import Level
from petune.kernels.memory.op_cost import SMALL, Cost, add, low_rank, matmul
from petune.kernels.memory.shape import BlockShape
from petune.kernels.reference import wide
from petune.models.routes import routes_of

# of a mixture's steps: what enters it, its number, the place of its first tensor, the norm that gave it
OwnOf = tuple[str, int, int, Normalize | None]
# Kernels small beside the products. Ahead: the experts of each token and their shares, 5; the copies sorted
# by expert, whose keys of 64 bits take 8 passes, with what is counted and filled before them, 12; their
# inverse and the ends of groups, 5. Back through shares and softmax.
ROUTING, UNROUTING = 22, 8


@dataclass(eq=False)
class OfMixture(OfNormed):
    """A step of the mixture number `at` of a block, of whose tensors the first is at `first`; norm: the step
    that gave h, from which h is made again where a weight's gradient asks for it."""

    h: str
    at: int
    first: int
    norm: Normalize | None
    rows = False

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        return shape.width * shape.itemsize * self.makes_again(shape, there)


@dataclass(eq=False)
class Route(OfMixture):
    """Who goes where: index and share [m, chosen] of the experts that a token chooses, and the routes where
    all experts are here. probs: the softmax over all of them, kept where the shares are not divided by their
    sum.

    None of it is made again, so that both passes send a token the same way.
    """

    name: str
    chosen: int
    normed: bool
    rounded: bool
    here: bool

    def __post_init__(self) -> None:
        names = ("index", "share", "probs", "routes")
        self.index, self.share, self.probs, self.routes = (f"{self.name}.{one}" for one in names)
        read = (self.index, self.share, *(() if self.normed else (self.probs,)))
        self.takes, self.gives = (self.h,), (*read, *((self.routes,) if self.here else ()))
        self.keeps = dict.fromkeys(self.gives, "input")
        self.trained = (self.first + ROUTER, self.first + ROUTER_BIAS)
        self.reading(self.h, *read)

    def forward(self, run: BlockRun, v: Values) -> None:
        """See Step. Rounded where the routers of transformers round."""
        part = run.mixtures[self.at]
        scores = F.linear(v[self.h], part.router, part.router_bias)
        probs = torch.softmax(scores, -1, dtype=torch.float32)
        share, index = probs.topk(self.chosen, -1)
        if self.normed:
            share = share / share.sum(-1, keepdim=True)
        else:
            v[self.probs] = probs
        v[self.share] = share.to(scores.dtype) if self.rounded else share
        v[self.index] = index
        if self.here:
            v[self.routes] = tuple(routes_of(index, len(part.router)))
        for hear in part.listeners:
            hear(index)

    def backward(self, run: BlockRun, v: Values) -> None:
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
        if part.router_bias is not None and run.sink.needs[self.first + ROUTER_BIAS]:
            run.sink.add(self.first + ROUTER_BIAS, wide(dscores).sum(0))
        if self.h in run.wants:
            run.give_own(self.h, dscores @ part.router)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        share = shape.itemsize if self.rounded else 4
        places = shape.routed.chosen * 8
        each = {self.index: places, self.share: share * shape.routed.chosen}
        each |= {self.probs: 4 * shape.routed.number, self.routes: 2 * places}
        return {name: each[name] for name in self.gives}

    def beside(self, shape: BlockShape) -> int:
        """See Step. Scores and their softmax."""
        return shape.routed.number * (shape.itemsize + 4 * self.normed)

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.h: shape.width * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. The gradient of the scores, as it is summed and rounded."""
        return super().beside_back(shape, there) + shape.routed.number * (4 + shape.itemsize)

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        experts = shape.routed
        yield "matmul", matmul(rows, shape.width, experts.number, shape.itemsize)
        yield "memory", Cost(0, 12 * rows * experts.number)
        for _ in range(ROUTING):
            yield "memory", Cost(0, 16 * rows * experts.chosen)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        experts = shape.routed
        yield "memory", Cost(0, 8 * rows * experts.number)
        for _ in range(UNROUTING):
            yield "memory", SMALL
        for _ in range(1 + shape.trained):
            yield "matmul", matmul(rows, shape.width, experts.number, shape.itemsize)
        yield "memory", add(rows, shape.width, shape.itemsize)


@dataclass(eq=False)
class AddShared(OfMixture):
    """y = d + sigmoid(x w^T) e of a shared expert's e, in place of d."""

    d: str
    e: str
    gate: str
    y: str
    keep: Level | None = None
    rows = True

    def __post_init__(self) -> None:
        self.takes, self.gives, self.over = (self.d, self.e, self.h), (self.y, self.gate), self.d
        self.keeps = {self.gate: "input"} if self.keep is None else {self.gate: "input", self.y: self.keep}
        self.trained = (self.first + GATE,)
        self.reading(self.h, self.e, self.gate)

    def forward(self, run: BlockRun, v: Values) -> None:
        part, d = run.mixtures[self.at], v[self.d]
        assert part.gate is not None
        v[self.gate] = gate = torch.sigmoid(v[self.h] @ part.gate.T)
        v[self.y] = torch.addcmul(d, gate.to(d.dtype), v[self.e].to(d.dtype), out=d)

    def backward(self, run: BlockRun, v: Values) -> None:
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
        return {self.gate: shape.itemsize}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step. That of d is y's, and a copy of it where tiles are put together."""
        return dict.fromkeys((self.d, self.e, self.h), shape.width * shape.itemsize)

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. The product whose rows are summed, in float32."""
        return super().beside_back(shape, there) + 4 * 2 * shape.width

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield "narrow", low_rank(rows, shape.width, 1, shape.itemsize)
        yield "memory", SMALL
        yield "memory", add(rows, shape.width, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        yield "memory", Cost(0, 6 * 4 * rows * shape.width)
        yield "memory", add(rows, shape.width, shape.itemsize)
        yield "memory", add(rows, shape.width, shape.itemsize)


def widened(run: BlockRun, behind: int | None, d: Tensor) -> Tensor:
    """What a bottleneck reads, in float32; as it is where there is none, or it is passed by."""
    return d if behind is None or run.bottlenecks[behind][0].tensors is None else wide(d)
