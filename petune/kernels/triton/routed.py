"""What happens to rows of experts between their products and behind them: the gated activation times what
each row counts, and the sum over the copies of a token.

All of it takes as long as reading and writing its matrices. Sums are made in float32, in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.grouped_reference import ALPHA, LIMIT
from petune.kernels.reference import Act
from petune.kernels.triton.activation import valued
from petune.kernels.triton.residual import dense_rows

COLUMNS = 2048  # of a token's sum that a program makes
BM, BN = 8, 256  # of the activation forward
BACK_BM, BACK_BN = 4, 256  # of a step of its backward pass, which walks whole rows
WARPS = 4
_ALPHA, _LIMIT = tl.constexpr(ALPHA), tl.constexpr(LIMIT)


# ------------------------------------------------------------------ copies of a token


def combined(y: Tensor, inverse: Tensor, chosen: int, weights: Tensor | None = None) -> Tensor:
    """`petune.kernels.grouped_reference.combined`."""
    tokens, n = len(inverse) // chosen, y.shape[1]
    out = torch.empty((tokens, n), dtype=y.dtype, device=y.device)
    if out.numel():
        y, block = dense_rows(y), min(COLUMNS, triton.next_power_of_2(n))
        weights = None if weights is None else weights.contiguous()
        _combine_kernel[(tokens, triton.cdiv(n, block))](
            *(y, inverse, weights, out, n, y.stride(0)), CHOSEN=chosen, BLOCK=block, num_warps=WARPS
        )
    return out


@triton.jit
def _combine_kernel(y, inverse, weights, out, n, stride, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for copy in tl.static_range(CHOSEN):
        row = tl.load(inverse + token * CHOSEN + copy).to(tl.int64)
        there = (col < n) & (row >= 0)
        value = tl.load(y + row * stride + col, mask=there, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + token * CHOSEN + copy).to(tl.float32)
        total += value
    tl.store(out + token * n + col, total.to(out.dtype.element_ty), mask=col < n)


# ------------------------------------------------------------------ the activation


def gated(gate_up: Tensor, share: Tensor, act: Act) -> Tensor:
    """`petune.kernels.grouped_reference.gated`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    m = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if m.numel():
        gate_up, share = dense_rows(gate_up), share.contiguous()
        grid = (triton.cdiv(rows, BM) * triton.cdiv(width, BN),)
        _gated_kernel[grid](
            *(gate_up, share, m, rows, width, gate_up.stride(0)), ACT=act, BM=BM, BN=BN, num_warps=WARPS
        )
    return m


@triton.jit
def _both(rows, col, width, ACT: tl.constexpr):
    """(the places of gate, how far behind them those of up lie)."""
    if ACT == "clamped":
        place = rows + 2 * col[None, :]
        apart = 1
    else:
        place = rows + col[None, :]
        apart = width
    return place, apart


@triton.jit
def _gate(gate, up, ACT: tl.constexpr):
    """(the activation of gate, its slope, what it is multiplied by, whether either follows what is given)."""
    if ACT == "clamped":
        gate_moves, up_moves = tl.where(gate <= _LIMIT, 1.0, 0.0), tl.where(tl.abs(up) <= _LIMIT, 1.0, 0.0)
        gate, up = tl.minimum(gate, _LIMIT), tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT) + 1.0
        share = tl.sigmoid(gate * _ALPHA)
        value = gate * share
        slope = share + value * (1.0 - share) * _ALPHA
    else:
        gate_moves, up_moves = 1.0, 1.0
        value, slope = valued(gate, ACT)
    return value, slope, up, gate_moves, up_moves


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    gate_up, share, m, rows, width, stride, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    across = tl.cdiv(width, BN)
    row = (tl.program_id(0) // across).to(tl.int64) * BM + tl.arange(0, BM)
    col = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    inside = (row < rows)[:, None] & (col < width)[None, :]
    place, apart = _both(gate_up + row[:, None] * stride, col, width, ACT)
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + apart, mask=inside, other=0.0).to(tl.float32)
    counts = tl.load(share + row, mask=row < rows, other=0.0).to(tl.float32)
    value, _, up, _, _ = _gate(gate, up, ACT)
    value = value * up * counts[:, None]
    tl.store(m + row[:, None] * width + col[None, :], value.to(m.dtype.element_ty), mask=inside)


def dgated(dm: Tensor, gate_up: Tensor, share: Tensor, act: Act) -> tuple[Tensor, Tensor, Tensor]:
    """`petune.kernels.grouped_reference.dgated`."""
    rows, width = dm.shape
    d_gate_up = torch.empty((rows, 2 * width), dtype=gate_up.dtype, device=gate_up.device)
    dshare = torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    m = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        dm, gate_up, share = dense_rows(dm), dense_rows(gate_up), share.contiguous()
        _dgated_kernel[(triton.cdiv(rows, BACK_BM),)](
            *(dm, gate_up, share, d_gate_up, dshare, m, rows, width, dm.stride(0), gate_up.stride(0)),
            ACT=act, BM=BACK_BM, BN=BACK_BN, num_warps=WARPS,
        )  # fmt: skip
    return d_gate_up, dshare, m


@triton.jit(do_not_specialize=["rows"])
def _dgated_kernel(
    dm, gate_up, share, d_gate_up, dshare, m, rows, width, dm_stride, stride,
    ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    counts = tl.load(share + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, width, BN):
        col = start + tl.arange(0, BN)
        inside = (row < rows)[:, None] & (col < width)[None, :]
        place, apart = _both(gate_up + row[:, None] * stride, col, width, ACT)
        gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(place + apart, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dm + row[:, None] * dm_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        value, slope, up, gate_moves, up_moves = _gate(gate, up, ACT)
        h = value * up
        total += grad * h
        grad *= counts
        tl.store(m + row[:, None] * width + col[None, :], (h * counts).to(m.dtype.element_ty), mask=inside)
        place, apart = _both(d_gate_up + row[:, None] * (2 * width), col, width, ACT)
        tl.store(place, (grad * up * slope * gate_moves).to(d_gate_up.dtype.element_ty), mask=inside)
        tl.store(place + apart, (grad * value * up_moves).to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(dshare + row, tl.sum(total, 1), mask=row < rows)
