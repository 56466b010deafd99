"""Norms of the heads of queries and keys, of values where asked for, and rotary positions as one pass over
memory, forward and backward.

A program walks some heads of its rows, as that of petune.kernels.triton.rope does, and so reads cos, sin and
both weights once, or those of EACH head. A head is in registers as its two parts, halves or every other
column (STEP, APART), whose squares are summed as one row; of a LayerNorm it is CENTRED before. The backward
pass makes the statistics again; gradients of weights are one partial sum a program, or one for each head and
some rows, added up at the end in a fixed order: no atomics, the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels import reference
from petune.kernels.reference import QueriesAndKeys
from petune.kernels.triton.residual import Tile, multiprocessors, shares
from petune.kernels.triton.rope import turn_back

# half a head, and whether values are normed, and made of keys; then `_how`, as kernels are checked
_PLAIN = (False, False, False)
KINDS = (
    (64, False, False, *_PLAIN),
    (32, False, False, *_PLAIN),
    (128, False, False, *_PLAIN),
    (128, True, False, *_PLAIN),
    (256, True, True, *_PLAIN),
    (64, False, False, True, True, True),
)
WIDEST = 512  # of a head; wider ones, and those that are no power of two, go to the reference


def norm_rope(
    raw: Tensor, weights: QueriesAndKeys, eps: float, cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    values: bool = False, layer: bool = False, neighbours: bool = False,
) -> Tensor:  # fmt: skip
    """`petune.kernels.reference.norm_rope`; float32, bfloat16 or float16."""
    (rows, columns), width = raw.shape, cos.shape[1]
    if not _fits(width):
        how = values, layer, neighbours
        return reference.norm_rope(raw, weights, eps, cos, sin, heads, kv_heads, *how)
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
        *(raw.stride(0), cos.stride(0), sin.stride(0), eps), VALUES=values, KEYED=keyed,
        **_how(tile.columns, weights[0].dim() > 1, layer, neighbours),
        BM=tile.rows, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out


def norm_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, raw: Tensor, weights: QueriesAndKeys, eps: float, cos: Tensor, sin: Tensor,
    weight_grad: bool = False, values: bool = False, layer: bool = False, neighbours: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`petune.kernels.reference.norm_rope_backward`; float32, bfloat16 or float16."""
    (rows, columns), width = raw.shape, cos.shape[1]
    if not _fits(width):
        how = weight_grad, values, layer, neighbours
        return reference.norm_rope_backward(dq, dk, dv, raw, weights, eps, cos, sin, *how)
    out = torch.empty((rows, columns), dtype=dq.dtype, device=dq.device)
    tile, heads = _backward_tile(width // 2), (dq.shape[1], dk.shape[1], dv.shape[1])
    walks = triton.cdiv(rows, tile.rows)
    parts = shares(walks, max(heads), multiprocessors(dq.device) * tile.resident) if rows else 1
    each = weights[0].dim() > 1
    partial = (walks, sum(heads[:2]), width) if each else (2, walks * parts, width)
    sums = torch.empty(partial, dtype=torch.float32, device=dq.device) if weight_grad else None
    if rows:
        _norm_rope_backward_kernel[(walks * parts,)](
            *(dq, dk, dv, raw, *weights, cos, sin, out, sums, rows, len(cos), *heads, parts),
            *(dq.stride(0), dq.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1)),
            *(raw.stride(0), cos.stride(0), sin.stride(0), eps),
            VALUES=values, KEYED=values and columns == (heads[0] + heads[1]) * width,
            **_how(tile.columns, each, layer, neighbours),
            BM=tile.rows, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    if sums is None:
        return out, None, None
    return out, *(sums.sum(0).split(heads[:2]) if each else sums.sum(1))


def _fits(width: int) -> bool:
    return 2 <= width <= WIDEST and width & (width - 1) == 0


def _how(half: int, each: bool, layer: bool, neighbours: bool) -> dict[str, int | bool]:
    """How a head lies, and how it is normed."""
    lies = {"STEP": 2, "APART": 1} if neighbours else {"STEP": 1, "APART": half}
    return {"HALF": half, **lies, "EACH": each, "CENTRED": layer}


def _forward_tile(half: int) -> Tile:
    return Tile(max(1, 2048 // half), half, 4, 3, 4)


def _backward_tile(half: int) -> Tile:
    return Tile(max(1, 1024 // half), half, 4, 2, 5)


# ------------------------------------------------------------------ forward


@triton.jit(do_not_specialize=["rows", "positions", "q_heads", "k_heads", "v_heads", "parts"])
def _norm_rope_kernel(
    raw, q_weight, k_weight, cos, sin, out, rows, positions, q_heads, k_heads, v_heads, parts,
    raw_stride, cos_stride, sin_stride, eps,
    VALUES: tl.constexpr, KEYED: tl.constexpr,
    HALF: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, EACH: tl.constexpr, CENTRED: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64) * BM + tl.arange(0, BM)
    t = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (t < HALF)[None, :]
    position = row % positions
    re = tl.load(cos + position[:, None] * cos_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    im = tl.load(sin + position[:, None] * sin_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    source = raw + row[:, None] * raw_stride + t[None, :] * STEP
    into = out + row[:, None] * ((q_heads + k_heads + v_heads) * (2 * HALF)) + t[None, :] * STEP
    _normed_and_turned(
        source, into, q_weight + t * STEP, q_heads, part, parts, inside, re, im, eps, HALF, APART, EACH, CENTRED, STAGES
    )  # fmt: skip
    source += q_heads * (2 * HALF)
    into += q_heads * (2 * HALF)
    _normed_and_turned(
        source, into, k_weight + t * STEP, k_heads, part, parts, inside, re, im, eps, HALF, APART, EACH, CENTRED, STAGES
    )  # fmt: skip
    into += k_heads * (2 * HALF)
    if not KEYED:  # else values are made of the keys too
        source += k_heads * (2 * HALF)
    if VALUES:
        _normed_and_turned(
            source, into, None, v_heads, part, parts, inside, re, im, eps, HALF, APART, EACH, CENTRED, STAGES
        )  # fmt: skip
    else:
        turn_back(
            source, 2 * HALF, into, v_heads, part, parts, inside, re, im, 2 * HALF, APART, False, STAGES
        )  # fmt: skip


@triton.jit
def _normed_and_turned(
    source, into, weight, heads, part, parts, inside, re, im, eps,
    HALF: tl.constexpr, APART: tl.constexpr, EACH: tl.constexpr, CENTRED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Heads part, part + parts, ... normed, rounded and turned; without a weight normed alone."""
    if weight is not None:
        first = tl.load(weight).to(tl.float32)[None, :]
        second = tl.load(weight + APART).to(tl.float32)[None, :]
    for head in tl.range(part, heads, parts, num_stages=STAGES):
        if EACH and weight is not None:
            first = tl.load(weight + head * (2 * HALF)).to(tl.float32)[None, :]
            second = tl.load(weight + head * (2 * HALF) + APART).to(tl.float32)[None, :]
        x = tl.load(source + head * (2 * HALF), mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + head * (2 * HALF) + APART, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            mean = (_summed(x, y) / (2 * HALF))[:, None]
            x, y = x - mean, y - mean
        rstd = tl.rsqrt(_summed(x * x, y * y) / (2 * HALF) + eps)[:, None]
        x, y = x * rstd, y * rstd
        if weight is not None:
            x = (x * first).to(into.dtype.element_ty).to(tl.float32)
            y = (y * second).to(into.dtype.element_ty).to(tl.float32)
            x, y = x * re - y * im, y * re + x * im
        place = into + head * (2 * HALF)
        tl.store(place, x.to(into.dtype.element_ty), mask=inside)
        tl.store(place + APART, y.to(into.dtype.element_ty), mask=inside)


@triton.jit
def _summed(x, y):
    """The sums of rows [x | y], as those of one matrix."""
    whole = tl.permute(tl.join(x, y), (0, 2, 1))
    return tl.sum(tl.reshape(whole, (x.shape[0], 2 * x.shape[1])), 1)


# ------------------------------------------------------------------ backward


@triton.jit(do_not_specialize=["rows", "positions", "q_heads", "k_heads", "v_heads", "parts"])
def _norm_rope_backward_kernel(
    dq, dk, dv, raw, q_weight, k_weight, cos, sin, out, sums, rows, positions, q_heads, k_heads, v_heads, parts,
    dq_stride, dq_head, dk_stride, dk_head, dv_stride, dv_head, raw_stride, cos_stride, sin_stride, eps,
    VALUES: tl.constexpr, KEYED: tl.constexpr,
    HALF: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, EACH: tl.constexpr, CENTRED: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64) * BM + tl.arange(0, BM)
    t = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (t < HALF)[None, :]
    position = row % positions
    re = tl.load(cos + position[:, None] * cos_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    im = tl.load(sin + position[:, None] * sin_stride + t[None, :], mask=inside, other=0.0).to(tl.float32)
    source = raw + row[:, None] * raw_stride + t[None, :] * STEP
    width = (q_heads + k_heads) * (2 * HALF)
    if not KEYED:
        width += v_heads * (2 * HALF)
    into = out + row[:, None] * width + t[None, :] * STEP
    own = None
    if sums is not None:
        if EACH:
            own = sums + (tl.program_id(0) // parts) * ((q_heads + k_heads) * (2 * HALF)) + t * STEP
        else:
            own = sums + tl.program_id(0) * (2 * HALF) + t * STEP
    grad = dq + row[:, None] * dq_stride + t[None, :] * STEP
    _turned_back(
        grad, dq_head, source, into, q_weight + t * STEP, own, None, 0, q_heads,
        part, parts, inside, re, im, eps, HALF, APART, EACH, CENTRED, STAGES,
    )  # fmt: skip
    source += q_heads * (2 * HALF)
    into += q_heads * (2 * HALF)
    if sums is not None:
        own += (q_heads if EACH else tl.num_programs(0)) * (2 * HALF)
    grad = dk + row[:, None] * dk_stride + t[None, :] * STEP
    of_values = dv + row[:, None] * dv_stride + t[None, :] * STEP
    if KEYED:
        _turned_back(
            grad, dk_head, source, into, k_weight + t * STEP, own, of_values, dv_head, k_heads,
            part, parts, inside, re, im, eps, HALF, APART, EACH, CENTRED, STAGES,
        )  # fmt: skip
    else:
        _turned_back(
            grad, dk_head, source, into, k_weight + t * STEP, own, None, 0, k_heads,
            part, parts, inside, re, im, eps, HALF, APART, EACH, CENTRED, STAGES,
        )  # fmt: skip
        source += k_heads * (2 * HALF)
        into += k_heads * (2 * HALF)
        if VALUES:
            _turned_back(
                of_values, dv_head, source, into, None, None, None, 0, v_heads,
                part, parts, inside, re, im, eps, HALF, APART, EACH, CENTRED, STAGES,
            )  # fmt: skip
        else:
            turn_back(
                of_values, dv_head, into, v_heads, part, parts, inside, re, im, 2 * HALF, APART, False, STAGES
            )


@triton.jit
def _turned_back(
    grad, stride, source, into, weight, own, bare, bare_stride, heads, part, parts, inside, re, im, eps,
    HALF: tl.constexpr, APART: tl.constexpr, EACH: tl.constexpr, CENTRED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of heads part, part + parts, ... before they were normed, and turned where there is a weight;
    the sum of its gradient goes to `own`, where that is not None. bare: the gradients of the same heads
    normed alone, or None."""
    if weight is not None:
        first = tl.load(weight).to(tl.float32)[None, :]
        second = tl.load(weight + APART).to(tl.float32)[None, :]
    if own is not None:
        first_sum, second_sum = tl.zeros_like(re), tl.zeros_like(re)
    for head in tl.range(part, heads, parts, num_stages=STAGES):
        if EACH and weight is not None:
            first = tl.load(weight + head * (2 * HALF)).to(tl.float32)[None, :]
            second = tl.load(weight + head * (2 * HALF) + APART).to(tl.float32)[None, :]
        place = grad + tl.cast(head, tl.int64) * stride
        dx = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(place + APART, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(source + head * (2 * HALF), mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + head * (2 * HALF) + APART, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            mean = (_summed(x, y) / (2 * HALF))[:, None]
            x, y = x - mean, y - mean
        rstd = tl.rsqrt(_summed(x * x, y * y) / (2 * HALF) + eps)[:, None]
        x, y = x * rstd, y * rstd
        if weight is not None:
            dx, dy = dx * re + dy * im, dy * re - dx * im
        if own is not None:
            if EACH:
                tl.store(own + head * (2 * HALF), tl.sum(dx * x, 0))
                tl.store(own + head * (2 * HALF) + APART, tl.sum(dy * y, 0))
            else:
                first_sum += dx * x
                second_sum += dy * y
        if weight is not None:
            dx, dy = dx * first, dy * second
        if bare is not None:
            place = bare + tl.cast(head, tl.int64) * bare_stride
            dx += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            dy += tl.load(place + APART, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            mean = (_summed(dx, dy) / (2 * HALF))[:, None]
            dx, dy = dx - mean, dy - mean
        shared = (_summed(dx * x, dy * y) / (2 * HALF))[:, None]
        place = into + head * (2 * HALF)
        tl.store(place, (rstd * (dx - x * shared)).to(into.dtype.element_ty), mask=inside)
        tl.store(place + APART, (rstd * (dy - y * shared)).to(into.dtype.element_ty), mask=inside)
    if own is not None and not EACH:
        tl.store(own, tl.sum(first_sum, 0))
        tl.store(own + APART, tl.sum(second_sum, 0))
