"""The activation between two linears, backward: one pass over the matrices, as
petune.kernels.triton.activation is one forward.

A program walks some rows of its columns, so that db = du^T s and da = ds^T h grow in registers, and b and a
are read once. Sums of more than `SUMMED` ranks leave a program no registers for tiles that are read at the
memory's speed: those are products of their own, for which h is written, as it was dropped.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.block.dense import matmul32
from petune.kernels.block.packed_linear import SUMMED
from petune.kernels.reference import Added, LowFactors, Scale
from petune.kernels.triton.activation import (
    KernelAct,
    rows_of,
    scale_of,
    scaled_by,
    valued,
)
from petune.kernels.triton.dropout import draw_of, placed, scaled, stays
from petune.kernels.triton.residual import Tile, multiprocessors, padded, shares, total
from petune.rng.dropout import Drop


def activate_backward(
    dh: Tensor, u: Tensor, act: KernelAct, gated: bool, low: Added | None = None, below: LowFactors | None = None,
    paired: bool = False, how: Drop | None = None, scale: Scale | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`petune.kernels.reference.activate_backward`; ranks up to `residual.MAX_RANK`, ValueError above."""
    du = torch.empty((len(u), u.shape[1]), dtype=u.dtype, device=u.device)
    rank, depth = low[0].shape[1] // (1 + paired) if low else 0, below[0].shape[1] if below else 0
    count = 0 if scale is None else 1 if scale.own is None else 2
    if not len(u):
        sizes = (u.shape[1], rank), (depth, dh.shape[1]), (count, u.shape[1])
        db, da, none = (torch.zeros(size, dtype=torch.float32, device=u.device) for size in sizes)
        return du, db if low else None, da if below else None, none if count else None
    sums_b, sums_a = 0 < rank <= SUMMED, 0 < depth <= SUMMED
    h = torch.empty_like(dh, memory_format=torch.contiguous_format) if below and not sums_a else None
    summed = rank if sums_b else 0, depth if sums_a else 0, count
    grads = _launched(dh, u, du, h, low, below, summed, how, scale, ACT=act, GATED=gated, PAIRED=paired)
    at, end = u.shape[1] * rank if sums_b else 0, len(grads) - count * u.shape[1]
    of_b = grads[:at].view(-1, rank) if sums_b else None if low is None else _db(du, low[0], paired)
    sums = grads[end:].view(count, -1) if count else None
    if below is None:
        return du, of_b, None, sums
    if h is None:
        return du, of_b, grads[at:end].view(depth, -1), sums
    return du, of_b, matmul32(below[0].T, h, 1.0 if how is None else scaled(how)), sums


def _db(du: Tensor, s: Tensor, paired: bool) -> Tensor:
    if not paired:
        return matmul32(du.T, s)
    return torch.cat([matmul32(one.T, own) for one, own in zip(du.chunk(2, 1), s.chunk(2, 1), strict=True)])


def _launched(
    dh: Tensor, u: Tensor, du: Tensor, h: Tensor | None, low: Added | None, below: LowFactors | None,
    summed: tuple[int, int, int], how: Drop | None, scale: Scale | None, **form: Any,
) -> Tensor:  # fmt: skip
    """Write du, and h unless it is None; the sums of db and da behind one another, of the ranks of `summed`,
    then so many of those that `scale` asks for."""
    (rows, width), (s, b), (ds, a) = dh.shape, low or (u, u), below or (u, u)
    rank = s.shape[1] // (1 + form["PAIRED"]) if low and (summed[0] or b is not None) else 0
    depth = ds.shape[1] if below else 0
    tile = _backward_tile(u.dtype, depth > 0 and not any(summed[:2]), scale is not None)
    walks = triton.cdiv(width, tile.columns)
    parts = shares(walks, triton.cdiv(rows, tile.rows), multiprocessors(u.device) * tile.resident)
    size = u.shape[1] * (summed[0] + summed[2]) + width * summed[1]
    sums = torch.empty((parts, size), dtype=torch.float32, device=u.device)
    _activate_backward_kernel[(walks * parts,)](
        *(dh, u, du, h, s, b, ds, a, *(scale or (None, None)), sums, rows, width, parts),
        *(dh.stride(0), u.stride(0), s.stride(0), 0 if b is None else b.stride(0), ds.stride(0), a.stride(0)),
        *draw_of(how, u), **form,
        RANK=rank, R=padded(rank), BELOW=depth, J=padded(depth), SUMS_B=summed[0] > 0, SUMS_A=summed[1] > 0,
        DROPS=below is not None and how is not None, LOADED=how is not None and isinstance(how.base, Tensor),
        BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return total(sums, torch.float32) if size else sums[0]


def _backward_tile(dtype: torch.dtype, deep: bool, scales: bool) -> Tile:
    """deep: an update is added whose gradients are not summed here; scales: u is scaled, which takes
    registers."""
    if dtype.itemsize == 4:
        return Tile(32, 32, 8, 2, 1)
    if scales:
        return Tile(32, 64, 8, 3, 2)
    return Tile(32, 64, 8, 3, 3) if deep else Tile(32, 64, 4, 3, 3)


@triton.jit(do_not_specialize=["rows", "parts", "base", "feature", "least"])
def _activate_backward_kernel(
    dh, u, du, h, s, b, ds, a, columns, own, sums, rows, width, parts,
    dh_stride, u_stride, s_stride, b_stride, ds_stride, a_stride,
    numbers, base, feature, least, scale,
    ACT: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BELOW: tl.constexpr, J: tl.constexpr,
    SUMS_B: tl.constexpr, SUMS_A: tl.constexpr, DROPS: tl.constexpr, LOADED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(width, BN)
    part = tl.program_id(0) // tiles
    col = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    k, j = tl.arange(0, R), tl.arange(0, J)
    some_b, some_a = (
        (col < width)[:, None] & (k < RANK)[None, :],
        (j < BELOW)[:, None] & (col < width)[None, :],
    )
    if SUMS_B:
        sum_x, sum_y = tl.zeros((BN, R), tl.float32), tl.zeros((BN, R), tl.float32)
    if RANK and b is not None:
        b_x = tl.trans(tl.load(b + rows_of(col, b_stride) + k[None, :], mask=some_b, other=0.0))
        if GATED:
            right = tl.load(
                b + rows_of(width + col, b_stride) + k[None, :] + (RANK if PAIRED else 0),
                mask=some_b,
                other=0.0,
            )
            b_y = tl.trans(right)
    if BELOW:
        down = tl.load(a + rows_of(j, a_stride) + col[None, :], mask=some_a, other=0.0)
    if SUMS_A:
        sum_a = tl.zeros((BN, J), tl.float32)
    if columns is not None:
        factor_x, apart_x = scale_of(columns, own, col, col < width)
        found_x, plain_x = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
        if GATED:
            factor_y, apart_y = scale_of(columns, own, width + col, col < width)
            found_y, plain_y = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for start in tl.range(part * BM, rows, parts * BM, num_stages=STAGES):
        row = (start + tl.arange(0, BM)).to(tl.int64)
        live = (row < rows)[:, None]
        inside = live & (col < width)[None, :]
        place = u + row[:, None] * u_stride + col[None, :]
        x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            y = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dh + row[:, None] * dh_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if RANK:
            part_s = s + row[:, None] * s_stride + k[None, :]
            left = tl.load(part_s, mask=live & (k < RANK)[None, :], other=0.0)
            left_y = tl.load(part_s + RANK, mask=live & (k < RANK)[None, :], other=0.0) if PAIRED else left
            if b is not None:
                x += tl.dot(left, b_x, input_precision="ieee")
                if GATED:
                    y += tl.dot(left_y, b_y, input_precision="ieee")
        if columns is not None:
            x = scaled_by(x, factor_x, apart_x, own)
            if GATED:
                y = scaled_by(y, factor_y, apart_y, own)
        if BELOW:
            above = tl.load(
                ds + row[:, None] * ds_stride + j[None, :], mask=live & (j < BELOW)[None, :], other=0.0
            )
            update = tl.dot(above, down, input_precision="ieee")
            if DROPS:
                stay = stays(placed(numbers, row, rows, base, LOADED)[:, None], (feature + col)[None], least)
                update = tl.where(stay, update * scale, 0.0)
            grad += update
        value, slope = valued(x, ACT)
        if GATED:
            dy = grad * value
            if columns is not None:
                found_y += tl.sum(dy * y if own is None else dy * (y - apart_y), 0)
                if own is not None:
                    plain_y += tl.sum(dy, 0)
                dy *= factor_y
            dy = dy.to(du.dtype.element_ty)
            place = du + row[:, None] * (2 * width) + col[None, :]
            tl.store(place + width, dy, mask=inside)
            grad *= y
            value *= y
        else:
            place = du + row[:, None] * width + col[None, :]
        dx = grad * slope
        if columns is not None:
            found_x += tl.sum(dx * x if own is None else dx * (x - apart_x), 0)
            if own is not None:
                plain_x += tl.sum(dx, 0)
            dx *= factor_x
        dx = dx.to(du.dtype.element_ty)
        tl.store(place, dx, mask=inside)
        if SUMS_B:
            sum_x = tl.dot(tl.trans(dx), left, sum_x, input_precision="ieee")
            if GATED:
                sum_y = tl.dot(tl.trans(dy), left_y, sum_y, input_precision="ieee")
        if BELOW:
            left_h = value.to(du.dtype.element_ty)
            if DROPS:
                left_h = tl.where(stay, left_h, 0.0).to(du.dtype.element_ty)
            if h is not None:
                tl.store(h + row[:, None] * width + col[None, :], left_h, mask=inside)
            if SUMS_A:
                sum_a = tl.dot(tl.trans(left_h), above, sum_a, input_precision="ieee")
    sides: tl.constexpr = 2 if GATED else 1
    count: tl.constexpr = 0 if columns is None else 1 if own is None else 2
    sums += part.to(tl.int64) * width * ((RANK * SUMS_B + count) * sides + BELOW * SUMS_A)
    if SUMS_B:
        tl.store(sums + rows_of(col, RANK) + k[None, :], sum_x, mask=some_b)
        if GATED:
            tl.store(sums + rows_of(width + col, RANK) + k[None, :], sum_y, mask=some_b)
        sums += tl.cast(RANK * sides, tl.int64) * width
    if SUMS_A:
        tl.store(sums + col[:, None] + _columns(j, width), sum_a * scale, mask=tl.trans(some_a))
        sums += tl.cast(BELOW, tl.int64) * width
    if columns is not None:
        tl.store(sums + col, found_x, mask=col < width)
        if GATED:
            tl.store(sums + width + col, found_y, mask=col < width)
        if own is not None:
            tl.store(sums + sides * width + col, plain_x, mask=col < width)
            if GATED:
                tl.store(sums + 3 * width + col, plain_y, mask=col < width)


@triton.jit
def _columns(number, stride):
    return number.to(tl.int64)[None, :] * stride
