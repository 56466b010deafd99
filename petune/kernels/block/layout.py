"""Where the tokens of a call lie: in rows of equal length or in segments, and so those of the memory."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from petune.kernels.block.varlen import Segments, of_rows
from petune.rng.context import running
from petune.rng.dropout import places


class Layout(NamedTuple):
    """The rows or segments of a call's tokens, and of the memory that it attends to.

    batch: rows of equal length, not read for a side with segments; longest: the most tokens that a row or
    segment has; keys: the same of the memory, None without one.
    """

    batch: int
    longest: int
    segments: Segments | None = None
    keys: int | None = None
    memory: Segments | None = None

    @classmethod
    def of(cls, hidden: Tensor, memory: Tensor | None = None) -> Layout:
        """That of hidden states [b, t, w], or [1, total, w] in `running().segments`; of a memory [b, s, w],
        or [1, kept, w] in `running().memory`."""
        segments: Segments | None = running().segments
        longest = hidden.shape[1] if segments is None else segments.longest
        if memory is None:
            return cls(len(hidden), longest, segments)
        kept: Segments | None = running().memory
        if kept is None and segments is not None:
            kept = of_rows(len(memory), memory.shape[0] * memory.shape[1], memory.device)
        return cls(len(hidden), longest, segments, memory.shape[1] if kept is None else kept.longest, kept)


def places_of(hidden: Tensor, segments: Segments | None) -> Tensor:
    """Where each row of hidden states, as a matrix [m, width], lies in the batch, for dropout by index."""
    if segments is None:
        return places(hidden.shape[0], hidden.shape[1], hidden.device)
    numbers = places(*segments.shape, hidden.device)
    return numbers if segments.places is None else numbers[segments.places]
