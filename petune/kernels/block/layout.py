"""What a block is handed: hidden states, an encoder's states (the memory), and where the tokens of both lie,
in rows of equal length or in segments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from petune.kernels.block.varlen import Segments, each_row
from petune.models.spec import Pairs
from petune.rng.context import running
from petune.rng.dropout import places

# What blocks read beside hidden states, as transformers names it
MEMORY, BIAS, MASKS = "encoder_hidden_states", "position_bias", ("attention_mask", "encoder_attention_mask")

# Stands in for the attention mask of a call whose segments are known, or that is known to have whole rows.
# Hugging Face hands a mask with four dims on as it is, so the [b, 1, t, t] that nobody would read is never
# made, nor does the host wait for the device to learn whether one is needed; a block that reads it after all
# raises, as no scores have such a shape.
NO_MASK = torch.empty(0, 0, 0, 0, dtype=torch.bool)


def is_no_mask(value: Tensor) -> bool:
    """Whether a mask is NO_MASK, or all of its rows, as a model cuts them out for some of its blocks."""
    return value is NO_MASK or (value.dim() == 4 and not value.numel())


class Layout(NamedTuple):
    """The rows or segments of a call's tokens as attention sees them, and of the memory that it attends to.

    batch: rows of equal length, not read for a side with segments; longest: the most tokens that a row or
    segment has; keys: the same of the memory, None without one.
    """

    batch: int
    longest: int
    segments: Segments | None = None
    keys: int | None = None
    memory: Segments | None = None

    @property
    def row(self) -> int:
        """Tokens of a row, with those that are left out of it."""
        return self.longest if self.segments is None else self.segments.shape[1]

    @classmethod
    def of(cls, hidden: Tensor, memory: Tensor | None = None, cut: bool = False) -> Layout:
        """That of hidden states [b, t, w], or [1, total, w] in `running().segments`; of a memory [b, s, w],
        or [1, kept, w] in `running().memory`. cut: t are one rank's tokens of `running().sizes`."""
        segments: Segments | None = running().segments
        longest = (
            segments.longest if segments is not None else sum(running().sizes) if cut else hidden.shape[1]
        )
        if memory is None:
            return cls(len(hidden), longest, segments)
        kept: Segments | None = running().memory
        if kept is None and segments is not None:
            kept = each_row(memory)
        return cls(len(hidden), longest, segments, memory.shape[1] if kept is None else kept.longest, kept)


def places_of(hidden: Tensor, segments: Segments | None, length: int) -> Tensor:
    """Where each row of hidden states of `length` tokens a row, as a matrix [m, width], lies in the batch,
    for dropout by index."""
    if segments is None:
        return places(hidden.shape[0], length, hidden.device)
    numbers = places(*segments.shape, hidden.device)
    return numbers if segments.places is None else numbers[segments.places]


def angles_of(angles: tuple[Tensor, Tensor], head_dim: int, pairs: Pairs = "halves") -> tuple[Tensor, Tensor]:
    """cos and sin [p, d], both halves alike, of [1 or b, t, d] as they lie there, see Pairs; of halves, of
    their first halves where the second are the same."""
    cos, sin = angles
    if pairs == "twins":
        cos, sin = cos[..., ::2], sin[..., ::2]
    if pairs == "twins" or (pairs == "halves" and 2 * cos.shape[-1] == head_dim):
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])


def memory_in_autocast(given: dict[str, Any]) -> dict[str, Any]:
    """A block's arguments with the encoder's states in the dtype that autocast computes linears in."""
    memory = given.get(MEMORY)
    if memory is None or not torch.is_autocast_enabled(memory.device.type):
        return given
    return given | {MEMORY: memory.to(torch.get_autocast_dtype(memory.device.type))}
