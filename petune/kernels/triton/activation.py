"""The activation between two linears, gated or plain, forward and backward: one pass over the matrix each.

Forward, a program walks some columns of its rows, so that s = h a^T grows in registers. Backward, a program walks some rows of its columns,
so that db = du^T s and da = ds^T h do, and b and a are read once. How many programs share a walk is chosen so that they fill the device;
each leaves a partial sum in float32, and `total` adds those up in order. Tiles are interleaved between the programs that share a walk:
what runs together reads what lies together.

The logistic function is rsqrt(1 + exp(-x))^2: one instruction where a division takes eight, and arithmetic is what these kernels have
least room for besides memory. tanh(z) = 2 logistic(2 z) - 1, so gelu's approximation is x logistic(2 z).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.reference import Added, Low
from petune.kernels.triton.residual import Tile, Variant, multiprocessors, padded, shares, total

Act = Literal["silu", "gelu", "gelu_tanh", "relu"]


# ------------------------------------------------------------------ forward


def activate(
    u: Tensor, act: Act, gated: bool, low: Low | None = None, a: Tensor | None = None, paired: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`petune.kernels.reference.activate`; ranks up to `sums.MAX_RANK`, ValueError above."""
    rows, width = u.shape[0], u.shape[1] // (1 + gated)
    h = torch.empty((rows, width), dtype=u.dtype, device=u.device) if out is None else out
    rank, below = low[0].shape[1] // (1 + paired) if low else 0, a.shape[0] if a is not None else 0
    if not rows:
        return h, None if a is None else u.new_empty((0, below))
    tile = _forward_tile(u.dtype)
    walks = triton.cdiv(rows, tile.rows)
    parts = shares(walks, triton.cdiv(width, tile.columns), multiprocessors(u.device) * tile.resident)
    s, b = low or (u, u)
    down = u if a is None else a
    sums = torch.empty((parts, rows, below), dtype=torch.float32, device=u.device)
    _activate_kernel[(walks * parts,)](
        *(u, h, s, b, down, sums, rows, width, parts),
        *(u.stride(0), s.stride(0), b.stride(0), down.stride(0), h.stride(0)),
        ACT=act,
        GATED=gated,
        PAIRED=paired,
        RANK=rank,
        R=padded(rank),
        BELOW=below,
        J=padded(below),
        BM=tile.rows,
        BN=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return h, None if a is None else total(sums, u.dtype)


def _forward_tile(dtype: torch.dtype) -> Tile:
    if dtype.itemsize == 4:
        return Tile(32, 32, 8, 2, 1)
    return Tile(64, 64, 4, 3, 3)


@triton.jit(do_not_specialize=["rows", "parts"])
def _activate_kernel(
    u, h, s, b, a, sums, rows, width, parts, u_stride, s_stride, b_stride, a_stride, h_stride,
    ACT: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BELOW: tl.constexpr, J: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64) * BM + tl.arange(0, BM)
    k, j = tl.arange(0, R), tl.arange(0, J)
    if RANK:
        part_s, ranked = s + row[:, None] * s_stride + k[None, :], (row < rows)[:, None] & (k < RANK)[None, :]
        left = tl.load(part_s, mask=ranked, other=0.0)
        left_y = tl.load(part_s + RANK, mask=ranked, other=0.0) if PAIRED else left
    if BELOW:
        sum_s = tl.zeros((BM, J), tl.float32)
    for start in tl.range(part * BN, width, parts * BN, num_stages=STAGES):
        col = start + tl.arange(0, BN)
        inside = (row < rows)[:, None] & (col < width)[None, :]
        place = u + row[:, None] * u_stride + col[None, :]
        x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            y = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
        if RANK:
            some = (col < width)[:, None] & (k < RANK)[None, :]
            x += tl.dot(left, tl.trans(tl.load(b + _rows(col, b_stride) + k[None, :], mask=some, other=0.0)), input_precision="ieee")
            if GATED:
                right = tl.load(b + _rows(width + col, b_stride) + k[None, :] + (RANK if PAIRED else 0), mask=some, other=0.0)
                y += tl.dot(left_y, tl.trans(right), input_precision="ieee")
        value, _ = _curve(x, ACT)
        if GATED:
            value *= y
        value = value.to(h.dtype.element_ty)
        tl.store(h + row[:, None] * h_stride + col[None, :], value, mask=inside)
        if BELOW:
            down = tl.load(a + _rows(j, a_stride) + col[None, :], mask=(j < BELOW)[:, None] & (col < width)[None, :], other=0.0)
            sum_s = tl.dot(value, tl.trans(down), sum_s, input_precision="ieee")
    if BELOW:
        place = sums + (part.to(tl.int64) * rows + row)[:, None] * BELOW + j[None, :]
        tl.store(place, sum_s, mask=(row < rows)[:, None] & (j < BELOW)[None, :])


@triton.jit
def _rows(number, stride):
    return number.to(tl.int64)[:, None] * stride


@triton.jit
def _curve(x, ACT: tl.constexpr):
    """(the activation of x, its derivative)."""
    if ACT == "silu":
        share = _logistic(x)
        value = x * share
        slope = share + value * (1.0 - share)
    elif ACT == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * share
        slope = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACT == "gelu_tanh":
        share = _logistic(x * (1.5957691216057308 + 0.07135481282553524 * x * x))
        value = x * share
        slope = share + value * (1.0 - share) * (1.5957691216057308 + 0.21406443847660572 * x * x)
    else:
        tl.static_assert(ACT == "relu", "an activation these kernels do not know")
        value = tl.where(x < 0.0, 0.0, x)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    return value, slope


@triton.jit
def _logistic(x):
    root = tl.rsqrt(1.0 + tl.exp(-x))
    return root * root


# ------------------------------------------------------------------ backward


def activate_backward(
    dh: Tensor, u: Tensor, act: Act, gated: bool, low: Added | None = None, below: Low | None = None, paired: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`petune.kernels.reference.activate_backward`; ranks up to `sums.MAX_RANK`, ValueError above. db and da share one buffer."""
    (rows, width), columns = dh.shape, u.shape[1]
    du = torch.empty((rows, columns), dtype=u.dtype, device=u.device)
    s, b = low or (u, u)
    ds, a = below or (u, u)
    rank, depth = s.shape[1] // (1 + paired) if low else 0, ds.shape[1] if below else 0
    size = columns * rank
    if rows:
        tile = _backward_tile(u.dtype, max(rank, depth))
        walks = triton.cdiv(width, tile.columns)
        parts = shares(walks, triton.cdiv(rows, tile.rows), multiprocessors(u.device) * tile.resident)
        sums = torch.empty((parts, size + width * depth), dtype=torch.float32, device=u.device)
        _activate_backward_kernel[(walks * parts,)](
            *(dh, u, du, s, b, ds, a, sums, rows, width, parts),
            *(dh.stride(0), u.stride(0), s.stride(0), 0 if b is None else b.stride(0), ds.stride(0), a.stride(0)),
            ACT=act,
            GATED=gated,
            PAIRED=paired,
            RANK=rank,
            R=padded(rank),
            BELOW=depth,
            J=padded(depth),
            BM=tile.rows,
            BN=tile.columns,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
        grads = total(sums, torch.float32) if low or below else sums[0]
    else:
        grads = torch.zeros(size + width * depth, dtype=torch.float32, device=u.device)
    return du, grads[:size].view(columns, rank) if low else None, grads[size:].view(depth, width) if below else None


def _backward_tile(dtype: torch.dtype, rank: int) -> Tile:
    if dtype.itemsize == 4:
        return Tile(32, 32, 8, 2, 1)
    return Tile(32, 64, 4, 3, 3) if rank <= 32 else Tile(32, 32, 4, 3, 3)


@triton.jit(do_not_specialize=["rows", "parts"])
def _activate_backward_kernel(
    dh, u, du, s, b, ds, a, sums, rows, width, parts, dh_stride, u_stride, s_stride, b_stride, ds_stride, a_stride,
    ACT: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BELOW: tl.constexpr, J: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(width, BN)
    part = tl.program_id(0) // tiles
    col = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    k, j = tl.arange(0, R), tl.arange(0, J)
    some_b, some_a = (col < width)[:, None] & (k < RANK)[None, :], (j < BELOW)[:, None] & (col < width)[None, :]
    if RANK:
        sum_x, sum_y = tl.zeros((BN, R), tl.float32), tl.zeros((BN, R), tl.float32)
        if b is not None:
            b_x = tl.trans(tl.load(b + _rows(col, b_stride) + k[None, :], mask=some_b, other=0.0))
            if GATED:
                right = tl.load(b + _rows(width + col, b_stride) + k[None, :] + (RANK if PAIRED else 0), mask=some_b, other=0.0)
                b_y = tl.trans(right)
    if BELOW:
        down, sum_a = tl.load(a + _rows(j, a_stride) + col[None, :], mask=some_a, other=0.0), tl.zeros((BN, J), tl.float32)
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
        if BELOW:
            above = tl.load(ds + row[:, None] * ds_stride + j[None, :], mask=live & (j < BELOW)[None, :], other=0.0)
            grad += tl.dot(above, down, input_precision="ieee")
        h, slope = _curve(x, ACT)
        if GATED:
            dy = (grad * h).to(du.dtype.element_ty)
            place = du + row[:, None] * (2 * width) + col[None, :]
            tl.store(place + width, dy, mask=inside)
            grad *= y
            h *= y
        else:
            place = du + row[:, None] * width + col[None, :]
        dx = (grad * slope).to(du.dtype.element_ty)
        tl.store(place, dx, mask=inside)
        if RANK:
            sum_x = tl.dot(tl.trans(dx), left, sum_x, input_precision="ieee")
            if GATED:
                sum_y = tl.dot(tl.trans(dy), left_y, sum_y, input_precision="ieee")
        if BELOW:
            sum_a = tl.dot(tl.trans(h.to(du.dtype.element_ty)), above, sum_a, input_precision="ieee")
    sums += part.to(tl.int64) * width * (RANK * (2 if GATED else 1) + BELOW)
    if RANK:
        tl.store(sums + _rows(col, RANK) + k[None, :], sum_x, mask=some_b)
        if GATED:
            tl.store(sums + _rows(width + col, RANK) + k[None, :], sum_y, mask=some_b)
        sums += tl.cast(RANK * (2 if GATED else 1), tl.int64) * width
    if BELOW:
        tl.store(sums + col[:, None] + _columns(j, width), sum_a, mask=tl.trans(some_a))


@triton.jit
def _columns(number, stride):
    return number.to(tl.int64)[None, :] * stride


# ------------------------------------------------------------------ what is launched


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    shapes = [
        ("silu", True, True, 16, 16),
        ("silu", True, False, 32, 16),
        ("gelu_tanh", True, False, 0, 0),
        ("silu", True, False, 64, 64),
        ("gelu", False, False, 16, 16),
        ("relu", False, False, 64, 0),
    ]
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        for act, gated, paired, rank, below in shapes:
            values = {"ACT": act, "GATED": gated, "PAIRED": paired, "RANK": rank, "R": padded(rank), "BELOW": below, "J": padded(below)}
            tiles = (_forward_tile(dtype), _backward_tile(dtype, max(rank, below)))
            for kernel, tile in zip((_activate_kernel, _activate_backward_kernel), tiles, strict=True):
                matrices = ("u", "h", "s", "b", "a", "dh", "du", "ds")
                signature = {name: kind if name in matrices else "i32" for name in kernel.arg_names} | {"sums": "*fp32"}
                absent = {"b": None} if kernel is _activate_backward_kernel and rank and not paired else {}
                yield kernel, signature, values | absent | {"BM": tile.rows, "BN": tile.columns, "STAGES": tile.stages}, tile.warps, 3
