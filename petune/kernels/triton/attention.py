"""Attention within segments, forward and backward, whose probabilities may drop out by index: no score and no mask is ever stored.

        out_i = sum_j keep_ij P_ij v_j / (1 - p)        P = softmax(scale q k^T) within a segment

A program walks the keys of a block of queries with a running maximum and sum (Dao 2023, arXiv:2307.08691). The mask is that of
`petune.dropout` for probabilities [rows, heads, queries, keys]: a query has a 64-bit hash of its row, head and token, its place, from which
32-bit arithmetic decides about each key. The backward pass hashes once into memory, beside delta_i = dout_i . out_i; then

        dP_ij = keep_ij dout_i . v_j / (1 - p)          dS = P (dP - delta) scale

is made twice: along keys for the gradient of q, along queries for those of k and v. Each program owns what it writes, so nothing is added
up atomically and the same call gives the same bits. A launch depends on shapes and on `longest` alone, never on a value in memory.

The two passes share their mask and their tiles, so they share a file of over 300 lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.dropout import Drop, threshold
from petune.kernels.triton.dropout import factors, hashed
from petune.kernels.triton.sums import Variant

_LOG2E, _LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)  # exponentials are made in base 2, as the device has them
_STAGES = 2  # of loads under way: segments are a few blocks long

# ------------------------------------------------------------------ the mask


@triton.jit
def _placed(number, head, base, LOADED: tl.constexpr):
    """The hashes int64 of queries numbered (row << 32) + token; base lies in memory if LOADED."""
    row = number >> 32 << 32
    added = tl.load(base) if LOADED else base
    return hashed(hashed(row + head + added) + (number - row))


# ------------------------------------------------------------------ tiles


@triton.jit
def _own(starts, blocks, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """(the segment's first row, int64; its tokens; the head, int64; the first token of the block) of this program."""
    program = tl.program_id(0)
    segment = starts + program // blocks // HEADS
    first = tl.load(segment)
    return first.to(tl.int64), tl.load(segment + 1) - first, (program // blocks % HEADS).to(tl.int64), program % blocks * BLOCK


@triton.jit
def _inside(real, D: tl.constexpr, W: tl.constexpr):
    """Which of [rows, W] are elements of a head of D columns."""
    return real[:, None] if D == W else real[:, None] & (tl.arange(0, W) < D)[None]


@triton.jit
def _load(x, row, stride, real, D: tl.constexpr, W: tl.constexpr):
    """[rows, W] of a head of D columns, zeros elsewhere."""
    return tl.load(x + row[:, None] * stride + tl.arange(0, W)[None], _inside(real, D, W), 0.0)


@triton.jit
def _store(x, row, stride, values, real, D: tl.constexpr, W: tl.constexpr):
    """Rows of a head of D columns, rounded to the dtype of x."""
    tl.store(x + row[:, None] * stride + tl.arange(0, W)[None], values.to(x.dtype.element_ty), _inside(real, D, W))


# ------------------------------------------------------------------ forward


@triton.jit(do_not_specialize=["blocks", "m", "base", "least"])
def _forward_kernel(
    q, k, v, out, lse, starts, numbers, base, blocks, m, least, rescale, scale, q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    LOADED: tl.constexpr,
):  # fmt: skip
    first, length, head, begin = _own(starts, blocks, HEADS, BLOCK)
    if begin >= length:
        return
    query = begin + tl.arange(0, BLOCK)
    real, row = query < length, first + query
    queries = _load(q + head * q_head, row, q_row, real, D, W)
    if numbers is not None:
        place = _placed(tl.load(numbers + row, real, 0), head, base, LOADED)[:, None]
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)  # the first key is there for every query, so it is finite from then on
    total = tl.zeros((BLOCK,), tl.float32)
    result = tl.zeros((BLOCK, W), tl.float32)
    for start in range(0, tl.minimum(length, begin + BLOCK) if CAUSAL else length, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there, other = key < length, first + key
        keys = _load(k + head // GROUP * k_head, other, k_row, there, D, W)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * _LOG2E)
        seen = there[None] & (query[:, None] >= key[None]) if CAUSAL else there[None]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights, shrunk = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        total = total * shrunk + tl.sum(weights, 1)
        highest = higher
        if numbers is not None:
            token = tl.load(numbers + other, there, 0).to(tl.int32)
            weights *= factors(place, token[None], least, rescale)
        values = _load(v + head // GROUP * v_head, other, v_row, there, D, W)
        result = tl.dot(weights.to(values.dtype), values, result * shrunk[:, None], input_precision="ieee")
    _store(out + head * D, row, HEADS * D, result / total[:, None], real, D, W)
    tl.store(lse + head * m + row, (highest + tl.log2(total)) * _LN2, real)


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, causal: bool, scale: float, how: Drop | None
) -> tuple[Tensor, Tensor]:
    """(out [m, heads, d] dense, lse float32 [heads, m]: the logarithms of sum_j exp(scale q_i . k_j), natural, before anything is dropped).

    q [m, heads, d], k and v [m, kv_heads, d], float32, bfloat16 or float16, with any strides but a dense last dim; d is a multiple of 8 up
    to 128, and each of kv_heads serves heads / kv_heads heads in a row. starts: int32 [segments + 1] on the device; rows starts[i] to
    starts[i + 1], none of them or at most `longest`, attend to each other, if causal none to a later one. how: what drops out, with
    `numbers` [m] as `petune.dropout.places` gives them and `base` a number or a tensor [1] on the device.
    """
    (m, heads, d), out = q.shape, torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((heads, m), dtype=torch.float32)
    if m:
        block, warps = _tile(q.dtype, d, longest)
        numbers, base, least, rescale = _draw(how)
        blocks = triton.cdiv(longest, block)
        _forward_kernel[((len(starts) - 1) * heads * blocks,)](
            *(q, k, v, out, lse, starts, numbers, base, blocks, m, least, rescale, float(scale)),
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *(heads, heads // k.shape[1], d, _width(d), block, causal, isinstance(base, Tensor)),
            num_warps=warps,
            num_stages=_STAGES,
        )
    return out, lse


# ------------------------------------------------------------------ backward


@triton.jit(do_not_specialize=["m", "base"])
def _prepare_kernel(
    dout, out, delta, places, numbers, base, m, dout_row, dout_head,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, LOADED: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    row = (tl.program_id(0) // HEADS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = row < m
    grads = _load(dout + head * dout_head, row, dout_row, real, D, W).to(tl.float32)
    results = _load(out + head * D, row, HEADS * D, real, D, W).to(tl.float32)
    tl.store(delta + head * m + row, tl.sum(grads * results, 1), real)
    if places is not None:
        tl.store(places + head * m + row, _placed(tl.load(numbers + row, real, 0), head, base, LOADED), real)


@triton.jit(do_not_specialize=["blocks", "m", "least"])
def _keys_kernel(
    dout, q, k, v, lse, delta, places, dk, dv, starts, numbers, blocks, m, least, rescale, scale,
    dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    first, length, group, begin = _own(starts, blocks, HEADS // GROUP, BLOCK)
    if begin >= length:
        return
    key = begin + tl.arange(0, BLOCK)
    there, other = key < length, first + key
    keys, values = _load(k + group * k_head, other, k_row, there, D, W), _load(v + group * v_head, other, v_row, there, D, W)
    if places is not None:
        token = tl.load(numbers + other, there, 0).to(tl.int32)[:, None]
    dkeys, dvalues = tl.zeros((BLOCK, W), tl.float32), tl.zeros((BLOCK, W), tl.float32)
    for head in range(group * GROUP, group * GROUP + GROUP):
        for start in range(begin if CAUSAL else 0, length, BLOCK):
            query = start + tl.arange(0, BLOCK)
            real, row = query < length, first + query
            queries = _load(q + head * q_head, row, q_row, real, D, W)
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * (scale * _LOG2E)
            if CAUSAL:
                scores = tl.where(query[None] >= key[:, None], scores, float("-inf"))
            logs = tl.load(lse + head * m + row, real, 0.0) * _LOG2E
            weights = tl.exp2(scores - logs[None])
            grads = _load(dout + head * dout_head, row, dout_row, real, D, W)
            dweights = tl.dot(values, tl.trans(grads), input_precision="ieee")
            left = weights
            if places is not None:
                kept = factors(tl.load(places + head * m + row, real, 0)[None], token, least, rescale)
                left, dweights = weights * kept, dweights * kept
            dvalues = tl.dot(left.to(grads.dtype), grads, dvalues, input_precision="ieee")
            dscores = weights * (dweights - tl.load(delta + head * m + row, real, 0.0)[None])
            dkeys = tl.dot(dscores.to(queries.dtype), queries, dkeys, input_precision="ieee")
    # Rows past the segment's end may hold what is no number by now, and are not stored.
    _store(dk + group * D, other, HEADS // GROUP * D, dkeys * scale, there, D, W)
    _store(dv + group * D, other, HEADS // GROUP * D, dvalues, there, D, W)


@triton.jit(do_not_specialize=["blocks", "m", "least"])
def _queries_kernel(
    dout, q, k, v, lse, delta, places, dq, starts, numbers, blocks, m, least, rescale, scale,
    dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    first, length, head, begin = _own(starts, blocks, HEADS, BLOCK)
    if begin >= length:
        return
    query = begin + tl.arange(0, BLOCK)
    real, row = query < length, first + query
    queries, grads = _load(q + head * q_head, row, q_row, real, D, W), _load(dout + head * dout_head, row, dout_row, real, D, W)
    logs = (tl.load(lse + head * m + row, real, 0.0) * _LOG2E)[:, None]
    less = tl.load(delta + head * m + row, real, 0.0)[:, None]
    if places is not None:
        place = tl.load(places + head * m + row, real, 0)[:, None]
    dqueries = tl.zeros((BLOCK, W), tl.float32)
    for start in range(0, tl.minimum(length, begin + BLOCK) if CAUSAL else length, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there, other = key < length, first + key
        keys = _load(k + head // GROUP * k_head, other, k_row, there, D, W)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * _LOG2E)
        seen = there[None] & (query[:, None] >= key[None]) if CAUSAL else there[None]
        weights = tl.exp2(tl.where(seen, scores, float("-inf")) - logs)
        values = _load(v + head // GROUP * v_head, other, v_row, there, D, W)
        dweights = tl.dot(grads, tl.trans(values), input_precision="ieee")
        if places is not None:
            token = tl.load(numbers + other, there, 0).to(tl.int32)
            dweights *= factors(place, token[None], least, rescale)
        dqueries = tl.dot((weights * (dweights - less)).to(keys.dtype), keys, dqueries, input_precision="ieee")
    _store(dq + head * D, row, HEADS * D, dqueries * scale, real, D, W)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    starts: Tensor, longest: int, causal: bool, scale: float, how: Drop | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq [m, heads, d], dk, dv [m, kv_heads, d]), dense. dout [m, heads, d] has a dense last dim; the rest is what `forward` had."""
    (m, heads, d), groups = q.shape, k.shape[1]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if not m:
        return dq, dk, dv
    block, warps = _tile(q.dtype, d, longest)
    numbers, base, least, rescale = _draw(how)
    delta = torch.empty_like(lse)
    places = None if numbers is None else torch.empty_like(lse, dtype=torch.int64)
    _prepare_kernel[(triton.cdiv(m, block) * heads,)](
        *(dout, out, delta, places, numbers, base, m, dout.stride(0), dout.stride(1)),
        *(heads, d, _width(d), block, isinstance(base, Tensor)),
        num_warps=warps,
    )
    blocks = triton.cdiv(longest, block)
    given = dout, q, k, v, lse, delta, places
    rest = (starts, numbers, blocks, m, least, rescale, float(scale), *(size for x in given[:4] for size in x.stride()[:2]))
    consts = heads, heads // groups, d, _width(d), block, causal
    segments = len(starts) - 1
    _keys_kernel[(segments * groups * blocks,)](*given, dk, dv, *rest, *consts, num_warps=warps, num_stages=_STAGES)
    _queries_kernel[(segments * heads * blocks,)](*given, dq, *rest, *consts, num_warps=warps, num_stages=_STAGES)
    return dq, dk, dv


# ------------------------------------------------------------------ what is launched


def _draw(how: Drop | None) -> tuple[Tensor | None, int | Tensor, int, float]:
    """(numbers and base, or None and 0 where nothing is drawn; what an int32 has to reach; 1 / (1 - p), or 0 where all is dropped)."""
    if how is None or not how.p:
        return None, 0, 0, 1.0
    return how.numbers, how.base, threshold(how.p), 1 / (1 - how.p) if how.p < 1 else 0.0


def _width(d: int) -> int:
    """Columns of a tile: the narrowest that a tensor core takes, or a power of two."""
    return max(16, 1 << (d - 1).bit_length())


def _tile(dtype: torch.dtype, d: int, longest: int) -> tuple[int, int]:
    """(queries, and keys, of a block; warps). float32 has no tensor cores here, and a thread no registers for larger blocks."""
    wide = d > 64
    if dtype == torch.float32:
        return 16 if wide or longest <= 16 else 32, 4
    block = min(64, _width(longest))
    return block, block // 16 * (1 + wide)


def variants() -> Iterator[Variant]:
    """What is launched for heads of 64 and 128 columns, as `tests/kernels/gate.py` compiles it."""
    kernels: tuple[Any, ...] = (_forward_kernel, _prepare_kernel, _keys_kernel, _queries_kernel)
    fixed = {name: "i32" for kernel in kernels for name in kernel.arg_names}  # strides, and what is not named here
    fixed |= dict.fromkeys(("lse", "delta"), "*fp32") | dict.fromkeys(("rescale", "scale"), "fp32")
    fixed |= dict.fromkeys(("numbers", "places"), "*i64") | {"starts": "*i32"}
    shapes = (64, 512, False, True), (128, 512, True, True), (64, 512, False, False), (64, 16, True, True)
    cases = [(torch.bfloat16, "*bf16", shape) for shape in shapes] + [(torch.float32, "*fp32", shape) for shape in shapes[:2]]
    for dtype, kind, (d, longest, causal, drops) in cases:
        block, warps = _tile(dtype, d, longest)
        signature = fixed | dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), kind) | {"base": "*i64" if causal else "i64"}
        values: dict[str, Any] = {"HEADS": 16, "GROUP": 1, "D": d, "W": _width(d), "BLOCK": block, "CAUSAL": causal, "LOADED": causal}
        values |= {} if drops else {"numbers": None, "places": None}
        for kernel in kernels:
            yield kernel, signature, {name: value for name, value in values.items() if name in kernel.arg_names}, warps, _STAGES
