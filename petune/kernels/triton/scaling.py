"""The way back through columns that were scaled: a gradient scaled in the same way, and column by column its
sum over rows times what was scaled.

A program walks down a share of the rows of some columns; sums of shares are partial sums in float32, added up
in one order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.triton.residual import Tile, Variant, multiprocessors, shares, total


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
        BM=tile.rows,
        BN=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
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


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        tile = _tile(dtype)
        signature = {name: "i32" for name in _unscale_kernel.arg_names}
        signature |= dict.fromkeys(("dy", "y", "dz"), kind) | dict.fromkeys(
            ("columns", "own", "sums"), "*fp32"
        )
        for absent in ({}, {"own": None}):
            values = {"BM": tile.rows, "BN": tile.columns}
            yield _unscale_kernel, signature, values | absent, tile.warps, tile.stages
