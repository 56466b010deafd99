"""RMSNorm and LayerNorm with the residual sum before them, forward and backward: one pass over memory each.

A program holds whole rows in registers, several of them where they are short, so what is read once is enough
for the statistics and for the result. Rows of more than 32,768 columns, which no model has, go to the
reference. The gradients of weight and bias are made by programs that walk over rows and keep a sum of their
own, added up at the end in a fixed order: no atomics, the same bits every time.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels import reference
from petune.kernels.triton.residual import multiprocessors

WIDEST = 32_768  # columns: 32 numbers for each of a program's 1,024 threads


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, residual, weight, bias, y, mean, rstd, total, rows, columns, x_stride, residual_stride, y_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK)[None]
    real, there = row < rows, row[:, None]
    inside = real[:, None] & (column < columns)
    values = tl.load(x + there * x_stride + column, inside, 0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + there * residual_stride + column, inside, 0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + there * columns + column, rounded, inside)
        values = rounded.to(tl.float32)
    if mean is not None:
        centre = tl.sum(values, 1) / columns
        tl.store(mean + row, centre, real)
        values = tl.where(inside, values - centre[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1) / columns + eps)
    tl.store(rstd + row, scale, real)
    result = values * scale[:, None] * tl.load(weight + column, column < columns, 0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + column, column < columns, 0.0).to(tl.float32)
    tl.store(y + there * y_stride + column, result.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dy, total, weight, mean, rstd, dresidual, dtotal, dweight, dbias, rows, columns, dy_stride, total_stride, dresidual_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None]
    weights = tl.load(weight + column, column < columns, 0.0).to(tl.float32)
    if dweight is not None:
        weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    if dbias is not None:
        bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        real, there = row < rows, row[:, None]
        inside = real[:, None] & (column < columns)
        grad = tl.load(dy + there * dy_stride + column, inside, 0.0).to(tl.float32)
        normed = tl.load(total + there * total_stride + column, inside, 0.0).to(tl.float32)
        scale = tl.load(rstd + row, real, 0.0)[:, None]
        if mean is not None:
            normed -= tl.load(mean + row, real, 0.0)[:, None]
        normed *= scale
        scaled = grad * weights
        result = scaled - normed * (tl.sum(scaled * normed, 1) / columns)[:, None]
        if mean is not None:
            result -= (tl.sum(scaled, 1) / columns)[:, None]
        result *= scale
        if dresidual is not None:
            result += tl.load(dresidual + there * dresidual_stride + column, inside, 0.0).to(tl.float32)
        tl.store(dtotal + there * columns + column, result.to(dtotal.dtype.element_ty), inside)
        if dweight is not None:
            weight_sum += grad * normed
        if dbias is not None:
            bias_sum += grad
    if dweight is not None:
        tl.store(dweight + program * columns + column, tl.sum(weight_sum, 0)[None], column < columns)
    if dbias is not None:
        tl.store(dbias + program * columns + column, tl.sum(bias_sum, 0)[None], column < columns)


# ------------------------------------------------------------------ launching


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.rms_norm`; float32, bfloat16 or float16."""
    if x.shape[1] > WIDEST:
        return reference.rms_norm(x, weight, eps, residual, out)
    rstd = x.new_empty(len(x), dtype=torch.float32)
    y, total = _normed(x, weight, None, eps, residual, None, rstd, out)
    return y, rstd, total


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`reference.layer_norm`; float32, bfloat16 or float16."""
    if x.shape[1] > WIDEST:
        return reference.layer_norm(x, weight, bias, eps, residual, out)
    mean, rstd = x.new_empty((2, len(x)), dtype=torch.float32)
    y, total = _normed(x, weight, bias, eps, residual, mean, rstd, out)
    return y, mean, rstd, total


def rms_norm_backward(
    dy: Tensor, total: Tensor, weight: Tensor, rstd: Tensor, dresidual: Tensor | None = None, weight_grad: bool = False
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`reference.rms_norm_backward`; float32, bfloat16 or float16."""
    if dy.shape[1] > WIDEST:
        return reference.rms_norm_backward(dy, total, weight, rstd, dresidual, weight_grad)
    dtotal, sums = _gradients(dy, total, weight, None, rstd, dresidual, 1 if weight_grad else 0)
    return dtotal, None if sums is None else sums[0]


def layer_norm_backward(
    dy: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dresidual: Tensor | None = None,
    weight_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`reference.layer_norm_backward`; float32, bfloat16 or float16."""
    if dy.shape[1] > WIDEST:
        return reference.layer_norm_backward(dy, total, weight, mean, rstd, dresidual, weight_grad)
    dtotal, sums = _gradients(dy, total, weight, mean, rstd, dresidual, 2 if weight_grad else 0)
    return (dtotal, None, None) if sums is None else (dtotal, sums[0], sums[1])


def _normed(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, mean: Tensor | None,
    rstd: Tensor, out: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(result, total); fills `mean` and `rstd`."""
    rows, columns = x.shape
    y = x.new_empty(rows, columns) if out is None else out
    total = x if residual is None else x.new_empty(rows, columns)
    if rows:
        per, block, warps = _tile(columns)
        stride = 0 if residual is None else residual.stride(0)
        _forward[(triton.cdiv(rows, per),)](
            x, residual, weight, bias, y, mean, rstd, total, rows, columns, x.stride(0), stride, y.stride(0), eps,
            per, block, num_warps=warps,
        )  # fmt: skip
    return y, total


def _gradients(
    dy: Tensor, total: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dresidual: Tensor | None, wanted: int
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(gradient of total, sums [wanted, columns] or None): 0 sums, 1 for the weight's gradient, 2 for the
    weight's and the bias's."""
    rows, columns = dy.shape
    dtotal = dy.new_empty(rows, columns)
    per, block, warps = _tile(columns)
    programs = triton.cdiv(rows, per)
    if wanted:
        programs = min(programs, 4 * multiprocessors(dy.device))
    parts = dy.new_empty((wanted, programs, columns), dtype=torch.float32) if wanted else None
    if rows:
        stride = 0 if dresidual is None else dresidual.stride(0)
        dweight, dbias = (None if parts is None or wanted <= which else parts[which] for which in range(2))
        _backward[(programs,)](
            dy, total, weight, mean, rstd, dresidual, dtotal, dweight, dbias, rows, columns, dy.stride(0), total.stride(0), stride,
            per, block, num_warps=warps,
        )  # fmt: skip
    return dtotal, None if parts is None else parts.sum(1)


@lru_cache
def _tile(columns: int) -> tuple[int, int, int]:
    """(rows of a program, columns of its block, warps): 16 numbers a thread where rows are long, a thousand a
    program where short."""
    block = triton.next_power_of_2(columns)
    return max(1, 1024 // block), block, max(4, min(32, block // 512))
