"""The sizes of a recording, and which batches fit in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from petune.kernels.block.varlen import Segments
from petune.kernels.memory.policy_hook import rounded

# tokens of a batch with segments are rounded up to a multiple of this, or of an eighth of the power of two
# below them
QUANTUM = 256
SLOTS = 8  # and so are its segments, with at least one slot for tokens it lacks
# the longest segment is rounded up to a power of two of at least this: it sizes a grid whose spare programs
# end at once
SHORTEST = 64


class Size(NamedTuple):
    """Tokens of one side of a recording, and the most that one of its rows or slots takes."""

    tokens: int
    longest: int

    def starts(self, segments: Segments, spare: int) -> list[int]:
        """Where segments begin, then where the tokens they lack do, in `spare` slots of about one size; the
        total last."""
        lacking = self.tokens - segments.total
        return [
            *accumulate(segments.lengths, initial=0),
            *(segments.total + lacking * (slot + 1) // spare for slot in range(spare)),
        ]

    def holds(self, segments: Segments, spare: int) -> bool:
        """Whether segments fit, and the tokens they lack into `spare` slots: at least one each, at most
        `longest`."""
        lacking = self.tokens - segments.total
        return segments.longest <= self.longest and 0 < spare <= lacking <= spare * self.longest


@dataclass(frozen=True)
class Bucket:
    """The sizes of a recording.

    own: of the tokens that it computes on; memory: of an encoder's, None without one. rows: of equal length,
    or slots for segments of either side. kind: what else has to be the same.
    """

    own: Size
    rows: int
    segmented: bool
    kind: tuple[Any, ...]
    memory: Size | None = None

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        segments: Segments | None,
        kind: tuple[Any, ...] = (),
        memory: Segments | None = None,
    ) -> Bucket:
        """The bucket of hidden states of a `shape` [rows, tokens, ...] of all ranks, or [1, total, ...] in
        `segments`, and of as many of a memory."""
        if segments is None:
            return cls(Size(shape[0] * shape[1], shape[1]), shape[0], False, kind)
        rows, (own, *others) = _rounded([segments] if memory is None else [segments, memory])
        return cls(own, rows, True, kind, others[0] if others else None)

    @property
    def tokens(self) -> int:
        """That it computes on."""
        return self.own.tokens

    def holds(self, segments: Segments, memory: Segments | None = None) -> bool:
        """Whether the segments of both sides fit."""
        spare = self.rows - len(segments.lengths)
        return self.own.holds(segments, spare) and (
            memory is None or (self.memory is not None and self.memory.holds(memory, spare))
        )


def _rounded(sides: Sequence[Segments]) -> tuple[int, list[Size]]:
    """(slots, the size of each side), with room for the tokens that segments lack in slots of their own."""
    number = len(sides[0].lengths)
    longest = [1 << (max(SHORTEST, side.longest) - 1).bit_length() for side in sides]
    least = [side.total + SLOTS for side in sides]
    while True:
        tokens = [rounded(size, max(QUANTUM, (1 << size.bit_length() - 1) // 8)) for size in least]
        # at least, so that none of the slots is longer than the others
        spare = max(
            -(-(size - side.total) // most) for size, side, most in zip(tokens, sides, longest, strict=True)
        )
        rows = rounded(number + spare, SLOTS)
        # a token for each slot
        wanted = [max(size, side.total + rows - number) for size, side in zip(least, sides, strict=True)]
        if wanted == least:
            return rows, list(map(Size, tokens, longest))
        least = wanted


class Slots(Segments):
    """Room for segments: only `starts` [rows + 1] says where they are, and it changes from replay to replay.
    `lengths` is the longest."""

    @property
    def spans(self) -> tuple[int, ...]:
        """See Segments; the host waits for it."""
        return tuple(self.starts.diff().tolist())

    @property
    def by_length(self) -> tuple[Tensor, ...]:
        """See Segments; the host waits for it."""
        return Segments(self.starts, self.spans, None, self.shape).by_length

    @cached_property
    def tokens(self) -> Tensor:
        """See Segments: room for them."""
        return torch.zeros(self.shape[1], dtype=torch.int64, device=self.starts.device)
