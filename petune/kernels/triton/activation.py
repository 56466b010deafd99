"""The activation between two linears, gated or plain, forward: one pass over the matrix.

A program walks some columns of its rows, so that s = h a^T grows in registers, of an h that drops elements
there where `a` reads it so. How many programs share a walk is chosen so that they fill the device; each
leaves a partial sum in float32, and `total` adds those up in order. Tiles are interleaved between the
programs that share a walk: what runs together reads what lies together.

The logistic function is rsqrt(1 + exp(-x))^2: one instruction where a division takes eight, and arithmetic is
what these kernels have least room for besides memory. tanh(z) = 2 logistic(2 z) - 1, so gelu's approximation
is x logistic(2 z).
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.reference import LowFactors, Scale
from petune.kernels.triton.dropout import draw_of, placed, stays
from petune.kernels.triton.residual import Tile, multiprocessors, padded, shares, total
from petune.rng.dropout import Drop

KernelAct = Literal["silu", "gelu", "gelu_tanh", "relu"]  # the activations that kernels know


# ------------------------------------------------------------------ forward


def activate(
    u: Tensor, act: KernelAct, gated: bool, low: LowFactors | None = None, a: Tensor | None = None, paired: bool = False,
    out: Tensor | None = None, how: Drop | None = None, scale: Scale | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`petune.kernels.reference.activate`; ranks up to `sums.MAX_RANK`, ValueError above."""
    rows, width = u.shape[0], u.shape[1] // (1 + gated)
    h = torch.empty((rows, width), dtype=u.dtype, device=u.device) if out is None else out
    rank, below = low[0].shape[1] // (1 + paired) if low else 0, a.shape[0] if a is not None else 0
    if not rows:
        return h, None if a is None else u.new_empty((0, below))
    tile = _forward_tile(u.dtype, scale is not None)
    walks = triton.cdiv(rows, tile.rows)
    parts = shares(walks, triton.cdiv(width, tile.columns), multiprocessors(u.device) * tile.resident)
    s, b = low or (u, u)
    down = u if a is None else a
    sums = torch.empty((parts, rows, below), dtype=torch.float32, device=u.device)
    _activate_kernel[(walks * parts,)](
        *(u, h, s, b, down, *(scale or (None, None)), sums, rows, width, parts),
        *(u.stride(0), s.stride(0), b.stride(0), down.stride(0), h.stride(0), *draw_of(how, u)),
        ACT=act, GATED=gated, PAIRED=paired, RANK=rank, R=padded(rank), BELOW=below, J=padded(below),
        DROPS=a is not None and how is not None, LOADED=how is not None and isinstance(how.base, Tensor),
        BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return h, None if a is None else total(sums, u.dtype)


def _forward_tile(dtype: torch.dtype, scales: bool) -> Tile:
    """scales: u is scaled, which takes registers; with one stage less as many programs stay on Hopper."""
    if dtype.itemsize == 4:
        return Tile(32, 32, 8, 2, 1)
    return Tile(64, 64, 4, 2 if scales else 3, 3)


@triton.jit(do_not_specialize=["rows", "parts", "base", "feature", "least"])
def _activate_kernel(
    u, h, s, b, a, columns, own, sums, rows, width, parts, u_stride, s_stride, b_stride, a_stride, h_stride,
    numbers, base, feature, least, scale,
    ACT: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BELOW: tl.constexpr, J: tl.constexpr,
    DROPS: tl.constexpr, LOADED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
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
    if DROPS:
        drawn = placed(numbers, row, rows, base, LOADED)[:, None]
    for start in tl.range(part * BN, width, parts * BN, num_stages=STAGES):
        col = start + tl.arange(0, BN)
        inside = (row < rows)[:, None] & (col < width)[None, :]
        place = u + row[:, None] * u_stride + col[None, :]
        x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            y = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
        if RANK:
            some = (col < width)[:, None] & (k < RANK)[None, :]
            x += tl.dot(
                left,
                tl.trans(tl.load(b + rows_of(col, b_stride) + k[None, :], mask=some, other=0.0)),
                input_precision="ieee",
            )
            if GATED:
                right = tl.load(
                    b + rows_of(width + col, b_stride) + k[None, :] + (RANK if PAIRED else 0),
                    mask=some,
                    other=0.0,
                )
                y += tl.dot(left_y, tl.trans(right), input_precision="ieee")
        if columns is not None:
            factor, apart = scale_of(columns, own, col, col < width)
            x = scaled_by(x, factor, apart, own)
            if GATED:
                factor, apart = scale_of(columns, own, width + col, col < width)
                y = scaled_by(y, factor, apart, own)
        value, _ = valued(x, ACT)
        if GATED:
            value *= y
        value = value.to(h.dtype.element_ty)
        tl.store(h + row[:, None] * h_stride + col[None, :], value, mask=inside)
        if BELOW:
            down = tl.load(
                a + rows_of(j, a_stride) + col[None, :],
                mask=(j < BELOW)[:, None] & (col < width)[None, :],
                other=0.0,
            )
            if DROPS:
                value = tl.where(stays(drawn, (feature + col)[None], least), value, 0.0).to(
                    h.dtype.element_ty
                )
            sum_s = tl.dot(value, tl.trans(down), sum_s, input_precision="ieee")
    if BELOW:
        place = sums + (part.to(tl.int64) * rows + row)[:, None] * BELOW + j[None, :]
        tl.store(place, sum_s * scale, mask=(row < rows)[:, None] & (j < BELOW)[None, :])


@triton.jit
def rows_of(number, stride):
    """Where rows of a matrix begin, one below the other."""
    return number.to(tl.int64)[:, None] * stride


@triton.jit
def scale_of(columns, own, col, live):
    """Of some columns of a matrix: what they are multiplied by, and what of them is not, where there is such."""
    factor = tl.load(columns + col, mask=live, other=0.0)[None, :]
    apart = factor
    if own is not None:
        apart = tl.load(own + col, mask=live, other=0.0)[None, :]
    return factor, apart


@triton.jit
def scaled_by(x, factor, apart, own):
    """x times a factor, but for its part that is not."""
    return x * factor if own is None else (x - apart) * factor + apart


@triton.jit
def valued(x, ACT: tl.constexpr):
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
