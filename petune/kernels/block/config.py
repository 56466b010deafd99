"""What the fused blocks of one call share: sizes, the operations, how attention is computed, what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petune.kernels.block.attention import How
from petune.kernels.configs import Rung
from petune.kernels.dispatch import Ops
from petune.kernels.reference import Act

Kept = dict[str, Any]  # by name: tensors, None, or what attention keeps; what a backward pass finds again


@dataclass(frozen=True)
class Frame:
    """heads, kv_heads, head_dim of attention; act and gated of the MLP; eps of the norms; tile: rows of the MLP at once, None for all."""

    heads: int
    kv_heads: int
    head_dim: int
    act: Act
    gated: bool
    eps: float
    ops: Ops
    how: How
    rung: Rung
    tile: int | None

    def tiles(self, m: int) -> Iterator[slice]:
        """The rows of each tile."""
        size = max(1, m if self.tile is None or self.rung.keep == "all" else self.tile)
        yield from (slice(start, min(start + size, m)) for start in range(0, max(m, 1), size))

    def heads_of(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views q [m, heads, d], k and v [m, kv_heads, d] of q | k | v."""
        q, k, v = qkv.unflatten(1, (-1, self.head_dim)).split([self.heads, self.kv_heads, self.kv_heads], 1)
        return q, k, v


def joined(pieces: list[Tensor | None]) -> Tensor | None:
    """Tiles one below the other; the only one as it is."""
    present = [piece for piece in pieces if piece is not None]
    return present[0] if len(present) == 1 else torch.cat(present) if present else None
