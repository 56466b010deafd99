"""The kept tokens of a padded or packed batch: which they are, which of them attend to each other, and how
they are packed and put back.

A batch [b, t] is padded (`attention_mask`) or packed (`position_ids` that restart);
petune.kernels.block.unpad finds out which, in a running model. On the CPU nothing waits, and what is
found there goes to a device without a wait (`Segments.to`); of a mask on a CUDA device the host waits once,
for the lengths.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from petune.models.transition import applied
from petune.rng.context import sent

# ------------------------------------------------------------------ what is kept


@dataclass(frozen=True, eq=False)
class Segments:
    """The kept tokens of a batch [b, t], row by row, and which of them attend to each other: those of one
    segment.

    starts: [segments + 1] int32 on the batch's device, the first kept token of each segment, and the total.
    lengths: tokens of each segment, at least one. places: [total] int64, where each kept token lies in the
    flattened [b * t], ascending; None where all are kept. shape: (b, t).
    """

    starts: Tensor
    lengths: tuple[int, ...]
    places: Tensor | None
    shape: tuple[int, int]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return max(self.lengths, default=0)

    @cached_property
    def total(self) -> int:
        """Tokens kept."""
        return sum(self.lengths)

    @property
    def spans(self) -> tuple[int, ...]:
        """`lengths`, also where those are only room for segments."""
        return self.lengths

    @cached_property
    def tokens(self) -> Tensor:
        """The place of each kept token in its row, padding counted, [total] int64."""
        return self._places % self.shape[1]

    @cached_property
    def by_length(self) -> tuple[Tensor, ...]:
        """For each length that occurs, the kept tokens of its segments, [such segments, length] int64."""
        firsts = defaultdict(list)
        for first, length in zip(accumulate(self.lengths, initial=0), self.lengths, strict=False):
            firsts[length].append(first)
        device = self.starts.device
        return tuple(
            torch.tensor(own, device=device)[:, None] + torch.arange(length, device=device)
            for length, own in firsts.items()
        )

    def to(self, device: torch.device) -> Segments:
        """The same on `device`, on the way there; the host does not wait."""
        if self.starts.device == device:
            return self
        places = None if self.places is None else sent(self.places, device)
        return replace(self, starts=sent(self.starts, device), places=places)

    @property
    def _places(self) -> Tensor:
        return torch.arange(self.total, device=self.starts.device) if self.places is None else self.places


def of_rows(rows: int, total: int, device: torch.device) -> Segments:
    """One segment for each of `rows` rows of equal length, `total` tokens in all; nothing is left out."""
    length = total // max(1, rows)
    starts = torch.arange(0, rows * length + 1, max(1, length), dtype=torch.int32, device=device)
    return Segments(starts, (length,) * rows, None, (rows, length))


def each_row(x: Tensor) -> Segments:
    """One segment for each row of `x` [b, t, ...]."""
    return of_rows(len(x), x.shape[0] * x.shape[1], x.device)


def paired(queries: Segments, keys: Segments) -> tuple[tuple[Tensor, Tensor], ...]:
    """Segments that attend one to one, those of the same two lengths together: (their queries [n, q], their
    keys [n, k]), int64."""
    if keys is queries:
        return tuple((own, own) for own in queries.by_length)
    own, others = queries.spans, keys.spans
    if len(own) != len(others):
        raise ValueError(f"{len(own)} segments of queries, but {len(others)} of keys")
    pairs = defaultdict(list)
    firsts_of = accumulate(own, initial=0), accumulate(others, initial=0)
    for lengths, *firsts in zip(zip(own, others, strict=True), *firsts_of, strict=False):
        pairs[lengths].append(firsts)
    device = queries.starts.device
    return tuple(
        (both[:, :1] + torch.arange(q, device=device), both[:, 1:] + torch.arange(k, device=device))
        for (q, k), firsts in pairs.items()
        for both in (torch.tensor(firsts, device=device),)
    )


def overlapping(
    queries: Segments, keys: Segments, first: int, end: int, causal: bool
) -> tuple[Segments, Segments, tuple[int, int]]:
    """The segments that the queries [first, end) of all kept are in, those of the keys that they attend to,
    and which of all keys these are.

    keys: the queries' own segments, or as many of another sequence. causal: of the last segment the keys up
    to its last query here, so that of each the queries are the last of the keys.
    """
    begins, others = ([*accumulate(side.lengths, initial=0)] for side in (queries, keys))
    own = range(bisect_right(begins, first) - 1, bisect_left(begins, end)) if first < end else range(0)
    low, high = (others[own.start], end if causal else others[own.stop]) if own else (0, 0)
    own_rows = slice(own.start, own.stop)
    of_queries = _stretch(queries, own_rows, begins, first, end)
    return of_queries, _stretch(keys, own_rows, others, low, high), (low, high)


def _stretch(segments: Segments, own: slice, begins: Sequence[int], first: int, end: int) -> Segments:
    """What of the segments `own` lies in the kept tokens [first, end). begins: of each segment its first."""
    bounds = [min(max(begin, first), end) for begin in begins[own.start : own.stop + 1]]
    starts = segments.starts[own.start : own.stop + 1].clamp(first, end) - first
    lengths = tuple(stop - start for start, stop in pairwise(bounds))
    return Segments(starts, lengths, segments._places[first:end], segments.shape)


def from_mask(mask: Tensor, read: Tensor | None = None) -> Segments | str | None:
    """One segment for each row, as long as `mask` [b, t], of any dtype, is not zero; read: [b, t] bool,
    places that are read all the same.

    None where nothing is padding, and in words why padding has to be computed: it is not all behind the last
    token of a row, or is read.
    """
    kept = _array(mask != 0)
    counts = kept.sum(1)
    if (counts == mask.shape[1]).all():
        return None
    behind = np.arange(mask.shape[1]) >= counts.clip(1)[:, None]
    if (kept == behind).any():
        return "some of it stands before or between tokens, where heads and losses read; pad on the right"
    if read is not None and (_array(read) & behind).any():
        return "a label stands on it, or a head pools a token that the mask leaves out"
    starts = np.cumsum([0, *counts], dtype=np.int32)
    found = (torch.from_numpy(one) for one in (starts, np.flatnonzero(kept)))
    begins, places = (one.to(mask.device, non_blocking=True) for one in found)  # the host has waited once
    return Segments(begins, tuple(counts.tolist()), places, _shape(mask))


def _array(values: Tensor) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """`values` on the host, to be counted there: torch would wake a thread on every processor for it, which
    takes milliseconds before each step."""
    return values.cpu().numpy()


def from_positions(positions: Tensor) -> Segments | None:
    """One segment for each sample of a packed batch, by Hugging Face's rule: `positions` [b, t] that do not
    go on by one begin a sample.

    None where every row is one sample.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=1) != 1
    firsts = begins.flatten().cpu().nonzero().squeeze(1).tolist()
    if len(firsts) == len(positions):
        return None
    found = torch.nonzero_static(begins.flatten(), size=len(firsts))  # the device is not asked how many
    starts = F.pad(found.squeeze(1), (0, 1), value=positions.numel()).to(torch.int32)
    lengths = tuple(end - first for first, end in pairwise([*firsts, positions.numel()]))
    return Segments(starts, lengths, None, _shape(positions))


def _shape(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.shape[1]


# ------------------------------------------------------------------ across the edge


def pack(x: Tensor, segments: Segments) -> Tensor:
    """The kept tokens of `x` [b, t, ...], or of [1, t, ...] that holds for every row: [1, total, ...];
    differentiable."""
    if len(x) != segments.shape[0]:
        return x[0].index_select(0, segments.tokens)[None]
    flat = x.flatten(0, 1)
    return (flat if segments.places is None else applied(_Pack, flat, segments.places))[None]


def unpack(x: Tensor, segments: Segments) -> Tensor:
    """Kept tokens [1, total, ...] back in their places, [b, t, ...], zeros elsewhere; differentiable."""
    flat, (rows, tokens) = x.flatten(0, 1), segments.shape
    if segments.places is not None:
        flat = applied(_Unpack, flat, segments.places, rows * tokens)
    return flat.view(rows, tokens, *flat.shape[1:])


class _Pack(Function):
    """x [n, ...] -> x[places]. No place is taken twice, so the gradient is copied, where torch's own would be
    added up atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.length = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return applied(_Unpack, grad, *ctx.saved_tensors, ctx.length), None


class _Unpack(Function):
    """x [total, ...] -> zeros [length, ...] with x at `places`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(length, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return applied(_Pack, grad, *ctx.saved_tensors), None, None
