"""Quantised weights made dense, to the bit as the forms' own plain torch makes them.

A program makes blocks of one row. Levels, and eight-bit floats, which not every device converts, are looked
up in tables of 16 and of 256 numbers, which stay in the cache; a product and a sum are rounded one after the
other (no fused multiply-add), as they are there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.models.expert_form import ExpertForm
from petune.models.form import Form, ScaledRows
from petune.models.fp8 import values
from petune.models.nf4 import BLOCK, NESTED, Nf4, dynamic_levels, levels

BLOCKS = 32  # of 64 numbers, that a program makes
COLUMNS = BLOCKS * BLOCK
WARPS = 4


def dense_into(form: Form, out: Tensor) -> None:
    """`petune.kernels.reference.dense_into`."""
    if not out.numel():
        return
    if out.dtype == torch.float64:  # in which plain torch multiplies
        form.dense_into(out)
    elif isinstance(form, ExpertForm):
        _of_experts(form, out)
    elif isinstance(form, Nf4):
        for row, run in form.runs():
            _nf4(run, out[row : row + len(run.q)], len(out), form.nested.stride(0))
    elif isinstance(form, ScaledRows) and form.q.stride(1) == 1:
        _scaled_rows(form, out)
    else:
        form.dense_into(out)


def _of_experts(form: ExpertForm, out: Tensor) -> None:
    """The rows of all experts in one launch; `out` [E, n, k] is dense."""
    flat, rows = out.view(-1, out.shape[-1]), form.rows
    if rows is not None:
        dense_into(rows, flat)
    elif isinstance(form.held, Nf4) and all(value.is_contiguous() for value in form.tensors):
        held = form.held
        together = replace(held, q=held.q.flatten(0, 1), scales=held.scales.flatten(0, 1))
        _nf4(together, flat, out.shape[1], held.nested.stride(0))
    else:
        form.dense_into(out)


def _scaled_rows(form: ScaledRows, out: Tensor) -> None:
    """Eight-bit integers, or floats by their bytes."""
    grid, apart = (len(out), triton.cdiv(out.shape[1], COLUMNS)), (form.q.stride(0), out.stride(0))
    integers = form.q.dtype == torch.int8
    # integers need no table: any pointer to floats stands in its place
    q, table = (form.q, form.scale) if integers else (form.q.view(torch.uint8), values(out.device))
    shape = {"INTEGERS": integers, "COLUMNS": COLUMNS, "num_warps": WARPS}
    _scaled_rows_kernel[grid](q, form.scale, table, out, out.shape[1], *apart, **shape)


def _nf4(form: Nf4, out: Tensor, each: int, apart: int) -> None:
    """Rows of weights of `each` rows, whose scales of scales are so far apart."""
    rows, columns = out.shape
    if not rows:
        return
    tables = levels(out.device), dynamic_levels(out.device)
    strides = form.q.stride(0), form.scales.stride(0), out.stride(0)
    _nf4_kernel[(rows, triton.cdiv(columns, COLUMNS))](
        *(*form.tensors, *tables, out, columns // BLOCK, *strides, form.stride, form.first, each, apart),
        BLOCKS=BLOCKS, SIZE=BLOCK, NESTED=NESTED, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _nf4_kernel(
    q, scales, nested, mean, levels, dynamic, out, blocks, q_stride, scales_stride, out_stride, stride, first, each,
    apart, BLOCKS: tl.constexpr, SIZE: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    place = tl.load(scales + row * scales_stride + block, mask=inside, other=0).to(tl.int32)
    weight, own = row // each, row % each
    at = weight * apart + (first + own * stride + block) // NESTED
    largest = tl.load(nested + at, mask=inside, other=0.0)
    scale = tl.load(dynamic + place) * largest + tl.load(mean + weight)
    byte = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    pair = tl.load(q + row * q_stride + byte, mask=inside[:, None], other=0).to(tl.int32)
    value = tl.interleave(tl.load(levels + (pair >> 4)), tl.load(levels + (pair & 15))) * scale[:, None]
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _scaled_rows_kernel(
    q, scale, table, out, columns, q_stride, out_stride, INTEGERS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    byte = tl.load(q + row * q_stride + column, mask=column < columns, other=0)
    value = byte.to(tl.float32) if INTEGERS else tl.load(table + byte.to(tl.int32))
    value = value * tl.load(scale + row)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=column < columns)
