"""What scales columns, vectors over the lengths of a weight's rows, and the way back through columns that were
scaled: a gradient scaled in the same way, and column by column its sum over rows times what was scaled.

Of the way back a program walks down a share of the rows of some columns; sums of shares are partial sums in
float32, added up in one order. Of lengths a program walks along some rows of the weight, which is so read once
for its own lengths and for its product with the update; what the update's factor is with itself each program
makes anew, as a kernel of its own would take longer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels import reference
from petune.kernels.triton.residual import MAX_RANK, Tile, multiprocessors, padded, shares, total
from petune.models.frozen_weight import QuantisedWeight


def unscale(dy: Tensor, y: Tensor, columns: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`petune.kernels.reference.unscale`."""
    rows, width = dy.shape
    dz = torch.empty((rows, width), dtype=dy.dtype, device=dy.device)
    if not rows:
        return dz, columns.new_zeros(width)
    tile = _tile(dy.dtype)
    walks, steps = triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows)
    parts = shares(walks, steps, multiprocessors(dy.device) * tile.resident)
    sums = torch.empty((parts, width), dtype=torch.float32, device=dy.device)
    _unscale_kernel[(walks, parts)](
        *(dy, y, columns, own, dz, sums, rows, width, dy.stride(0), y.stride(0), -(-steps // parts)),
        BM=tile.rows, BN=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dz, total(sums, torch.float32)


def _tile(dtype: torch.dtype) -> Tile:
    return Tile(32, 128, 4, 2, 6) if dtype.itemsize == 2 else Tile(32, 64, 4, 2, 6)


@triton.jit(do_not_specialize=["rows", "steps"])
def _unscale_kernel(
    dy, y, columns, own, dz, sums, rows, width, dy_stride, y_stride, steps,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    live = col < width
    scale = tl.load(columns + col, mask=live, other=0.0)
    taken = tl.zeros((BN,), tl.float32)
    if own is not None:
        taken = tl.load(own + col, mask=live, other=0.0)
    found = tl.zeros((BN,), tl.float32)
    for step in range(steps):
        row = (part * steps + step) * BM + tl.arange(0, BM)
        inside = (row < rows)[:, None] & live[None, :]
        grad = tl.load(dy + row[:, None] * dy_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + row[:, None] * y_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        found += tl.sum(grad * (value - taken[None, :]), 0)
        result = (grad * scale[None, :]).to(dz.dtype.element_ty)
        tl.store(dz + row[:, None] * width + col[None, :], result, mask=inside)
    tl.store(sums + part * width + col, found, mask=live)


# ------------------------------------------------------------------ lengths


def over_lengths(by: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`petune.kernels.reference.over_lengths`, which quantised weights and larger ranks go to."""
    (rows, width), rank = weight.shape, len(a)
    if isinstance(weight, QuantisedWeight) or rank > MAX_RANK or weight.dtype != a.dtype:
        return reference.over_lengths(by, weight, a, b)
    out = torch.empty(rows, dtype=torch.float32, device=weight.device)
    tile = _lengths_tile(weight.dtype, rank)
    _over_lengths_kernel[(triton.cdiv(rows, tile.rows),)](
        *(by, weight, a, b, out, rows, width, weight.stride(0), a.stride(0), b.stride(0)),
        RANK=rank, R=padded(rank), BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out


def _lengths_tile(dtype: torch.dtype, rank: int) -> Tile:
    warps = 4 if rank <= 32 else 8
    return Tile(32, 128, warps, 4, 4) if dtype.itemsize == 2 else Tile(32, 32, warps, 3, 4)


@triton.jit
def _over_lengths_kernel(
    by, weight, a, b, out, rows, width, weight_stride, a_stride, b_stride,
    RANK: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    k, live = tl.arange(0, R), row < rows
    squares = tl.zeros((BM, BN), tl.float32)
    across, inner = tl.zeros((BM, R), tl.float32), tl.zeros((R, R), tl.float32)
    for start in tl.range(0, width, BN, num_stages=STAGES):
        col = start + tl.arange(0, BN)
        inside, some = live[:, None] & (col < width)[None, :], (k < RANK)[:, None] & (col < width)[None, :]
        values = tl.load(weight + row[:, None] * weight_stride + col[None, :], mask=inside, other=0.0)
        factor = tl.load(a + k[:, None] * a_stride + col[None, :], mask=some, other=0.0)
        wide = values.to(tl.float32)
        squares += wide * wide
        across = tl.dot(values, tl.trans(factor), across, input_precision="ieee")
        inner = tl.dot(factor, tl.trans(factor), inner, input_precision="ieee")
    some = live[:, None] & (k < RANK)[None, :]
    left = tl.load(b + row[:, None] * b_stride + k[None, :], mask=some, other=0.0).to(tl.float32)
    added = tl.sum(left * (2.0 * across + tl.dot(left, inner, input_precision="tf32x3")), 1)
    length = tl.maximum(tl.sqrt_rn(tl.maximum(tl.sum(squares, 1) + added, 0.0)), 1.1754943508222875e-38)
    tl.store(out + row, tl.load(by + row, mask=live, other=0.0).to(tl.float32) / length, mask=live)
