"""Attention with scores of positions (DeBERTa, He et al. 2021, arXiv:2006.03654) in segments, as one autograd
node that keeps nothing of pairs of tokens:

        S_ij = scale (q_i k_j + q_i k_pos_b + k_j q_pos_b)        out = softmax(S) v

with the bucket b of the distance j - i. The products of tokens with positions are made again in the backward
pass. Two forms: kernels of our own, and plain torch, which computes its forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.kernels.block.layout import places_of
from petune.kernels.block.varlen import Segments
from petune.rng.context import running
from petune.rng.dropout import Drop, draw, drop_of_heads, dropped_attention

# q, k, v [m, heads, d]; q_pos, k_pos [columns, heads, d], None where there are no such scores
ScoredInputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@cache
def _kernels() -> Any:
    """Ours, imported where they can run."""
    return import_module("petune.kernels.triton.attention")


@dataclass(frozen=True)
class ScoredAttention:
    """Attention of the tokens in `segments` to one another. kernels: by Triton's."""

    segments: Segments
    kernels: bool

    def __call__(
        self, inputs: ScoredInputs, buckets: Tensor | None, scale: float, p: float, first_head: int
    ) -> Tensor:
        """out [m, heads d], differentiable. buckets: int32 [2 t - 1], the column of positions for each
        distance key - query, which does not grow with it; None without scores of positions. p:
        of dropout of the probabilities; first_head: the number in the whole model of the first head here."""
        drop = None
        if p:
            numbers = running().numbers
            if numbers is None:
                numbers = places_of(inputs[0], self.segments, len(inputs[0]))
            drop = drop_of_heads(draw(numbers, p), first_head)
        how = _How(self.segments, self.kernels, buckets, scale, drop)
        return cast("Tensor", _Attend.apply(how, *inputs)).flatten(1)  # type: ignore[no-untyped-call]  # torch's


@dataclass(frozen=True)
class _How:
    """One call. buckets: int32 [2 t - 1], the column of positions for each distance key - query."""

    segments: Segments
    kernels: bool
    buckets: Tensor | None
    scale: float
    drop: Drop | None

    def forward(self, inputs: ScoredInputs) -> tuple[Tensor, ...]:
        """out [m, heads, d] and what the backward pass reads besides."""
        if not self.kernels:
            with torch.no_grad():
                return (self._attended(inputs),)
        q, k, v, *_ = inputs
        found: tuple[Tensor, Tensor] = _kernels().forward(q, k, v, *self._rest(inputs))
        return found

    def backward(self, dout: Tensor, inputs: ScoredInputs, kept: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of `inputs`, of all that are there. kept: what `forward` gave."""
        if not self.kernels:
            leaves = [None if one is None else one.detach().requires_grad_() for one in inputs]
            with torch.enable_grad():
                again = self._attended(cast("ScoredInputs", tuple(leaves)))
            found = iter(torch.autograd.grad(again, [one for one in leaves if one is not None], dout))
            return [None if one is None else next(found) for one in leaves]
        q, k, v, q_pos, k_pos = inputs
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        rest = self._rest(inputs)
        scores = rest[-1].by_query, rest[-1].by_key
        made = [None if one is None else torch.empty_like(one) for one in scores]
        out, lse = kept
        dq, dk, dv = _kernels().backward(dout, q, k, v, out, lse, *rest, dpositions=(made[0], made[1]))
        dpositions: list[Tensor | None] = []
        for total, x, position, by in ((dk, k, q_pos, made[1]), (dq, q, k_pos, made[0])):
            if position is None or by is None:
                dpositions.append(None)
                continue
            total += torch.bmm(by, position.transpose(0, 1)).transpose(0, 1)
            dpositions.append(torch.bmm(by.mT, x.transpose(0, 1)).transpose(0, 1))
        return [dq, dk, dv, *dpositions]

    def _rest(self, inputs: ScoredInputs) -> tuple[Any, ...]:
        """What the kernels take behind q, k and v."""
        attention = _kernels()
        q, k, _, q_pos, k_pos = inputs
        more = attention.MORE
        if self.buckets is not None:
            more = attention.More(
                by_query=_products(q, k_pos), by_key=_products(k, q_pos), buckets=self.buckets
            )
        return self.segments.starts, self.segments.longest, False, self.scale, self.drop, more

    def _attended(self, inputs: ScoredInputs) -> Tensor:
        """out of differentiable operations, of all segments of one length together."""
        outs, places = [], []
        for own in self.segments.by_length:
            q, k, v = (x[own].transpose(1, 2) for x in inputs[:3])  # [segments, heads, length, d]
            scores = q @ k.mT
            if self.buckets is not None:
                token = torch.arange(own.shape[1], device=own.device)
                column = self.buckets[token - token[:, None] + len(self.buckets) // 2].long()
                for x, position, turned in ((q, inputs[4], False), (k, inputs[3], True)):
                    if position is not None:
                        products = x @ position.permute(1, 2, 0)
                        every = (column.T if turned else column).expand(*products.shape[:3], -1)
                        found = products.gather(-1, every)
                        scores = scores + (found.mT if turned else found)
            weights = torch.softmax(scores * self.scale, -1, dtype=scores.dtype)
            if self.drop is not None:
                draws = [self.drop._replace(numbers=row) for row in self.drop.numbers[own]]
                weights = torch.stack([dropped_attention(*one) for one in zip(weights, draws, strict=True)])
            outs.append((weights @ v).transpose(1, 2).flatten(0, 1))
            places.append(own.flatten())
        return torch.cat(outs)[torch.cat(places).argsort()]


def _products(x: Tensor, positions: Tensor | None) -> Tensor | None:
    """Of tokens x [m, heads, d] with positions [columns, heads, d]: [heads, m, columns]."""
    return None if positions is None else torch.bmm(x.transpose(0, 1), positions.permute(1, 2, 0))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _How, *inputs: Any) -> Tensor:
        out, *kept = how.forward(cast("ScoredInputs", inputs))
        ctx.how = how
        ctx.save_for_backward(*inputs, *([out, *kept] if how.kernels else []))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        inputs, kept = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        return None, *ctx.how.backward(dout, inputs, kept)
