"""A matrix of bytes turned: what the backward product of a weight in eight bits reads.

A program turns one square of `TILE` x `TILE` bytes, so that it reads and writes whole cache lines of 128 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.triton.residual import Variant

TILE = 128
WARPS = 8


def transposed(q: Tensor) -> Tensor:
    """`petune.kernels.reference.transposed`."""
    n, k = q.shape
    out = torch.empty((k, n), dtype=q.dtype, device=q.device)
    if out.numel():
        grid = (triton.cdiv(k, TILE), triton.cdiv(n, TILE))
        source, target = q.view(torch.uint8), out.view(torch.uint8)
        _transpose_kernel[grid](source, target, n, k, q.stride(0), TILE=TILE, num_warps=WARPS)
    return out


@triton.jit
def _transpose_kernel(source, target, n, k, stride, TILE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    square = tl.load(
        source + row[:, None] * stride + column[None, :], mask=(row < n)[:, None] & (column < k)[None, :]
    )
    tl.store(
        target + column[:, None] * n + row[None, :],
        tl.trans(square),
        mask=(column < k)[:, None] & (row < n)[None, :],
    )


# ------------------------------------------------------------------ what is launched


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    signature = {"source": "*u8", "target": "*u8", "n": "i32", "k": "i32", "stride": "i32"}
    yield _transpose_kernel, signature, {"TILE": TILE}, WARPS, 3
