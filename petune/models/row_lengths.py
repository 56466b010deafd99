"""Lengths of the rows of W + b a, of a low-rank update b a [n, k] that is never made:

    ||W + b a||^2 = ||W||^2 + rowsum(b * (2 W a^T + b a a^T))

The first term is W's alone, the others are as narrow as the update. Sums are made in float32 (float64 for
float64); of a quantised weight, those of its values, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from petune.models.frozen_weight import QuantisedWeight, dense_of

ROWS = 1024  # of a weight whose wider copy is made at once


def squares_of(weight: Tensor) -> Tensor:
    """The squared lengths of the rows of a weight [n, k], [n]."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.cat([torch.linalg.vector_norm(rows, dim=1, dtype=wide) for rows in _rows(weight)]).square()


def lengths_of(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """||weight + b a|| [n]; a [r, k], b [n, r]. The weight's own lengths are found anew each time, as whoever
    writes into its `data` leaves no trace."""
    squares = squares_of(weight)
    a, b = a.to(squares.dtype), b.to(squares.dtype)
    return (squares + (b * (2 * _times(weight, a) + b @ (a @ a.T))).sum(1)).clamp_min(0).sqrt()


def _times(weight: Tensor, a: Tensor) -> Tensor:
    """weight a^T, [n, r]."""
    if (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and type(weight) is not QuantisedWeight
    ):
        return torch.mm(weight, a.T.to(weight.dtype), out_dtype=a.dtype)
    return torch.cat([rows.to(a.dtype) @ a.T for rows in _rows(weight)])


def _rows(weight: Tensor) -> Iterator[Tensor]:
    """Its rows, dense, some at a time where all of them would be a copy."""
    for first in range(0, len(weight), ROWS):
        yield dense_of(weight[first : first + ROWS])
