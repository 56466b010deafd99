"""The steps before and behind attention by which it sees the tokens of other ranks, and what one rank's part
of attention on a whole sequence is.

As those of a boundary they are run over all rows at once, and again wherever what they give is made again: so
every rank has to keep the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.block.attention import How
from petune.kernels.block.attention_steps import Attend
from petune.kernels.block.boundary_steps import batched, flat
from petune.kernels.block.part import AttentionPart
from petune.kernels.block.steps import BlockRun, Step, Values
from petune.kernels.block.turns import then
from petune.kernels.block.varlen import overlapping
from petune.kernels.configs import Level
from petune.kernels.memory.shape import BlockShape
from petune.models.exchange import Exchange, Exchanged, Sizes, all_rows, fold, rows_of, unfold


@dataclass(eq=False)
class _Crossing(Step):
    """x -> y across the ranks of the exchange of attention number `how`. heads, kv_heads: of all ranks."""

    x: str
    y: str
    heads: int
    kv_heads: int
    head_dim: int
    how: int
    exchange: Exchanged
    rows = False
    level: ClassVar[Level] = "all"  # from which on y is kept

    def __post_init__(self) -> None:
        self.takes, self.gives, self.keeps = (self.x,), (self.y,), {self.y: self.level}

    def beside(self, shape: BlockShape) -> int:
        """See Step. The message, either way."""
        return sum(self.grads(shape).values())

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        return sum(self.sizes(shape).values())

    def talks(self, back: bool) -> bool:
        return True

    @property
    def _queries(self) -> Sizes:
        """Columns of queries of each rank that trades tokens for heads."""
        group = self.heads // self.kv_heads
        return tuple(group * self.head_dim * count for count in self.exchange.kv_heads)

    @property
    def _keys(self) -> Sizes:
        """Columns of keys, or of values, of each of them."""
        return tuple(self.head_dim * count for count in self.exchange.kv_heads)

    def _part(self, run: BlockRun) -> AttentionPart:
        part = run.hows[self.how].part
        assert part is not None, "attention on some tokens is given its exchange"
        return part

    def _parted(self, dqkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of dq, dk and dv, [m, heads of each, d]."""
        parts = dqkv.unflatten(1, (-1, self.head_dim)).split([self.heads, self.kv_heads, self.kv_heads], 1)
        dq, dk, dv = parts
        return dq, dk, dv


@dataclass(eq=False)
class Gather(_Crossing):
    """y = k | v of all tokens that own queries see, of own x = q | k | v. On the way back it adds their
    gradients to those of the queries. turned: the next step back takes the gradients of q, k and v one by
    one."""

    turned: bool

    def forward(self, run: BlockRun, v: Values) -> None:
        part, own = self._part(run), v[self.x][:, self.heads * self.head_dim :]
        found, exchange = part.crossed.enter(batched(run, own), ()), part.exchange
        if exchange.folded:
            found = unfold(found, exchange.sizes, 0 if part.seen is None else exchange.index)
        elif part.seen is not None:
            found = found[:, slice(*part.seen)]
        v[self.y] = flat(found)

    def backward(self, run: BlockRun, v: Values) -> None:
        """See Step. What own queries do not see gets zeros from here."""
        part, found = self._part(run), batched(run, run.grads.pop(self.y))
        if part.exchange.folded:
            found = fold(found, part.exchange.sizes)
        elif part.seen is not None:
            found = F.pad(found, (0, 0, part.seen[0], part.rows.whole - part.seen[1]))
        dkv = flat(part.crossed.enter_backward(found, ())).unflatten(1, (-1, self.head_dim))
        then(partial(self._put_together, run, dkv))

    def _put_together(self, run: BlockRun, dkv: Tensor) -> None:
        """The gradient of q | k | v, or of each."""
        dq = run.grads.pop(self.x).unflatten(1, (-1, self.head_dim))
        if self.turned:
            run.grads[self.x] = dq, *dkv.split(self.kv_heads, 1)
        else:
            run.grads[self.x] = torch.cat([dq, dkv], 1).flatten(1)

    def _columns(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.y: self.exchange.whole(self._columns() * shape.itemsize)}

    def beside(self, shape: BlockShape) -> int:
        """See Step. The message, of which attention reads a copy."""
        return sum(self.sizes(shape).values())

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step. Where they are turned next, those of the queries are handed on as they are."""
        return {self.x: (self.heads * self.head_dim + self._columns()) * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. What is sent, while those of the queries are there once; then those of own keys."""
        own = 0 if self.turned else self._columns() * shape.itemsize
        return max(sum(self.sizes(shape).values()) - self.heads * self.head_dim * shape.itemsize, own)


@dataclass(eq=False)
class Trade(_Crossing):
    """y = q | k | v of all tokens and of some heads, of own tokens' x = q | k | v. turned: see Gather."""

    turned: bool
    level = "projections"

    def forward(self, run: BlockRun, v: Values) -> None:
        v[self.y] = flat(self._part(run).crossed.enter(batched(run, v[self.x]), self._traded))

    def backward(self, run: BlockRun, v: Values) -> None:
        dy = batched(run, run.grads.pop(self.y))
        dx = flat(self._part(run).crossed.enter_backward(dy, self._traded))
        run.grads[self.x] = self._parted(dx) if self.turned else dx

    @property
    def _traded(self) -> tuple[Sizes, Sizes, Sizes]:
        return self._queries, self._keys, self._keys

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        own = sum(matrix[self.exchange.index] for matrix in self._traded)
        return {self.y: self.exchange.whole(own * shape.itemsize)}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.x: sum(map(sum, self._traded)) * shape.itemsize}


@dataclass(eq=False)
class TradeBack(_Crossing):
    """y = own tokens of all heads' x, of all tokens of some heads."""

    def forward(self, run: BlockRun, v: Values) -> None:
        v[self.y] = flat(self._part(run).crossed.leave(batched(run, v[self.x]), (self._queries,)))

    def backward(self, run: BlockRun, v: Values) -> None:
        dy = batched(run, run.grads.pop(self.y))
        run.grads[self.x] = flat(self._part(run).crossed.leave_backward(dy, (self._queries,)))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.y: sum(self._queries) * shape.itemsize}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.x: self.exchange.whole(self._queries[self.exchange.index] * shape.itemsize)}


# ------------------------------------------------------------------ one rank's part of a call


def shared(how: How, step: Attend, exchange: Exchange) -> How:
    """How this rank attends, of how all tokens attend; exchange: as of the running call."""
    if step.traded is not None:
        part = AttentionPart(exchange, all_rows(sum(exchange.sizes)), step.traded)
    else:
        masked = how.mask.shape[-1] if step.crosses and how.mask is not None else None
        rows = rows_of(exchange.sizes, exchange.index, masked, exchange.folded)
        # what comes later is not attended to at all
        later = exchange.kind == "gather" and how.causal and how.mask is None
        part = AttentionPart(exchange, rows, seen=(0, rows.end) if later else None)
    if how.segments is None or part.heads is not None:
        return replace(how, mask=part.of(how.mask), part=part)
    others = how.memory if step.crosses else how.segments
    assert others is not None, "segments of queries go with segments of keys"
    own, keys, seen = overlapping(how.segments, others, part.rows.first, part.rows.end, how.causal)
    return replace(how, segments=own, memory=keys, part=replace(part, seen=seen))
