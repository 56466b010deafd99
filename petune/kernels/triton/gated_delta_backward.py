"""The gated delta rule's way back: see gated_delta.py.

dN = P^T dY + exp(b_last - b) K dS and dR = T^T dN go through the chunks from the last on (`_states_kernel`), as
the states do on the way ahead. All else are sums over one chunk: of N, which is computed again, dA = -dR N^T
below the diagonal, dP and what gates get (`_values_kernel`), then of queries and keys (`_keys_kernel`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.triton.gated_delta import (
    ChunksKept,
    chunk_meets,
    columns_of,
    features_of,
    numbers_of,
    seen_in,
    sizes_of,
    square_of,
    stages_of,
)
from petune.kernels.triton.residual import power_of
from petune.models.gated_delta import CHUNK, MixedHeads

BLOCK = 32  # value features at a time of a program for one chunk


def backward(
    dy: Tensor, x: Tensor, g: Tensor, beta: Tensor, samples: Tensor | None, heads: MixedHeads, kept: ChunksKept
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x in its dtype, of g and beta in float32."""
    rows, tokens, _ = x.shape
    dx, (dg, dbeta) = torch.empty_like(x), (torch.empty_like(g, dtype=torch.float32) for _ in range(2))
    if not dy.numel():
        return dx, dg.zero_(), dbeta.zero_()
    dy, told, sizes = dy.contiguous(), numbers_of(samples, x), sizes_of(heads, samples)
    dstates, dr, columns = torch.empty_like(kept.states), torch.empty_like(dy), columns_of(heads, rows)
    _states_kernel[(triton.cdiv(heads.values, columns), rows * heads.heads)](
        *(dy, x, beta, *told, kept.solved, kept.scores, kept.decay, kept.units, dstates, dr, tokens),
        **sizes, BV=columns, num_warps=4, num_stages=stages_of(columns),
    )  # fmt: skip
    written, (dasked, dalike) = torch.empty_like(dy), (torch.empty_like(kept.solved) for _ in range(2))
    chunks, sizes = triton.cdiv(tokens, CHUNK), sizes | {"BV": min(BLOCK, power_of(heads.values))}
    _values_kernel[(chunks, rows * heads.heads)](
        *(dy, dr, x, beta, *told, kept.solved, kept.decay, kept.units, kept.states, dstates),
        *(dx, dg, dbeta, written, dasked, dalike, tokens),
        **sizes, num_warps=4, num_stages=1,
    )  # fmt: skip
    _keys_kernel[(chunks, rows * heads.key_heads)](
        *(dy, dr, x, beta, *told, kept.decay, kept.units, kept.states, dstates, written, dasked, dalike),
        *(dx, tokens, heads.heads // heads.key_heads, heads.keys**0.5),
        **sizes, num_warps=4, num_stages=1,
    )  # fmt: skip
    return dx, dg, dbeta


# ------------------------------------------------------------------ back through the chunks


@triton.jit(do_not_specialize=["tokens"])
def _states_kernel(
    dy, x, beta, samples, samples_row, solved, scores, decay, units, dstates, dr, tokens,
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
    dstate = tl.zeros((BK, BV), tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        at = chunk * C + tl.arange(0, C)
        q = features_of(own + key_head * K, at, WIDTH, 0, tokens, K, BK)
        k = features_of(own + (KEY_HEADS + key_head) * K, at, WIDTH, 0, tokens, K, BK)
        t, p = (
            square_of(solved, long_head * chunks + chunk, C),
            square_of(scores, long_head * chunks + chunk, C),
        )
        gate = (long_row * tokens + at) * HEADS + head
        live = (at < tokens)[:, None] & (column < V)[None, :]
        grad = tl.load(dy + gate[:, None] * V + column[None, :], mask=live, other=0.0)
        q_unit, k_unit = tl.load(units + at), tl.load(units + chunks * C + at)
        strength = tl.load(beta + gate, mask=at < tokens, other=0.0).to(tl.float32)
        since, until, left = chunk_meets(samples, decay, chunk, tokens, PACKED, C)
        held = dstate.to(DTYPE)
        tl.store(dstates + (long_head * chunks + chunk) * K * V + held_at, held, mask=inside)
        dwritten = tl.dot(k, held) * (until * k_unit)[:, None]
        dwritten = tl.dot(tl.trans(p), grad, dwritten)
        given = tl.dot(tl.trans(t), dwritten.to(DTYPE))
        tl.store(dr + gate[:, None] * V + column[None, :], given.to(DTYPE), mask=live)
        asked = (grad.to(tl.float32) * (since * q_unit)[:, None]).to(DTYPE)
        dstate = tl.dot(tl.trans(q), asked, dstate * left)
        asked = (given * (-strength * since * k_unit)[:, None]).to(DTYPE)
        dstate = tl.dot(tl.trans(k), asked, dstate)


# ------------------------------------------------------------------ gradients of a chunk's inputs


@triton.jit(do_not_specialize=["tokens"])
def _values_kernel(
    dy, dr, x, beta, samples, samples_row, solved, decay, units, states, dstates, dx, dg, dbeta, written, dasked,
    dalike, tokens,
    PACKED: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    chunk, row, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    WIDTH: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    DTYPE: tl.constexpr = x.dtype.element_ty
    key_head = head // (HEADS // KEY_HEADS)
    chunks, long_row, long_head = tl.cdiv(tokens, C), row.to(tl.int64), tl.program_id(1).to(tl.int64)
    place, key = tl.arange(0, C), tl.arange(0, BK)
    at, own_chunk = chunk * C + place, long_head * chunks + chunk
    own, into = x + long_row * tokens * WIDTH, dx + long_row * tokens * WIDTH
    samples += long_row * samples_row
    units += (long_row * KEY_HEADS + key_head) * 2 * chunks * C
    q = features_of(own + key_head * K, at, WIDTH, 0, tokens, K, BK)
    k = features_of(own + (KEY_HEADS + key_head) * K, at, WIDTH, 0, tokens, K, BK)
    q_unit, k_unit = tl.load(units + at), tl.load(units + chunks * C + at)
    gate = (long_row * tokens + at) * HEADS + head
    strength = tl.load(beta + gate, mask=at < tokens, other=0.0).to(tl.float32)
    since, until, left = chunk_meets(samples, decay + long_head * chunks * C, chunk, tokens, PACKED, C)
    t = square_of(solved, own_chunk, C)
    dpairs, dsystem = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    dstrength, dtotal = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    duntil, dleft = tl.zeros((C,), tl.float32), tl.zeros((BK,), tl.float32)
    for first in range(0, V, BV):
        column = first + tl.arange(0, BV)
        inside = (key < K)[:, None] & (column < V)[None, :]
        held = own_chunk * K * V + key[:, None] * V + column[None, :]
        state = tl.load(states + held, mask=inside, other=0.0)
        dstate = tl.load(dstates + held, mask=inside, other=0.0)
        dleft += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        v = features_of(own + 2 * KEY_HEADS * K + head * V, at, WIDTH, first, tokens, V, BV).to(tl.float32)
        live = (at < tokens)[:, None] & (column < V)[None, :]
        values = gate[:, None] * V + column[None, :]
        grad = tl.load(dy + values, mask=live, other=0.0)
        given = tl.load(dr + values, mask=live, other=0.0)
        given_wide = given.to(tl.float32)
        read = tl.dot(k, state) * (since * k_unit)[:, None]
        dstrength += tl.sum(given_wide * (v - read), 1)
        new = tl.dot(t, (strength[:, None] * (v - read)).to(DTYPE))
        asked = tl.dot(q, state) * (since * q_unit)[:, None]
        dtotal += tl.sum(grad.to(tl.float32) * asked - strength[:, None] * given_wide * read, 1)
        stored = tl.dot(k, dstate) * (until * k_unit)[:, None]
        duntil += tl.sum(new * stored, 1)
        narrow = new.to(DTYPE)
        dpairs = tl.dot(grad, tl.trans(narrow), dpairs)
        dsystem = tl.dot(given, tl.trans(narrow), dsystem)
        tl.store(written + values, narrow, mask=live)
        dv = into + 2 * KEY_HEADS * K + head * V + at[:, None].to(tl.int64) * WIDTH + column[None, :]
        tl.store(dv, (given_wide * strength[:, None]).to(DTYPE), mask=live)
    total = tl.load(decay + long_head * chunks * C + at)
    between = tl.exp(total[:, None] - total[None, :])
    between = tl.where(seen_in(samples, chunk, tokens, PACKED, C), between, 0.0)
    square = own_chunk * C * C + place[:, None] * C + place[None, :]
    # behind the lengths of both tokens
    dpairs *= between * q_unit[:, None] * k_unit[None, :]
    tl.store(dasked + square, dpairs.to(DTYPE))
    dbetween = dpairs * tl.dot(q, tl.trans(k))
    dtotal += tl.sum(dbetween, 1) - tl.sum(dbetween, 0)
    dsystem *= -between * k_unit[:, None] * k_unit[None, :]
    dsystem = tl.where(place[:, None] > place[None, :], dsystem, 0.0)
    dbetween = dsystem * tl.dot(k, tl.trans(k))
    dstrength += tl.sum(dbetween, 1)
    dbetween *= strength[:, None]
    dtotal += tl.sum(dbetween, 1) - tl.sum(dbetween, 0)
    dsystem *= strength[:, None]
    tl.store(dalike + square, (dsystem + tl.trans(dsystem)).to(DTYPE))
    dtotal += tl.where(place == C - 1, tl.sum(duntil, 0) + tl.sum(dleft, 0) * left, 0.0) - duntil
    # the sum of what is behind: of all less that of what is ahead
    behind = tl.sum(dtotal, 0) - tl.cumsum(dtotal, 0) + dtotal
    tl.store(dg + gate, behind, mask=at < tokens)
    tl.store(dbeta + gate, dstrength, mask=at < tokens)


@triton.jit(do_not_specialize=["tokens", "members"])
def _keys_kernel(
    dy, dr, x, beta, samples, samples_row, decay, units, states, dstates, written, dasked, dalike, dx, tokens,
    members, root,
    PACKED: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    chunk, row, key_head = tl.program_id(0), tl.program_id(1) // KEY_HEADS, tl.program_id(1) % KEY_HEADS
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    WIDTH: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    DTYPE: tl.constexpr = x.dtype.element_ty
    chunks, long_row = tl.cdiv(tokens, C), row.to(tl.int64)
    place, key = tl.arange(0, C), tl.arange(0, BK)
    at = chunk * C + place
    own, into = x + long_row * tokens * WIDTH, dx + long_row * tokens * WIDTH
    samples += long_row * samples_row
    unit = units + tl.program_id(1).to(tl.int64) * 2 * chunks * C + at
    q_unit, k_unit = tl.load(unit), tl.load(unit + chunks * C)
    dq, dk = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    for member in range(members):
        head = key_head * GROUP + member
        long_head = long_row * HEADS + head
        own_chunk = long_head * chunks + chunk
        gate = (long_row * tokens + at) * HEADS + head
        strength = tl.load(beta + gate, mask=at < tokens, other=0.0).to(tl.float32)
        since, until, _ = chunk_meets(samples, decay + long_head * chunks * C, chunk, tokens, PACKED, C)
        for first in range(0, V, BV):
            column = first + tl.arange(0, BV)
            inside = (key < K)[:, None] & (column < V)[None, :]
            held = own_chunk * K * V + key[:, None] * V + column[None, :]
            state = tl.load(states + held, mask=inside, other=0.0)
            live = (at < tokens)[:, None] & (column < V)[None, :]
            values = gate[:, None] * V + column[None, :]
            scaled = tl.load(dy + values, mask=live, other=0.0).to(tl.float32) * (since * q_unit)[:, None]
            dq = tl.dot(scaled.to(DTYPE), tl.trans(state), dq)
            scaled = tl.load(dr + values, mask=live, other=0.0).to(tl.float32)
            scaled *= (-strength * since * k_unit)[:, None]
            dk = tl.dot(scaled.to(DTYPE), tl.trans(state), dk)
            dstate = tl.load(dstates + held, mask=inside, other=0.0)
            scaled = (
                tl.load(written + values, mask=live, other=0.0).to(tl.float32) * (until * k_unit)[:, None]
            )
            dk = tl.dot(scaled.to(DTYPE), tl.trans(dstate), dk)
        k = features_of(own + (KEY_HEADS + key_head) * K, at, WIDTH, 0, tokens, K, BK)
        dpairs = square_of(dasked, own_chunk, C)
        dq = tl.dot(dpairs, k, dq)
        dk = tl.dot(square_of(dalike, own_chunk, C), k, dk)
        q = features_of(own + key_head * K, at, WIDTH, 0, tokens, K, BK)
        dk = tl.dot(tl.trans(dpairs), q, dk)
    # behind the lengths, by which all of it is divided already
    wide = features_of(own + key_head * K, at, WIDTH, 0, tokens, K, BK).to(tl.float32)
    along = tl.sum(wide * dq, 1) * root * root * q_unit * q_unit
    live = (at < tokens)[:, None] & (key < K)[None, :]
    into += at[:, None].to(tl.int64) * WIDTH + key_head * K + key[None, :]
    tl.store(into, (dq - wide * along[:, None]).to(DTYPE), mask=live)
    wide = features_of(own + (KEY_HEADS + key_head) * K, at, WIDTH, 0, tokens, K, BK).to(tl.float32)
    along = tl.sum(wide * dk, 1) * k_unit * k_unit
    tl.store(into + KEY_HEADS * K, (dk - wide * along[:, None]).to(DTYPE), mask=live)
