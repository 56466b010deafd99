"""RMSNorm of the heads of queries and keys, of values where asked for, and rotary positions as one pass over
memory, forward and backward.

A program walks some heads of its rows, as that of petune.kernels.triton.rope does, and so reads cos, sin and
both weights once. A head is in registers as its two halves, whose squares are summed as one row. The backward
pass makes the statistics again; gradients of weights are one partial sum a program, added up at the end in a
fixed order: no atomics, the same bits every time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels import reference
from petune.kernels.reference import Pair
from petune.kernels.triton.residual import Tile, Variant, multiprocessors, shares

# half a head, and whether values are normed, and made of keys, as kernels are checked
KINDS = ((64, False, False), (32, False, False), (128, False, False), (128, True, False), (256, True, True))
WIDEST = 512  # of a head; wider ones, and those that are no power of two, go to the reference


def norm_rope(
    raw: Tensor,
    weights: Pair,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    values: bool = False,
) -> Tensor:
    """`petune.kernels.reference.norm_rope`; float32, bfloat16 or float16."""
    (rows, columns), width = raw.shape, cos.shape[1]
    if not _fits(width):
        return reference.norm_rope(raw, weights, eps, cos, sin, heads, kv_heads, values)
    own = columns // width - heads - kv_heads
    keyed, own = values and not own, own or (kv_heads if values else 0)
    out = torch.empty((rows, (heads + kv_heads + own) * width), dtype=raw.dtype, device=raw.device)
    if not rows:
        return out
    tile = _forward_tile(width // 2)
    walks = triton.cdiv(rows, tile.rows)
    parts = shares(walks, max(heads, kv_heads, own), multiprocessors(raw.device) * tile.resident)
    _norm_rope_kernel[(walks * parts,)](
        *(raw, *weights, cos, sin, out, rows, len(cos), heads, kv_heads, own, parts),
        *(raw.stride(0), cos.stride(0), sin.stride(0), eps),
        VALUES=values,
        KEYED=keyed,
        HALF=tile.columns,
        BM=tile.rows,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out


def norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    raw: Tensor,
    weights: Pair,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    weight_grad: bool = False,
    values: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`petune.kernels.reference.norm_rope_backward`; float32, bfloat16 or float16."""
    (rows, columns), width = raw.shape, cos.shape[1]
    if not _fits(width):
        return reference.norm_rope_backward(dq, dk, dv, raw, weights, eps, cos, sin, weight_grad, values)
    out = torch.empty((rows, columns), dtype=dq.dtype, device=dq.device)
    tile, heads = _backward_tile(width // 2), (dq.shape[1], dk.shape[1], dv.shape[1])
    walks = triton.cdiv(rows, tile.rows)
    parts = shares(walks, max(heads), multiprocessors(dq.device) * tile.resident) if rows else 1
    sums = (
        torch.empty((2, walks * parts, width), dtype=torch.float32, device=dq.device) if weight_grad else None
    )
    if rows:
        _norm_rope_backward_kernel[(walks * parts,)](
            *(dq, dk, dv, raw, *weights, cos, sin, out, sums, rows, len(cos), *heads, parts),
            *(dq.stride(0), dq.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1)),
            *(raw.stride(0), cos.stride(0), sin.stride(0), eps),
            VALUES=values,
            KEYED=values and columns == (heads[0] + heads[1]) * width,
            HALF=tile.columns,
            BM=tile.rows,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    return (out, None, None) if sums is None else (out, *sums.sum(1))


def _fits(width: int) -> bool:
    return 2 <= width <= WIDEST and width & (width - 1) == 0


def _forward_tile(half: int) -> Tile:
    return Tile(max(1, 2048 // half), half, 4, 3, 4)


def _backward_tile(half: int) -> Tile:
    return Tile(max(1, 1024 // half), half, 4, 2, 5)


# ------------------------------------------------------------------ forward


@triton.jit(do_not_specialize=["rows", "positions", "q_heads", "k_heads", "v_heads", "parts"])
def _norm_rope_kernel(
    raw, q_weight, k_weight, cos, sin, out, rows, positions, q_heads, k_heads, v_heads, parts,
    raw_stride, cos_stride, sin_stride, eps,
    VALUES: tl.constexpr, KEYED: tl.constexpr, HALF: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64) * BM + tl.arange(0, BM)
    t = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (t < HALF)[None, :]
    position = row % positions
    re = tl.load(cos + position[:, None] * cos_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    im = tl.load(sin + position[:, None] * sin_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    source = raw + row[:, None] * raw_stride + t[None, :]
    into = out + row[:, None] * ((q_heads + k_heads + v_heads) * (2 * HALF)) + t[None, :]
    _normed_and_turned(source, into, q_weight + t, q_heads, part, parts, inside, re, im, eps, HALF, STAGES)
    source += q_heads * (2 * HALF)
    into += q_heads * (2 * HALF)
    _normed_and_turned(source, into, k_weight + t, k_heads, part, parts, inside, re, im, eps, HALF, STAGES)
    into += k_heads * (2 * HALF)
    if not KEYED:  # else values are made of the keys too
        source += k_heads * (2 * HALF)
    if VALUES:
        _normed_and_turned(source, into, None, v_heads, part, parts, inside, re, im, eps, HALF, STAGES)
    else:
        _copied(source, 2 * HALF, into, v_heads, part, parts, inside, HALF, STAGES)


@triton.jit
def _normed_and_turned(
    source, into, weight, heads, part, parts, inside, re, im, eps, HALF: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Heads part, part + parts, ... normed, rounded and turned; without a weight normed alone."""
    if weight is not None:
        first = tl.load(weight).to(tl.float32)[None, :]
        second = tl.load(weight + HALF).to(tl.float32)[None, :]
    for head in tl.range(part, heads, parts, num_stages=STAGES):
        x = tl.load(source + head * (2 * HALF), mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + head * (2 * HALF) + HALF, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(_summed(x * x, y * y) / (2 * HALF) + eps)[:, None]
        x, y = x * rstd, y * rstd
        if weight is not None:
            x = (x * first).to(into.dtype.element_ty).to(tl.float32)
            y = (y * second).to(into.dtype.element_ty).to(tl.float32)
            x, y = x * re - y * im, y * re + x * im
        place = into + head * (2 * HALF)
        tl.store(place, x.to(into.dtype.element_ty), mask=inside)
        tl.store(place + HALF, y.to(into.dtype.element_ty), mask=inside)


@triton.jit
def _summed(x, y):
    """The sums of rows [x | y], as those of one matrix."""
    whole = tl.permute(tl.join(x, y), (0, 2, 1))
    return tl.sum(tl.reshape(whole, (x.shape[0], 2 * x.shape[1])), 1)


@triton.jit
def _copied(source, stride, into, heads, part, parts, inside, HALF: tl.constexpr, STAGES: tl.constexpr):
    """Heads part, part + parts, ... as they are."""
    for head in tl.range(part, heads, parts, num_stages=STAGES):
        place = source + tl.cast(head, tl.int64) * stride
        x = tl.load(place, mask=inside, other=0.0)
        y = tl.load(place + HALF, mask=inside, other=0.0)
        tl.store(into + head * (2 * HALF), x, mask=inside)
        tl.store(into + head * (2 * HALF) + HALF, y, mask=inside)


# ------------------------------------------------------------------ backward


@triton.jit(do_not_specialize=["rows", "positions", "q_heads", "k_heads", "v_heads", "parts"])
def _norm_rope_backward_kernel(
    dq, dk, dv, raw, q_weight, k_weight, cos, sin, out, sums, rows, positions, q_heads, k_heads, v_heads, parts,
    dq_stride, dq_head, dk_stride, dk_head, dv_stride, dv_head, raw_stride, cos_stride, sin_stride, eps,
    VALUES: tl.constexpr, KEYED: tl.constexpr, HALF: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64) * BM + tl.arange(0, BM)
    t = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (t < HALF)[None, :]
    position = row % positions
    re = tl.load(cos + position[:, None] * cos_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    im = tl.load(sin + position[:, None] * sin_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    source = raw + row[:, None] * raw_stride + t[None, :]
    width = (q_heads + k_heads) * (2 * HALF)
    if not KEYED:
        width += v_heads * (2 * HALF)
    into = out + row[:, None] * width + t[None, :]
    own = None
    if sums is not None:
        own = sums + tl.program_id(0) * (2 * HALF) + t
    grad = dq + row[:, None] * dq_stride + t[None, :]
    _turned_back(
        grad, dq_head, source, into, q_weight + t, own, None, 0, q_heads,
        part, parts, inside, re, im, eps, HALF, STAGES,
    )  # fmt: skip
    source += q_heads * (2 * HALF)
    into += q_heads * (2 * HALF)
    if sums is not None:
        own += tl.num_programs(0) * (2 * HALF)
    grad = dk + row[:, None] * dk_stride + t[None, :]
    of_values = dv + row[:, None] * dv_stride + t[None, :]
    if KEYED:
        _turned_back(
            grad, dk_head, source, into, k_weight + t, own, of_values, dv_head, k_heads,
            part, parts, inside, re, im, eps, HALF, STAGES,
        )  # fmt: skip
    else:
        _turned_back(
            grad, dk_head, source, into, k_weight + t, own, None, 0, k_heads,
            part, parts, inside, re, im, eps, HALF, STAGES,
        )  # fmt: skip
        source += k_heads * (2 * HALF)
        into += k_heads * (2 * HALF)
        if VALUES:
            _turned_back(
                of_values, dv_head, source, into, None, None, None, 0, v_heads,
                part, parts, inside, re, im, eps, HALF, STAGES,
            )  # fmt: skip
        else:
            _copied(of_values, dv_head, into, v_heads, part, parts, inside, HALF, STAGES)


@triton.jit
def _turned_back(
    grad, stride, source, into, weight, own, bare, bare_stride, heads, part, parts, inside, re, im, eps,
    HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of heads part, part + parts, ... before they were normed, and turned where there is a weight;
    the sum of its gradient goes to `own`, where that is not None. bare: the gradients of the same heads
    normed alone, or None."""
    if weight is not None:
        first = tl.load(weight).to(tl.float32)[None, :]
        second = tl.load(weight + HALF).to(tl.float32)[None, :]
    if own is not None:
        first_sum, second_sum = tl.zeros_like(re), tl.zeros_like(re)
    for head in tl.range(part, heads, parts, num_stages=STAGES):
        place = grad + tl.cast(head, tl.int64) * stride
        dx = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(source + head * (2 * HALF), mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + head * (2 * HALF) + HALF, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(_summed(x * x, y * y) / (2 * HALF) + eps)[:, None]
        x, y = x * rstd, y * rstd
        if weight is not None:
            dx, dy = dx * re + dy * im, dy * re - dx * im
        if own is not None:
            first_sum += dx * x
            second_sum += dy * y
        if weight is not None:
            dx, dy = dx * first, dy * second
        if bare is not None:
            place = bare + tl.cast(head, tl.int64) * bare_stride
            dx += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            dy += tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
        shared = (_summed(dx * x, dy * y) / (2 * HALF))[:, None]
        place = into + head * (2 * HALF)
        tl.store(place, (rstd * (dx - x * shared)).to(into.dtype.element_ty), mask=inside)
        tl.store(place + HALF, (rstd * (dy - y * shared)).to(into.dtype.element_ty), mask=inside)
    if own is not None:
        tl.store(own, tl.sum(first_sum, 0))
        tl.store(own + HALF, tl.sum(second_sum, 0))


# ------------------------------------------------------------------ what is launched


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for kind, table in (("*bf16", "*bf16"), ("*bf16", "*fp32"), ("*fp32", "*fp32")):
        for half, values, keyed in KINDS:
            matrices = dict.fromkeys(("raw", "dq", "dk", "dv", "out", "q_weight", "k_weight"), kind)
            floats = {"cos": table, "sin": table, "sums": "*fp32", "eps": "fp32"}
            for kernel, tile in (
                (_norm_rope_kernel, _forward_tile(half)),
                (_norm_rope_backward_kernel, _backward_tile(half)),
            ):
                signature = {name: "i32" for name in kernel.arg_names} | matrices | floats
                constants = {"VALUES": values, "KEYED": keyed, "HALF": half}
                constants |= {"BM": tile.rows, "STAGES": tile.stages}
                for absent in ({},) if kernel is _norm_rope_kernel else ({}, {"sums": None}):
                    yield kernel, signature, constants | absent, tile.warps, 3
