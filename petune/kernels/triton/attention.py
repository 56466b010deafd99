"""Attention within segments or across them, forward and backward, in which no score and no mask is ever
stored.

        out_i = sum_j keep_ij P_ij v_j / (1 - p)        P = softmax(cap(scale q k^T) + bias + scale R)

i runs over the queries of a segment, j over its keys: its own tokens, all or no later ones or the last few of
these, or with `keys` the tokens of the segment of another sequence. bias is one by distance
(petune.kernels.block.distance); R_ij = by_query[i, b] + by_key[j, b] with the bucket b of the distance j - i,
scores of positions (DeBERTa, He et al. 2021, arXiv:2006.03654). A program walks the keys of a block of
queries with a running maximum and sum (Dao 2023, arXiv:2307.08691). What drops out is drawn as
`petune.rng.dropout` does for probabilities [rows, heads, queries, keys]: a query has a 64-bit hash of its
row, head and token, its place, from which 32-bit arithmetic decides about each key. The backward pass hashes
once into memory, beside delta_i = dout_i . out_i; then

        dP_ij = keep_ij dout_i . v_j / (1 - p)          dS = P (dP - delta)

is made twice: along keys for the gradient of q, along queries for those of k and v. The first sums dS along
the diagonals of its tiles where the gradient of the bias is asked for; where there are scores of positions
both leave dS in memory, of which `bucket_sums` makes their gradients. Each program owns what it writes, so
nothing is added up atomically and the same call gives the same bits. A launch depends on shapes and on the
longest segments alone, never on a value in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.triton.bucket_sums import bucket_sums
from petune.kernels.triton.dropout import draw_of, factors, hashed
from petune.kernels.triton.residual import power_of
from petune.rng.dropout import Drop

# exponentials are made in base 2, as the device has them
_LOG2E, _LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
_STAGES = 2  # of loads under way: segments are a few blocks long


class More(NamedTuple):
    """What not every call has. starts: of the keys' segments in cross-attention, of which the longest has
    `longest` tokens and `tokens` [n] int64 are their numbers in their rows, read where something drops out.
    window: a query sees the keys with query - key < window alone and, where attention is not causal, key -
    query < window; 0 for all. bias: [heads, 2 L - 1] by distance. cap: of the scores before the bias, 0 for
    none. sinks: [heads], the score of one more key, which every query sees and which has no value. by_query
    [heads, m, columns], by_key [heads, n, columns], dense: scores of positions, of self-attention that is not
    causal, where `buckets` is there, int32 [2 L - 1]: the column for each distance key - query, which does
    not grow with it."""

    starts: Tensor | None = None
    longest: int = 0
    tokens: Tensor | None = None
    window: int = 0
    bias: Tensor | None = None
    cap: float = 0.0
    sinks: Tensor | None = None
    by_query: Tensor | None = None
    by_key: Tensor | None = None
    buckets: Tensor | None = None

    @property
    def bucketed(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, int, int]:
        """(by_query, by_key, buckets, columns, the place of distance 0)."""
        if self.buckets is None:
            return None, None, None, 0, 0
        columns = next(one.shape[2] for one in (self.by_query, self.by_key) if one is not None)
        return self.by_query, self.by_key, self.buckets, columns, len(self.buckets) // 2


MORE = More()


# ------------------------------------------------------------------ the mask


@triton.jit
def _placed(number, head, base, LOADED: tl.constexpr):
    """The hashes int64 of queries numbered (row << 32) + token; base lies in memory if LOADED."""
    row = number >> 32 << 32
    added = tl.load(base) if LOADED else base
    return hashed(hashed(row + head + added) + (number - row))


# ------------------------------------------------------------------ tiles


@triton.jit
def _own(blocks, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """(the segment, the head, int64, the first token of the block) of this program."""
    program = tl.program_id(0)
    return program // blocks // HEADS, (program // blocks % HEADS).to(tl.int64), program % blocks * BLOCK


@triton.jit
def _span(starts, segment):
    """(a segment's first row, int64; its tokens)."""
    first = tl.load(starts + segment)
    return first.to(tl.int64), tl.load(starts + segment + 1) - first


@triton.jit
def _facing(others, segment, first, length):
    """The span of the segment's other side: the same but in cross-attention, where `others` are its
    starts."""
    if others is None:
        return first, length
    else:
        return _span(others, segment)


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
    tl.store(
        x + row[:, None] * stride + tl.arange(0, W)[None], values.to(x.dtype.element_ty), _inside(real, D, W)
    )


# ------------------------------------------------------------------ scores


@triton.jit
def _first_key(begin, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """The first key of the blocks that a block of queries sees; without a direction, or that sees such."""
    return tl.maximum(begin - WINDOW + 1, 0) // BLOCK * BLOCK if WINDOW else 0


@triton.jit
def _end(begin, length, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Behind the last key, of a row's length, that a block of queries sees."""
    if CAUSAL:
        length = tl.minimum(length, begin + BLOCK)
    elif WINDOW:
        length = tl.minimum(length, begin + BLOCK + WINDOW - 1)
    return length


@triton.jit
def _seen(seen, query, key, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of `seen` stay, of tokens query and key in shapes that broadcast."""
    if CAUSAL:
        seen = seen & (query >= key)
    if WINDOW:
        seen = seen & (query - key < WINDOW)
        if not CAUSAL:
            seen = seen & (key - query < WINDOW)
    return seen


@triton.jit
def _capped(products, scale, CAP: tl.constexpr):
    """tanh(scale products / CAP)."""
    return 2 * tl.sigmoid(products * (2 / CAP * scale)) - 1


@triton.jit
def _biased(scores, bias, distance, real):
    """Scores in base 2, with `bias` at each `distance` added if there is one: zero beside a token that is not
    `real`, as whatever is computed there is multiplied by zeros later, and has to be finite for that."""
    if bias is None:
        return scores
    else:
        return scores + tl.load(bias + distance, real, 0.0).to(tl.float32) * _LOG2E


@triton.jit
def _positioned(scores, by_query, by_key, buckets, query_row, key_row, columns, distance, real, scale):
    """Scores in base 2, with those of positions added if there are some: query_row and key_row are rows of
    by_query and by_key, distance is from the first of `buckets`."""
    if buckets is None:
        return scores
    else:
        column = tl.load(buckets + distance, real, 0)
        if by_query is not None:
            scores += tl.load(by_query + query_row * columns + column, real, 0.0).to(tl.float32) * (
                scale * _LOG2E
            )
        if by_key is not None:
            scores += tl.load(by_key + key_row * columns + column, real, 0.0).to(tl.float32) * (
                scale * _LOG2E
            )
        return scores


# ------------------------------------------------------------------ forward


@triton.jit(do_not_specialize=["blocks", "m", "base", "least", "bias_head", "middle"])
def _forward_kernel(
    q, k, v, out, lse, starts, numbers, base, others, tokens, bias, sinks, by_query, by_key, buckets, columns, zero, blocks, m, least, rescale, scale, bias_head, middle,
    q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, LOADED: tl.constexpr,
):  # fmt: skip
    segment, head, begin = _own(blocks, HEADS, BLOCK)
    first, length = _span(starts, segment)
    if begin >= length:
        return
    other_first, other_length = _facing(others, segment, first, length)
    query = begin + tl.arange(0, BLOCK)
    real, row = query < length, first + query
    queries = _load(q + head * q_head, row, q_row, real, D, W)
    if numbers is not None:
        place = _placed(tl.load(numbers + row, real, 0), head, base, LOADED)[:, None]
    if bias is not None:
        bias += head * bias_head + middle
    # of a query that has a key, finite from its first one on
    if sinks is None:
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
    else:
        highest = tl.zeros((BLOCK,), tl.float32) + tl.load(sinks + head).to(tl.float32) * _LOG2E
        total = tl.full((BLOCK,), 1.0, tl.float32)
    result = tl.zeros((BLOCK, W), tl.float32)
    end = _end(begin, other_length, BLOCK, CAUSAL, WINDOW)
    for start in range(_first_key(begin, BLOCK, WINDOW), end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there, other = key < other_length, other_first + key
        keys = _load(k + head // GROUP * k_head, other, k_row, there, D, W)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        scores = _capped(products, scale, CAP) * (CAP * _LOG2E) if CAP != 0.0 else products * (scale * _LOG2E)
        both = real[:, None] & there[None]
        scores = _biased(scores, bias, key[None] - query[:, None], both)
        distance, first_row = key[None] - query[:, None] + zero, head * m
        scores = _positioned(
            scores, by_query, by_key, buckets, (first_row + row)[:, None], (first_row + other)[None], columns, distance, both, scale
        )  # fmt: skip
        scores = tl.where(
            _seen(there[None], query[:, None], key[None], CAUSAL, WINDOW), scores, float("-inf")
        )
        higher = tl.maximum(highest, tl.max(scores, 1))
        lowered = tl.where(higher == float("-inf"), 0.0, higher) if WINDOW else higher
        weights, shrunk = tl.exp2(scores - lowered[:, None]), tl.exp2(highest - lowered)
        total = total * shrunk + tl.sum(weights, 1)
        highest = higher
        if numbers is not None:
            token = tl.load(tokens + other, there, 0).to(tl.int32)
            weights *= factors(place, token[None], least, rescale)
        values = _load(v + head // GROUP * v_head, other, v_row, there, D, W)
        result = tl.dot(weights.to(values.dtype), values, result * shrunk[:, None], input_precision="ieee")
    if WINDOW or others is not None:
        total = tl.where(total == 0, 1.0, total)  # no keys at all, or no query: zeros
    _store(out + head * D, row, HEADS * D, result / total[:, None], real, D, W)
    tl.store(lse + head * m + row, (highest + tl.log2(total)) * _LN2, real)


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, causal: bool, scale: float, how: Drop | None,
    more: More = MORE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [m, heads, d] dense, lse float32 [heads, m]: the natural logarithms of the sums of exponentials,
    that of the sink among them, before drops).

    q [m, heads, d], k and v [n, kv_heads, d], float32, bfloat16 or float16, with any strides but a dense last
    dim; d is a multiple of 8 up to 512, and each of kv_heads serves heads / kv_heads heads in a row. starts:
    int32 [segments + 1] on the device; rows starts[i] to starts[i + 1], none of them or at most `longest`,
    attend to each other, if causal none to a later one. how: what drops out, with `numbers` [m] as
    `petune.rng.dropout.places` gives them and `base` a number or a tensor [1] on the device.
    """
    (m, heads, d), out = q.shape, torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((heads, m), dtype=torch.float32)
    if m:
        block, warps = _tile(q.dtype, d, max(longest, more.longest), more.bias is not None)
        numbers, base, _, least, rescale = draw_of(how if how is not None and how.p else None)
        blocks = triton.cdiv(longest, block)
        bias, *middle = _by_distance(more)
        _forward_kernel[((len(starts) - 1) * heads * blocks,)](
            *(q, k, v, out, lse, starts, numbers, base, more.starts, _tokens(numbers, more), bias),
            None if more.sinks is None else more.sinks.contiguous(), *more.bucketed,
            *(blocks, m, least, rescale, float(scale), *middle),
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *(heads, heads // k.shape[1], d, power_of(d), block, causal, more.window, more.cap, isinstance(base, Tensor)),
            num_warps=warps, num_stages=_STAGES,
        )  # fmt: skip
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


@triton.jit(do_not_specialize=["blocks", "m", "least", "bias_head", "middle"])
def _keys_kernel(
    dout, q, k, v, lse, delta, places, dk, dv, left_scores, starts, others, tokens, bias, by_query, by_key, buckets, columns, zero, stretch, blocks, m, least, rescale, scale,
    bias_head, middle, dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    segment, group, begin = _own(blocks, HEADS // GROUP, BLOCK)
    first, length = _span(starts, segment)
    other_first, other_length = _facing(others, segment, first, length)
    if begin >= other_length:
        return
    key = begin + tl.arange(0, BLOCK)
    there, other = key < other_length, other_first + key
    keys, values = (
        _load(k + group * k_head, other, k_row, there, D, W),
        _load(v + group * v_head, other, v_row, there, D, W),
    )
    if places is not None:
        token = tl.load(tokens + other, there, 0).to(tl.int32)[:, None]
    dkeys, dvalues = tl.zeros((BLOCK, W), tl.float32), tl.zeros((BLOCK, W), tl.float32)
    end = tl.minimum(length, begin + BLOCK + WINDOW - 1) if WINDOW else length
    for head in range(group * GROUP, group * GROUP + GROUP):
        for start in range(begin if CAUSAL else _first_key(begin, BLOCK, WINDOW), end, BLOCK):
            query = start + tl.arange(0, BLOCK)
            real, row = query < length, first + query
            queries = _load(q + head * q_head, row, q_row, real, D, W)
            products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            if CAP != 0.0:
                tanh = _capped(products, scale, CAP)
            scores = tanh * (CAP * _LOG2E) if CAP != 0.0 else products * (scale * _LOG2E)
            distance = key[:, None] - query[None] + (head * bias_head + middle)
            both = real[None] & there[:, None]
            scores = _biased(scores, bias, distance, both)
            apart, first_row = key[:, None] - query[None] + zero, head * m
            scores = _positioned(
                scores, by_query, by_key, buckets, (first_row + row)[None], (first_row + other)[:, None], columns, apart, both, scale
            )  # fmt: skip
            if CAUSAL or WINDOW:
                scores = tl.where(
                    _seen(True, query[None], key[:, None], CAUSAL, WINDOW), scores, float("-inf")
                )
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
            if left_scores is not None:
                at = (head * m + other)[:, None] * stretch + query[None]
                tl.store(left_scores + at, dscores.to(left_scores.dtype.element_ty), both)
            if CAP != 0.0:
                dscores *= 1 - tanh * tanh
            dkeys = tl.dot(dscores.to(queries.dtype), queries, dkeys, input_precision="ieee")
    # Rows past the segment's end may hold what is no number by now, and are not stored.
    _store(dk + group * D, other, HEADS // GROUP * D, dkeys * scale, there, D, W)
    _store(dv + group * D, other, HEADS // GROUP * D, dvalues, there, D, W)


@triton.jit(do_not_specialize=["blocks", "m", "least", "bias_head", "middle"])
def _queries_kernel(
    dout, q, k, v, lse, delta, places, dq, parts, left_scores, starts, others, tokens, bias, by_query, by_key, buckets, columns, zero, stretch, blocks, m, least, rescale, scale,
    bias_head, middle, dout_row, dout_head, q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    segment, head, begin = _own(blocks, HEADS, BLOCK)
    first, length = _span(starts, segment)
    if begin >= length:
        return
    other_first, other_length = _facing(others, segment, first, length)
    query = begin + tl.arange(0, BLOCK)
    real, row = query < length, first + query
    queries, grads = (
        _load(q + head * q_head, row, q_row, real, D, W),
        _load(dout + head * dout_head, row, dout_row, real, D, W),
    )
    logs = (tl.load(lse + head * m + row, real, 0.0) * _LOG2E)[:, None]
    less = tl.load(delta + head * m + row, real, 0.0)[:, None]
    if places is not None:
        place = tl.load(places + head * m + row, real, 0)[:, None]
    if bias is not None:
        bias += head * bias_head + middle
    dqueries = tl.zeros((BLOCK, W), tl.float32)
    # of the distances - blocks BLOCK to blocks BLOCK - 1, for each block of queries and head
    if parts is not None:
        column = tl.arange(0, BLOCK)
        parts += (
            ((segment * blocks + begin // BLOCK) * HEADS + head) * (2 * blocks * BLOCK)
            + blocks * BLOCK
            - begin
            + column
        )
        ahead = tl.zeros((BLOCK,), tl.float32)
    end = _end(begin, other_length, BLOCK, CAUSAL, WINDOW)
    for start in range(_first_key(begin, BLOCK, WINDOW), end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there, other = key < other_length, other_first + key
        keys = _load(k + head // GROUP * k_head, other, k_row, there, D, W)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if CAP != 0.0:
            tanh = _capped(products, scale, CAP)
        scores = tanh * (CAP * _LOG2E) if CAP != 0.0 else products * (scale * _LOG2E)
        both = real[:, None] & there[None]
        scores = _biased(scores, bias, key[None] - query[:, None], both)
        distance, first_row = key[None] - query[:, None] + zero, head * m
        scores = _positioned(
            scores, by_query, by_key, buckets, (first_row + row)[:, None], (first_row + other)[None], columns, distance, both, scale
        )  # fmt: skip
        seen = _seen(there[None], query[:, None], key[None], CAUSAL, WINDOW)
        weights = tl.exp2(tl.where(seen, scores, float("-inf")) - logs)
        values = _load(v + head // GROUP * v_head, other, v_row, there, D, W)
        dweights = tl.dot(grads, tl.trans(values), input_precision="ieee")
        if places is not None:
            token = tl.load(tokens + other, there, 0).to(tl.int32)
            dweights *= factors(place, token[None], least, rescale)
        dscores = weights * (dweights - less)
        if parts is not None:
            behind, more = _along_diagonals(dscores, BLOCK)
            tl.store(parts + start - BLOCK, ahead + behind)
            ahead = more
        if left_scores is not None:
            at = (head * m + row)[:, None] * stretch + key[None]
            tl.store(left_scores + at, dscores.to(left_scores.dtype.element_ty), both)
        if CAP != 0.0:
            dscores *= 1 - tanh * tanh
        dqueries = tl.dot(dscores.to(keys.dtype), keys, dqueries, input_precision="ieee")
    if parts is not None:
        tl.store(parts + (end - 1) // BLOCK * BLOCK, ahead)
    _store(dq + head * D, row, HEADS * D, dqueries * scale, real, D, W)


@triton.jit
def _along_diagonals(x, BLOCK: tl.constexpr):
    """Sums of x[i, i + d] of a square tile: of d = j - BLOCK, and of d = j, for each column j."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None]
    skewed, above = tl.gather(x, (row + column) % BLOCK, 1), row + column < BLOCK
    return tl.sum(tl.where(above, 0.0, skewed), 0), tl.sum(tl.where(above, skewed, 0.0), 0)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    starts: Tensor, longest: int, causal: bool, scale: float, how: Drop | None, more: More = MORE,
    dbias: Tensor | None = None, dsinks: Tensor | None = None,
    dpositions: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq [m, heads, d], dk, dv [n, kv_heads, d]), dense. dout [m, heads, d] has a dense last dim; the rest
    is what `forward` had.

    dbias: float32, shaped like the bias, whose gradient is added to it; dsinks of the sinks likewise. A sink
    is in `lse` and adds nothing to `out`, so the other gradients read it off these. dpositions: shaped like
    by_query and by_key, which their gradients are written to.
    """
    (m, heads, d), groups = q.shape, k.shape[1]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if not m:
        return dq, dk.zero_(), dv.zero_()
    block, warps = _tile(q.dtype, d, max(longest, more.longest), more.bias is not None, back=True)
    numbers, base, _, least, rescale = draw_of(how if how is not None and how.p else None)
    delta = torch.empty_like(lse)
    places = None if numbers is None else torch.empty_like(lse, dtype=torch.int64)
    _prepare_kernel[(triton.cdiv(m, block) * heads,)](
        *(dout, out, delta, places, numbers, base, m, dout.stride(0), dout.stride(1)),
        *(heads, d, power_of(d), block, isinstance(base, Tensor)),
        num_warps=warps,
    )
    blocks = triton.cdiv(longest, block)
    key_blocks = triton.cdiv(longest if more.starts is None else more.longest, block)
    bias, *middle = _by_distance(more)
    given = dout, q, k, v, lse, delta, places
    sides = starts, more.starts, _tokens(numbers, more), bias, *more.bucketed, longest
    left = [None if one is None else q.new_empty(heads, m, longest) for one in dpositions]
    rest = (m, least, rescale, float(scale), *middle, *(size for x in given[:4] for size in x.stride()[:2]))
    consts = heads, heads // groups, d, power_of(d), block, causal, more.window, more.cap
    how_run = {"num_warps": warps, "num_stages": _STAGES}
    segments = len(starts) - 1
    parts = None if dbias is None else lse.new_zeros(segments * blocks, heads, 2 * blocks * block)
    _keys_kernel[(segments * groups * key_blocks,)](
        *given, dk, dv, left[1], *sides, key_blocks, *rest, *consts, **how_run
    )
    _queries_kernel[(segments * heads * blocks,)](
        *given, dq, parts, left[0], *sides, blocks, *rest, *consts, **how_run
    )
    if dbias is not None and parts is not None:
        reach, own = longest - 1, dbias.shape[1] // 2
        summed = parts.sum(0)[:, blocks * block - reach : blocks * block + reach + 1]
        dbias[:, own - reach : own + reach + 1] += summed
    for at, (found, one) in enumerate(zip(dpositions, left, strict=True)):
        if found is not None and one is not None and more.buckets is not None:
            bucket_sums(one, more.buckets, starts, scale, found, by_key=at == 1)
    if dsinks is not None and more.sinks is not None:
        dsinks -= (torch.exp(more.sinks.float()[:, None] - lse) * delta).sum(1)
    return dq, dk, dv


# ------------------------------------------------------------------ what is launched


def _tokens(numbers: Tensor | None, more: More) -> Tensor | None:
    """What keys are numbered by for dropout: the queries' own places, or the tokens of another sequence."""
    return numbers if more.starts is None or numbers is None else more.tokens


def _by_distance(more: More) -> tuple[Tensor | None, int, int]:
    """(the bias, dense; numbers of a head; the place of distance 0)."""
    if more.bias is None:
        return None, 0, 0
    return more.bias.contiguous(), more.bias.shape[1], more.bias.shape[1] // 2


def _tile(
    dtype: torch.dtype, d: int, longest: int, biased: bool = False, back: bool = False
) -> tuple[int, int]:
    """(queries, and keys, of a block; warps). float32 has no tensor cores here, and a thread no registers for
    larger blocks; the backward pass has two sums of as many columns as a head, and four tiles of the widest
    fill the shared memory."""
    if dtype == torch.float32:
        return 16 if d > 64 or biased or longest <= 16 else 32, 4
    if d > 256:
        return min(32, power_of(longest)), 4
    block = min(64, power_of(longest))
    return block, block // 16 * (1 + (back and d > 128))
