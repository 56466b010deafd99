"""Rotary positions, in place on the output of one matrix product for queries, keys and values, and back.

A program walks some heads of its rows, so that cos and sin are read once for all of them. A head is worked on
as the two parts of its complex numbers, its halves or every other column (STEP, APART), HALF of them; that is
no multiple of the tile is padded by masks. Columns behind those (2 HALF < WIDTH), which no position turns,
stay where they are in place and are moved as two halves on the way back, which are no part of a kernel that
turns all. Where sums over rows are wanted too, a program walks some rows of its head, and leaves partial sums
in float32, added up in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.reference import Scale
from petune.kernels.triton.residual import Tile, multiprocessors, shares, total

# ------------------------------------------------------------------ forward


def rope_(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, neighbours: bool = False, width: int | None = None
) -> Tensor:
    """`petune.kernels.reference.rope_`, for heads of an even width."""
    rows, half = len(qkv), cos.shape[1] // 2
    if not rows or not heads:
        return qkv
    tile = _forward_tile(qkv.dtype, half)
    walks = triton.cdiv(rows, tile.rows) * triton.cdiv(half, tile.columns)
    parts = shares(walks, heads, multiprocessors(qkv.device) * tile.resident)
    _rope_kernel[(walks * parts,)](
        *(qkv, cos, sin, rows, len(cos), heads, parts, qkv.stride(0), cos.stride(0), sin.stride(0)),
        **_places(half, neighbours, width),
        BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return qkv


def _places(half: int, neighbours: bool, width: int | None = None) -> dict[str, int]:
    """Complex numbers of a head, its columns, those from one number to the next and from one part of it to
    the other."""
    steps = {"STEP": 2, "APART": 1} if neighbours else {"STEP": 1, "APART": half}
    return {"HALF": half, "WIDTH": width or 2 * half, **steps}


def _beyond(half: int, width: int) -> dict[str, int]:
    """The tile of half the columns that no position turns; 1 for none, which no kernel reads."""
    return {"BR": triton.next_power_of_2(max(1, width // 2 - half))}


def _forward_tile(dtype: torch.dtype, half: int) -> Tile:
    columns = 16 if half % 32 else 32
    if dtype.itemsize == 4:
        return Tile(32, columns, 8, 2, 2)
    return Tile(128, 64 if half % 64 == 0 else columns, 8, 3, 2)


@triton.jit(do_not_specialize=["rows", "positions", "heads", "parts"])
def _rope_kernel(
    qkv, cos, sin, rows, positions, heads, parts, qkv_stride, cos_stride, sin_stride,
    HALF: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pieces: tl.constexpr = (HALF + BN - 1) // BN
    place = tl.program_id(0) // pieces
    row = (place // parts).to(tl.int64) * BM + tl.arange(0, BM)
    t = (tl.program_id(0) % pieces) * BN + tl.arange(0, BN)
    inside = (row < rows)[:, None] & (t < HALF)[None, :]
    position = row % positions
    re = tl.load(cos + position[:, None] * cos_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    im = tl.load(sin + position[:, None] * sin_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    for head in tl.range(place % parts, heads, parts, num_stages=STAGES):
        pair = qkv + row[:, None] * qkv_stride + (head * WIDTH + t * STEP)[None, :]
        x = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(pair + APART, mask=inside, other=0.0).to(tl.float32)
        tl.store(pair, (x * re - y * im).to(qkv.dtype.element_ty), mask=inside)
        tl.store(pair + APART, (y * re + x * im).to(qkv.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------ backward


def rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False
) -> Tensor:
    """`petune.kernels.reference.rope_backward`, for heads of an even width."""
    rows, width = len(dq), dq.shape[2]
    out = torch.empty(
        (rows, (dq.shape[1] + dk.shape[1] + dv.shape[1]) * width), dtype=dq.dtype, device=dq.device
    )
    if not rows:
        return out
    half = cos.shape[1] // 2
    tile = _backward_tile(half)
    walks = triton.cdiv(rows, tile.rows)
    parts = shares(walks, max(dq.shape[1], dk.shape[1]), multiprocessors(dq.device) * tile.resident)
    _rope_backward_kernel[(walks * parts,)](
        *(dq, dk, dv, cos, sin, out, rows, len(cos), dq.shape[1], dk.shape[1], dv.shape[1], parts),
        *(dq.stride(0), dq.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1), out.stride(0)),
        *(cos.stride(0), sin.stride(0)), **_places(half, neighbours, width), **_beyond(half, width),
        BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out


def _backward_tile(half: int) -> Tile:
    columns = triton.next_power_of_2(half)
    return Tile(max(1, 2048 // columns), columns, 4, 3, 6)


@triton.jit(do_not_specialize=["rows", "positions", "q_heads", "k_heads", "v_heads", "parts"])
def _rope_backward_kernel(
    dq, dk, dv, cos, sin, out, rows, positions, q_heads, k_heads, v_heads, parts,
    dq_stride, dq_head, dk_stride, dk_head, dv_stride, dv_head, out_stride, cos_stride, sin_stride,
    HALF: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64) * BM + tl.arange(0, BM)
    t = tl.arange(0, BN)
    inside = (row < rows)[:, None] & (t < HALF)[None, :]
    position = row % positions
    re = tl.load(cos + position[:, None] * cos_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    im = tl.load(sin + position[:, None] * sin_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    into = out + row[:, None] * out_stride + t[None, :] * STEP
    turn_back(
        dq + row[:, None] * dq_stride + t[None, :] * STEP, dq_head, into, q_heads, part, parts, inside, re, im, WIDTH, APART, True, STAGES
    )  # fmt: skip
    into += q_heads * WIDTH
    turn_back(
        dk + row[:, None] * dk_stride + t[None, :] * STEP, dk_head, into, k_heads, part, parts, inside, re, im, WIDTH, APART, True, STAGES
    )  # fmt: skip
    into += k_heads * WIDTH
    turn_back(
        dv + row[:, None] * dv_stride + t[None, :] * STEP, dv_head, into, v_heads, part, parts, inside, re, im, WIDTH, APART, False, STAGES
    )  # fmt: skip
    if WIDTH > 2 * HALF:
        rest: tl.constexpr = WIDTH // 2 - HALF
        u = tl.arange(0, BR)
        there, u = (row < rows)[:, None] & (u < rest)[None, :], (2 * HALF + u)[None, :]
        into = out + row[:, None] * out_stride + u
        grad = dq + row[:, None] * dq_stride + u
        turn_back(grad, dq_head, into, q_heads, part, parts, there, re, im, WIDTH, rest, False, STAGES)
        into += q_heads * WIDTH
        grad = dk + row[:, None] * dk_stride + u
        turn_back(grad, dk_head, into, k_heads, part, parts, there, re, im, WIDTH, rest, False, STAGES)
        into += k_heads * WIDTH
        grad = dv + row[:, None] * dv_stride + u
        turn_back(grad, dv_head, into, v_heads, part, parts, there, re, im, WIDTH, rest, False, STAGES)


@triton.jit
def turn_back(
    grad, stride, into, heads, part, parts, inside, re, im,
    WIDTH: tl.constexpr, APART: tl.constexpr, TURNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Heads part, part + parts, ... of one gradient, turned by the negative angle or as they are."""
    for head in tl.range(part, heads, parts, num_stages=STAGES):
        place = grad + tl.cast(head, tl.int64) * stride
        x = tl.load(place, mask=inside, other=0.0)
        y = tl.load(place + APART, mask=inside, other=0.0)
        place = into + head * WIDTH
        if TURNS:
            tl.store(
                place, (x.to(tl.float32) * re + y.to(tl.float32) * im).to(into.dtype.element_ty), mask=inside
            )
            tl.store(
                place + APART,
                (y.to(tl.float32) * re - x.to(tl.float32) * im).to(into.dtype.element_ty),
                mask=inside,
            )
        else:
            tl.store(place, x, mask=inside)
            tl.store(place + APART, y, mask=inside)


# ------------------------------------------------------------------ backward, of what was scaled before


def rope_unscale(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, scale: Scale, neighbours: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`petune.kernels.reference.rope_unscale`, for heads of an even width."""
    (rows, columns), width, count = qkv.shape, dq.shape[2], 1 + (scale.own is not None)
    out = torch.empty((rows, columns), dtype=dq.dtype, device=dq.device)
    if not rows:
        return out, torch.zeros((count, columns), dtype=torch.float32, device=dq.device)
    half = cos.shape[1] // 2
    tile = _backward_tile(half)
    parts = shares(columns // width, triton.cdiv(rows, tile.rows), multiprocessors(dq.device) * 3)
    sums = torch.empty((parts, count, columns), dtype=torch.float32, device=dq.device)
    _rope_unscale_kernel[(columns // width, parts)](
        *(dq, dk, dv, qkv, cos, sin, *scale, out, sums),
        *(rows, len(cos), columns, dq.shape[1], dq.shape[1] + dk.shape[1]),
        *(dq.stride(0), dq.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1)),
        *(qkv.stride(0), cos.stride(0), sin.stride(0)), **_places(half, neighbours, width), **_beyond(half, width),
        BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out, total(sums, torch.float32)


@triton.jit(do_not_specialize=["rows", "positions", "q_heads", "qk_heads"])
def _rope_unscale_kernel(
    dq, dk, dv, qkv, cos, sin, columns, own, out, sums, rows, positions, width, q_heads, qk_heads,
    dq_stride, dq_head, dk_stride, dk_head, dv_stride, dv_head, qkv_stride, cos_stride, sin_stride,
    HALF: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    first = head * WIDTH
    if own is not None:
        own += first
    count: tl.constexpr = 1 if own is None else 2
    sums += tl.program_id(1).to(tl.int64) * count * width + first
    qkv, columns, out = qkv + first, columns + first, out + first
    if head < q_heads:
        _unscale_head(
            dq + head * dq_head, dq_stride, qkv, qkv_stride, cos, cos_stride, sin, sin_stride, columns, own, out, sums,
            rows, positions, width, True, HALF, WIDTH, STEP, APART, BR, BM, BN, STAGES,
        )  # fmt: skip
    elif head < qk_heads:
        _unscale_head(
            dk + (head - q_heads) * dk_head, dk_stride, qkv, qkv_stride, cos, cos_stride, sin, sin_stride, columns, own,
            out, sums, rows, positions, width, True, HALF, WIDTH, STEP, APART, BR, BM, BN, STAGES,
        )  # fmt: skip
    else:
        _unscale_head(
            dv + (head - qk_heads) * dv_head, dv_stride, qkv, qkv_stride, cos, cos_stride, sin, sin_stride, columns, own,
            out, sums, rows, positions, width, False, HALF, WIDTH, STEP, APART, BR, BM, BN, STAGES,
        )  # fmt: skip


@triton.jit
def _unscale_head(
    grad, stride, value, value_stride, cos, cos_stride, sin, sin_stride, columns, own, out, sums,
    rows, positions, width, TURNS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of one head, and the sums over them: of what is turned, and of what is behind that."""
    _unscale_columns(
        grad, stride, value, value_stride, cos, cos_stride, sin, sin_stride, columns, own, out, sums,
        rows, positions, width, TURNS, HALF, STEP, APART, BM, BN, STAGES,
    )  # fmt: skip
    if WIDTH > 2 * HALF:
        rest: tl.constexpr = WIDTH // 2 - HALF
        if own is not None:
            own += 2 * HALF
        _unscale_columns(
            grad + 2 * HALF, stride, value + 2 * HALF, value_stride, cos, cos_stride, sin, sin_stride,
            columns + 2 * HALF, own, out + 2 * HALF, sums + 2 * HALF,
            rows, positions, width, False, rest, 1, rest, BM, BR, STAGES,
        )  # fmt: skip


@triton.jit
def _unscale_columns(
    grad, stride, value, value_stride, cos, cos_stride, sin, sin_stride, columns, own, out, sums,
    rows, positions, width, TURNS: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same of 2 HALF columns."""
    t = tl.arange(0, BN)
    there = t < HALF
    x_of, y_of = t * STEP, t * STEP + APART
    factor_x, factor_y = (
        tl.load(columns + x_of, there, 0.0)[None, :],
        tl.load(columns + y_of, there, 0.0)[None, :],
    )
    if own is not None:
        own_x, own_y = tl.load(own + x_of, there, 0.0)[None, :], tl.load(own + y_of, there, 0.0)[None, :]
    found_x, found_y = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    plain_x, plain_y = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for start in tl.range(tl.program_id(1) * BM, rows, tl.num_programs(1) * BM, num_stages=STAGES):
        row = (start + tl.arange(0, BM)).to(tl.int64)
        inside = (row < rows)[:, None] & there[None, :]
        place = grad + row[:, None] * stride + x_of[None, :]
        dx = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(place + APART, mask=inside, other=0.0).to(tl.float32)
        place = value + row[:, None] * value_stride + x_of[None, :]
        x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(place + APART, mask=inside, other=0.0).to(tl.float32)
        if TURNS:
            position = row % positions
            re = tl.load(cos + position[:, None] * cos_stride + t[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            im = tl.load(sin + position[:, None] * sin_stride + t[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            dx, dy = dx * re + dy * im, dy * re - dx * im
            size = re * re + im * im
            size = tl.where(size == 0.0, 1.0, size)
            x, y = (x * re + y * im) / size, (y * re - x * im) / size
        if own is not None:
            plain_x += tl.sum(dx, 0)
            plain_y += tl.sum(dy, 0)
            x, y = x - own_x, y - own_y
        found_x += tl.sum(dx * x, 0)
        found_y += tl.sum(dy * y, 0)
        place = out + row[:, None] * width + x_of[None, :]
        tl.store(place, (dx * factor_x).to(out.dtype.element_ty), mask=inside)
        tl.store(place + APART, (dy * factor_y).to(out.dtype.element_ty), mask=inside)
    tl.store(sums + x_of, found_x, there)
    tl.store(sums + y_of, found_y, there)
    if own is not None:
        tl.store(sums + width + x_of, plain_x, there)
        tl.store(sums + width + y_of, plain_y, there)
