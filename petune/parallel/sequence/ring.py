"""Attention over blocks of keys and values that travel from rank to rank (Liu et al. 2023, arXiv:2310.01889).

At every step a rank looks at the block that is here while it is sent on and the next one comes in. The
softmax over all keys is accumulated as in Milakov and Gimelshein 2018 (arXiv:1805.02867), in float32 or
wider, so that no rank holds more than two blocks or sees a whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from petune.models.attention import no_later
from petune.models.transition import applied
from petune.parallel.collectives import MaybeGroup, Sizes, Transfer


@dataclass(frozen=True)
class Trip:
    """One attention round the ring: its ranks and their tokens, whether later keys are hidden without a mask,
    the factor on scores."""

    sizes: Sizes
    group: MaybeGroup
    index: int
    hides_later: bool
    scale: float

    def stops(self) -> list[int]:
        """Whose block is here at each step: the own one, then that of the rank before, ..."""
        return [(self.index - step) % len(self.sizes) for step in range(len(self.sizes))]

    def matters(self, block: int) -> bool:
        """Whether any own query looks at a key of `block`."""
        later = self.hides_later and block > self.index
        return self.sizes[block] > 0 and self.sizes[self.index] > 0 and not later

    def columns(self, x: Tensor, block: int) -> Tensor:
        """Of a mask or bias [.., own, all keys], the keys of `block`."""
        return x.narrow(-1, sum(self.sizes[:block]), self.sizes[block])

    def visible(self, mask: Tensor | None, block: int, device: torch.device) -> Tensor | None:
        """What own queries may look at of `block`, bool [.., own, keys]; None where no bool mask says."""
        if self.hides_later and block == self.index:
            return no_later(0, self.sizes[block], device)
        return self.columns(mask, block) if mask is not None and mask.dtype is torch.bool else None

    def scores(
        self, query: Tensor, key: Tensor, bias: Tensor | None, mask: Tensor | None, block: int
    ) -> Tensor:
        """[b, heads, own, keys of block], float32 or wider. What is hidden is -inf, or beside a bias the
        lowest number as in `attend`."""
        scores = _by_group(query, key) @ key.transpose(-1, -2)
        scores = scores.view(*query.shape[:3], key.shape[2]).to(_wide(query)) * self.scale
        if bias is not None:
            scores = scores + self.columns(bias, block)
        visible = self.visible(mask, block, query.device)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf if bias is None else torch.finfo(bias.dtype).min)
        elif mask is not None and mask.dtype is not torch.bool:
            scores = scores + self.columns(mask, block)
        return scores

    def pass_on(self, x: Tensor, block: int) -> Transfer:
        """Begin to send `x` [b, kv_heads, keys of block, d] on and to receive that of the block before."""
        shape = (*x.shape[:2], self.sizes[block - 1], x.shape[3])
        ranks = len(self.sizes)
        return Transfer(x, shape, self.group, (self.index + 1) % ranks, (self.index - 1) % ranks)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype in which sums over keys are kept."""
    return torch.promote_types(x.dtype, torch.float32)


def _by_group(x: Tensor, key: Tensor) -> Tensor:
    """[b, heads, own, d] -> [b, kv_heads, heads of a group * own, d], so that heads that share keys meet them
    in one product."""
    batch, heads, own, width = x.shape
    return x.reshape(batch, key.shape[1], heads // key.shape[1] * own, width)


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, trip: Trip
) -> Tensor:
    """Attention of own queries [b, heads, own, d] over the keys and values of all ranks, [b, kv_heads, own,
    d] here; as the queries, out.

    bias [1 | b, 1 | heads, own, all] is added to scores and may want a gradient; mask [b, 1 | heads, 1 | own,
    all] is bool or added.
    """
    return applied(_Ring, query.contiguous(), key, value, bias, mask, trip)


class _Ring(Function):
    """query, key, value, bias or None, mask or None -> output [b, heads, own, width of a value]: `ahead`,
    whose backward is `back`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        trip: Trip,
    ) -> Tensor:
        output, kept = ahead(query, key, value, bias, mask, trip)
        ctx.trip = trip
        ctx.save_for_backward(query, key, value, bias, mask, output, *kept)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, mask, output, *kept = ctx.saved_tensors
        bias_grad = torch.zeros_like(bias, dtype=_wide(query)) if ctx.needs_input_grad[3] else None
        grads = back(grad, query, key, value, bias, mask, output, kept, ctx.trip, bias_grad)
        return *grads, None if bias_grad is None else bias_grad.to(bias.dtype), None, None


def ahead(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, trip: Trip
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(output, (largest, share)) of `ring_attention`'s arguments; without autograd, as `back` is.

    Of each query the largest score m so far is kept, and over the keys so far l = sum exp(score - m) and o =
    sum exp(score - m) v. largest: m over all keys, share: 1 / l, [b, heads, own, 1] both, float32 or wider.
    """
    pair, widths, wide = torch.cat([key, value], -1), [key.shape[-1], value.shape[-1]], _wide(query)
    lowest = torch.finfo(wide).min  # where nothing was seen yet, exp(-inf - lowest) is 0 and not NaN
    largest = query.new_full((*query.shape[:3], 1), lowest, dtype=wide)
    total, output = torch.zeros_like(largest), query.new_zeros((*query.shape[:3], widths[1]), dtype=wide)
    for step, block in enumerate(trip.stops()):
        passing = trip.pass_on(pair, block) if step + 1 < len(trip.sizes) else None
        if trip.matters(block):
            block_key, block_value = pair.split(widths, -1)
            scores = trip.scores(query, block_key, bias, mask, block)
            before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, faded = torch.exp(scores - largest), torch.exp(before - largest)
            total = total * faded + weights.sum(-1, keepdim=True)
            weights = _by_group(weights.to(value.dtype), block_key)
            output = output * faded + (weights @ block_value).view(output.shape)
        if passing is not None:
            pair = passing.wait()
    share = torch.where(total > 0, 1 / total, 0.0)
    return (output * share).to(query.dtype), (largest, share)


def back(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    output: Tensor,
    kept: Sequence[Tensor],
    trip: Trip,
    bias_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, of that of the output; that of the bias is added to `bias_grad`.
    output, kept: what `ahead` gave.

    The probabilities p = exp(score - m) / l are made again, while keys, values and their gradients go round
    together:

        dv = p^T do,   ds = p * (do v^T - sum(do * o)),   dq = ds k scale,   dk = ds^T q scale,   dbias = ds
    """
    (largest, share), wide, widths = kept, _wide(query), [key.shape[-1], value.shape[-1]]
    pair, among = torch.cat([key, value], -1), (grad.to(wide) * output.to(wide)).sum(-1, keepdim=True)
    query_grad = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
    arriving: Transfer | None = None
    for step, block in enumerate(trip.stops()):
        passing = trip.pass_on(pair, block) if step + 1 < len(trip.sizes) else None
        pair_grad = torch.zeros_like(pair, dtype=wide)
        if trip.matters(block):
            block_key, block_value = pair.split(widths, -1)
            p = torch.exp(trip.scores(query, block_key, bias, mask, block) - largest) * share
            ds = p * ((_by_group(grad, block_key) @ block_value.transpose(-1, -2)).view(p.shape) - among)
            if bias_grad is not None:
                _add_bias_grad(trip.columns(bias_grad, block), ds, trip.visible(mask, block, ds.device))
            ds = _by_group((ds * trip.scale).to(query.dtype), block_key)
            query_grad += (ds @ block_key).view(query.shape)
            pair_grad[..., : widths[0]] = ds.transpose(-1, -2) @ _by_group(query, block_key)
            pair_grad[..., widths[0] :] = _by_group(p.to(grad.dtype), block_key).transpose(
                -1, -2
            ) @ _by_group(grad, block_key)
        arriving = trip.pass_on(pair_grad if arriving is None else pair_grad + arriving.wait(), block)
        if passing is not None:
            pair = passing.wait()
    assert arriving is not None
    key_grad, value_grad = arriving.wait().split(widths, -1)
    return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype)


def _add_bias_grad(into: Tensor, scores_grad: Tensor, visible: Tensor | None) -> None:
    """Add what reaches a bias: nothing where a mask took its place, sums where it is one for several."""
    if visible is not None:
        scores_grad = scores_grad.masked_fill(~visible, 0.0)
    into += scores_grad.sum_to_size(into.shape)
