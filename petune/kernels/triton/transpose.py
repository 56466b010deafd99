"""A matrix of bytes turned: what the backward product of a weight in eight bits reads.

A program turns one square of `TILE` x `TILE` bytes, so that it reads and writes whole cache lines of 128 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
WARPS = 8


def transposed(*parts: Tensor) -> Tensor:
    """`petune.kernels.reference.transposed`."""
    k, rows = parts[0].shape[1], [len(q) for q in parts]
    out = torch.empty((k, sum(rows)), dtype=parts[0].dtype, device=parts[0].device)
    for q, n, own in zip(parts, rows, out.view(torch.uint8).split(rows, 1), strict=True):
        if q.numel():
            grid = (triton.cdiv(k, TILE), triton.cdiv(n, TILE))
            given = q.view(torch.uint8), own, n, k, q.stride(0), sum(rows)
            _transpose_kernel[grid](*given, TILE=TILE, num_warps=WARPS)
    return out


@triton.jit
def _transpose_kernel(source, target, n, k, stride, pitch, TILE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    square = tl.load(
        source + row[:, None] * stride + column[None, :], mask=(row < n)[:, None] & (column < k)[None, :]
    )
    tl.store(
        target + column[:, None] * pitch + row[None, :],
        tl.trans(square),
        mask=(column < k)[:, None] & (row < n)[None, :],
    )
