"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) chunk by chunk.

Of a chunk with the state S before it, rows of K and Q divided by their lengths, b the sum of g since the chunk
began, and D_ij = exp(b_i - b_j) where token i sees j, else 0:

    R = beta (V - exp(b) K S)             what each token would write, did the others of the chunk not write
    N = T R,  T = (1 + A)^-1,  A = beta K K^T D below the diagonal
    Y = exp(b) Q S + P N,  P = Q K^T D
    S <- exp(b_last) S + (exp(b_last - b) K)^T N

T and P need no state: all chunks make them at once (`_pairs_kernel`). Then one program for some value features
of a head goes through the chunks and keeps S in float32 (`_forward_kernel`); the state before each chunk is
stored. The way back is gated_delta_backward.py's. Nothing is added up atomically.

Rows of K and Q are divided by their lengths behind their products, so that these are of the values as they
are, and a key head is read by all heads that share it. q, k and v are features of one tensor.

`members`, heads that share a key head, is no constant of the kernels: of a loop that is known to run once Triton
3.6 makes none, and products behind it reached shared memory that is not theirs (H100, by compute-sanitizer).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.triton.residual import power_of
from petune.models.gated_delta import CHUNK, EPS, MixedHeads

MANY = 64  # heads of all rows
PART = 16  # tokens of a chunk whose system is solved row by row


class ChunksKept(NamedTuple):
    """What the forward pass leaves for the backward pass, of each head: T and P [rows, heads, chunks, CHUNK,
    CHUNK] and states [rows, heads, chunks, key features, value features] in the dtype of the values; b [rows,
    heads, chunks * CHUNK] and what queries and keys are multiplied by [rows, key heads, 2, chunks * CHUNK] in
    float32."""

    solved: Tensor
    scores: Tensor
    states: Tensor
    decay: Tensor
    units: Tensor


def columns_of(heads: MixedHeads, rows: int) -> int:
    """Value features of a program that goes through the chunks: few where there are few rows, as each waits
    for the chunk before."""
    return min(64 if rows * heads.heads >= MANY else 32, power_of(heads.values))


def stages_of(columns: int) -> int:
    """Chunks of which it reads: with one, two programs fit on a multiprocessor beside each other. Of 32 features
    and fewer kernels of one stage reached shared memory that is not theirs (H100, Triton 3.6)."""
    return 1 if columns == 64 else 2


def sizes_of(heads: MixedHeads, samples: Tensor | None) -> dict[str, Any]:
    """What all kernels are compiled for."""
    return {
        "PACKED": samples is not None,
        "KEY_HEADS": heads.key_heads,
        "HEADS": heads.heads,
        "K": heads.keys,
        "V": heads.values,
        "C": CHUNK,
        "BK": power_of(heads.keys),
    }


def numbers_of(samples: Tensor | None, x: Tensor) -> tuple[Tensor, int]:
    """The samples of tokens, and how far those of the next row are; x, which is not read, for none."""
    if samples is None:
        return x, 0
    samples = samples.contiguous()
    return samples, samples.shape[1] if samples.shape[0] > 1 else 0


def forward(
    x: Tensor, g: Tensor, beta: Tensor, samples: Tensor | None, heads: MixedHeads
) -> tuple[Tensor, ChunksKept]:
    """y [rows, tokens, heads, value features] in the dtype of x, and what is kept. x [rows, tokens, features]:
    q, k and v, in it side by side; g (float32) and beta [rows, tokens, heads]; all dense."""
    rows, tokens, _ = x.shape
    chunks, sizes = triton.cdiv(tokens, CHUNK), sizes_of(heads, samples)
    y = x.new_empty(rows, tokens, heads.heads, heads.values)
    of_head, padded = (rows, heads.heads, chunks), chunks * CHUNK
    kept = ChunksKept(
        x.new_empty(*of_head, CHUNK, CHUNK),
        x.new_empty(*of_head, CHUNK, CHUNK),
        x.new_empty(*of_head, heads.keys, heads.values),
        x.new_empty(rows, heads.heads, padded, dtype=torch.float32),
        x.new_empty(rows, heads.key_heads, 2, padded, dtype=torch.float32),
    )
    if not y.numel():
        return y, kept
    told, columns = numbers_of(samples, x), columns_of(heads, rows)
    _pairs_kernel[(chunks, rows * heads.key_heads)](
        *(x, g, beta, *told, kept.solved, kept.scores, kept.decay, kept.units, tokens),
        *(heads.heads // heads.key_heads, heads.keys**-0.5, EPS),
        **sizes, PART=PART, num_warps=4, num_stages=1,
    )  # fmt: skip
    _forward_kernel[(triton.cdiv(heads.values, columns), rows * heads.heads)](
        *(x, beta, *told, kept.solved, kept.scores, kept.decay, kept.units, kept.states, y, tokens),
        **sizes, BV=columns, num_warps=4, num_stages=stages_of(columns),
    )  # fmt: skip
    return y, kept


# ------------------------------------------------------------------ what a chunk is read by


@triton.jit
def chunk_meets(samples, decay, chunk, tokens, PACKED: tl.constexpr, C: tl.constexpr):
    """exp(b) where the state before the chunk is of the token's sample, exp(b_last - b) where that behind it
    is, and what is left of the state. samples: of the row; decay: of the head."""
    at = chunk * C + tl.arange(0, C)
    total, last = tl.load(decay + at), tl.load(decay + chunk * C + C - 1)
    since, until, left = tl.exp(total), tl.exp(last - total), tl.exp(last)
    if PACKED:
        number = tl.load(samples + at, mask=at < tokens, other=-1)
        before = tl.load(samples + chunk * C - 1, mask=chunk > 0, other=-1)
        ends = tl.load(samples + chunk * C + C - 1, mask=chunk * C + C - 1 < tokens, other=-1)
        since = tl.where(number == before, since, 0.0)
        until = tl.where(number == ends, until, 0.0)
        left = tl.where(ends == before, left, 0.0)
    return since, until, left


@triton.jit
def seen_in(samples, chunk, tokens, PACKED: tl.constexpr, C: tl.constexpr):
    """Which token of a chunk sees which, [C, C]."""
    place = tl.arange(0, C)
    seen = place[:, None] >= place[None, :]
    if PACKED:
        at = chunk * C + place
        number = tl.load(samples + at, mask=at < tokens, other=-1)
        seen = seen & (number[:, None] == number[None, :])
    return seen


@triton.jit
def features_of(start, at, stride, first, tokens, FEATURES: tl.constexpr, B: tl.constexpr):
    """Features `first` and on of tokens, zeros behind the last: [C, B]."""
    column = first + tl.arange(0, B)
    inside = (at < tokens)[:, None] & (column < FEATURES)[None, :]
    return tl.load(start + at[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def square_of(start, chunk, C: tl.constexpr):
    """[C, C] of a chunk, by its number of all."""
    place = tl.arange(0, C)
    return tl.load(start + chunk * C * C + place[:, None] * C + place[None, :])


# ------------------------------------------------------------------ T and P


@triton.jit
def _inverse(system, C: tl.constexpr, PART: tl.constexpr):
    """(1 + system)^-1 of what is 0 on and above its diagonal. Parts on the diagonal are solved row by row, all
    at once; with them the rest M is block by block below it, and (1 + M)^-1 = (1 - M) (1 + M^2) of four."""
    tl.static_assert(C == 4 * PART)
    block, row = tl.arange(0, C // PART), tl.arange(0, PART)
    own = block[:, None, None, None] == block[None, None, :, None]
    parted = tl.reshape(system, (C // PART, PART, C // PART, PART))
    parts = tl.sum(tl.where(own, parted, 0.0), 2)
    alike = (row[:, None] == row[None, :])[None, :, :]
    solved = tl.where(alike, parts + 1, 0.0)  # which is 0 on its diagonal
    for one in range(1, PART):
        here = (row == one)[None, :, None]
        taken = tl.sum(tl.where(here, parts, 0.0), 1)
        found = tl.sum(taken[:, :, None] * solved, 1)
        solved = tl.where(here, solved - found[:, None, :], solved)
    apart = tl.where(own, solved[:, :, None, :], tl.zeros_like(parted))
    diagonal = tl.reshape(apart, (C, C))
    place = tl.arange(0, C) // PART
    below = tl.where(place[:, None] > place[None, :], system, 0.0)
    rest = tl.dot(diagonal, below)
    twice = tl.dot(rest, rest)
    found = tl.dot(twice, diagonal, diagonal)
    return found - tl.dot(rest, found)


@triton.jit(do_not_specialize=["tokens", "members"])
def _pairs_kernel(
    x, g, beta, samples, samples_row, solved, scores, decay, units, tokens, members, scale, eps,
    PACKED: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    chunk, row, key_head = tl.program_id(0), tl.program_id(1) // KEY_HEADS, tl.program_id(1) % KEY_HEADS
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    WIDTH: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    chunks, long_row = tl.cdiv(tokens, C), row.to(tl.int64)
    at, place = chunk * C + tl.arange(0, C), tl.arange(0, C)
    own = x + long_row * tokens * WIDTH + key_head * K
    q = features_of(own, at, WIDTH, 0, tokens, K, BK)
    k = features_of(own + KEY_HEADS * K, at, WIDTH, 0, tokens, K, BK)
    q_wide, k_wide = q.to(tl.float32), k.to(tl.float32)
    q_unit = scale * tl.rsqrt(tl.sum(q_wide * q_wide, 1) + eps)
    k_unit = tl.rsqrt(tl.sum(k_wide * k_wide, 1) + eps)
    unit = units + tl.program_id(1).to(tl.int64) * 2 * chunks * C + at
    tl.store(unit, q_unit)
    tl.store(unit + chunks * C, k_unit)
    asked = tl.dot(q, tl.trans(k)) * q_unit[:, None] * k_unit[None, :]
    alike = tl.dot(k, tl.trans(k)) * k_unit[:, None] * k_unit[None, :]
    seen = seen_in(samples + long_row * samples_row, chunk, tokens, PACKED, C)
    below = place[:, None] > place[None, :]
    for member in range(members):
        head = key_head * GROUP + member
        gate = (long_row * tokens + at) * HEADS + head
        total = tl.cumsum(tl.load(g + gate, mask=at < tokens, other=0.0).to(tl.float32), 0)
        strength = tl.load(beta + gate, mask=at < tokens, other=0.0).to(tl.float32)
        between = tl.where(seen, tl.exp(total[:, None] - total[None, :]), 0.0)
        found = _inverse(tl.where(below, alike * between * strength[:, None], 0.0), C, PART)
        own_chunk = (long_row * HEADS + head) * chunks + chunk
        tl.store(decay + own_chunk * C + place, total)
        square = own_chunk * C * C + place[:, None] * C + place[None, :]
        tl.store(solved + square, found.to(solved.dtype.element_ty))
        tl.store(scores + square, (asked * between).to(scores.dtype.element_ty))


# ------------------------------------------------------------------ through the chunks


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    x, beta, samples, samples_row, solved, scores, decay, units, states, y, tokens,
    PACKED: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    first, row, head = tl.program_id(0) * BV, tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    WIDTH: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    DTYPE: tl.constexpr = x.dtype.element_ty
    chunks, long_row, long_head = tl.cdiv(tokens, C), row.to(tl.int64), tl.program_id(1).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    own = x + long_row * tokens * WIDTH
    samples += long_row * samples_row
    decay += long_head * chunks * C
    units += (long_row * KEY_HEADS + key_head) * 2 * chunks * C
    key, column = tl.arange(0, BK), first + tl.arange(0, BV)
    inside = (key < K)[:, None] & (column < V)[None, :]
    held_at = key[:, None] * V + column[None, :]
    state = tl.zeros((BK, BV), tl.float32)
    for chunk in range(chunks):
        at = chunk * C + tl.arange(0, C)
        q = features_of(own + key_head * K, at, WIDTH, 0, tokens, K, BK)
        k = features_of(own + (KEY_HEADS + key_head) * K, at, WIDTH, 0, tokens, K, BK)
        v = features_of(own + 2 * KEY_HEADS * K + head * V, at, WIDTH, first, tokens, V, BV).to(tl.float32)
        t, p = (
            square_of(solved, long_head * chunks + chunk, C),
            square_of(scores, long_head * chunks + chunk, C),
        )
        q_unit, k_unit = tl.load(units + at), tl.load(units + chunks * C + at)
        gate = (long_row * tokens + at) * HEADS + head
        strength = tl.load(beta + gate, mask=at < tokens, other=0.0).to(tl.float32)
        since, until, left = chunk_meets(samples, decay, chunk, tokens, PACKED, C)
        held = state.to(DTYPE)
        tl.store(states + (long_head * chunks + chunk) * K * V + held_at, held, mask=inside)
        read = tl.dot(k, held) * (since * k_unit)[:, None]
        written = tl.dot(t, (strength[:, None] * (v - read)).to(DTYPE))
        found = tl.dot(q, held) * (since * q_unit)[:, None]
        found = tl.dot(p, written.to(DTYPE), found)
        stored = (written * (until * k_unit)[:, None]).to(DTYPE)
        state = tl.dot(tl.trans(k), stored, state * left)
        live = (at < tokens)[:, None] & (column < V)[None, :]
        tl.store(y + gate[:, None] * V + column[None, :], found.to(DTYPE), mask=live)
