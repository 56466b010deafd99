"""A bias of attention scores by distance alone, as T5 has: [heads, 2 L - 1] numbers stand for [heads,
queries, keys].

        b[h, i, j] = bias[h, j - i + L - 1]        i, j < L

Made of the embedding table once for all blocks (`from_table`), it is added inside the kernels, which keep no
scores.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def from_table(table: Tensor, longest: int, bidirectional: bool, max_distance: int) -> Tensor:
    """The bias by distance [heads, 2 longest - 1] of T5's embedding `table` [buckets, heads]; differentiable.

    bidirectional: an encoder; in a decoder all later keys, which it does not see, share a bucket (Raffel et
    al. 2020).
    """
    distance = torch.arange(1 - longest, longest, device=table.device)
    return F.embedding(_bucket(distance, len(table), bidirectional, max_distance), table).T.contiguous()


def made_by(attention: Any, path: str, longest: int, causal: bool) -> Tensor:
    """The bias by distance [heads, 2 longest - 1] of T5's attention with a table at `path`;
    differentiable."""
    table = attention.get_submodule(path).weight
    return from_table(table, longest, not causal, attention.relative_attention_max_distance)


def _bucket(distance: Tensor, buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """The bucket of each distance key - query: one each up to half, then one for each of equal ratios."""
    if bidirectional:
        buckets //= 2
        first, distance = torch.where(distance > 0, buckets, 0), distance.abs()
    else:
        first, distance = torch.zeros_like(distance), -distance.clamp(max=0)
    exact = buckets // 2
    ratio = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio.clamp(min=0) * (buckets - exact)).to(torch.int64)
    return first + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


def longest_of(bias: Tensor) -> int:
    """L of a bias by distance [heads, 2 L - 1]: the most tokens that a row or segment may have."""
    return (bias.shape[1] + 1) // 2


def by_distance(bias: Tensor, tokens: int) -> Tensor:
    """The dense bias [heads, tokens, tokens] of one by distance [heads, 2 L - 1], L >= tokens;
    differentiable."""
    longest = longest_of(bias)
    return bias.unfold(1, tokens, 1)[:, longest - tokens : longest].flip(1)
