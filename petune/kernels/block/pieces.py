"""Causal attention of queries that are two pieces of each row, over the keys up to the last of them: as
petune.kernels.block.attention, of which it is made.

        out = softmax(scale q k^T) v        q [m, heads, d], two pieces [a, b) and [c, e) of rows,
                                            k and v [n, kv_heads, d], the tokens [0, e) of rows

A piece sees all keys before it, and its own up to each query: its queries are the last few of the keys'
tokens. cuDNN knows no such queries. It is given the keys before and those of the piece one after the other,
and what both give is put together by the logarithms l of their sums of exponentials (Milakov and Gimelshein
2018, arXiv:1805.02867):

        out = s out' + (1 - s) out'',   s = sigmoid(l' - l''),   l = log(exp l' + exp l'')

Given out and l, the backward pass of each is its part of the whole's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from petune.kernels.block import attention as attending
from petune.kernels.block.attention import AttentionPass, How, KeptTensors, QkvGradients
from petune.rng.context import TokenSpan

WORTH = 512  # keys before a piece, from which two calls of cuDNN take less time than one of flash (H100)


def forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, KeptTensors]:
    """(out [m, heads, d], dense; what `backward` needs beside it, of one piece after the other)."""
    outs: list[Tensor] = []
    kept: list[Any] = []
    for own, (first, end), one in _pieces(how):
        keys, values = (_rows(x, how, (0, end)) for x in (k, v))
        out, rest = _ahead(_rows(q, how, own), keys, values, one, first)
        outs.append(attending.in_rows(out, how.batch))
        kept += rest
    return torch.cat(outs, 1).flatten(0, 1), tuple(kept)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kept: KeptTensors,
    how: How,
    dbias: Tensor | None = None,
    dsinks: Tensor | None = None,
) -> QkvGradients:
    """As attention's. Stacks with a bias have no pieces."""
    assert dbias is None, "a bias is one of tokens in a row"
    found, each = [], len(kept) // 2
    for at, (own, (first, end), one) in enumerate(_pieces(how)):
        dout_own, q_own, out_own = (_rows(x, how, own) for x in (dout, q, out))
        keys, values = (_rows(x, how, (0, end)) for x in (k, v))
        rest = kept[at * each : (at + 1) * each]
        done = AttentionPass(q_own, keys, values, out_own, rest, one)
        grads = _back(dout_own, done, first, dsinks)
        found.append([attending.in_rows(grad, how.batch) for grad in grads])
    (dq_front, *front), (dq_back, *back) = found  # the second piece sees all keys
    for total, part in zip(back, front, strict=True):
        total[:, : part.shape[1]] += part
    dq, dk, dv = (x.flatten(0, 1) for x in (torch.cat([dq_front, dq_back], 1), *back))
    return dq, dk, dv


def _pieces(how: How) -> Iterator[tuple[TokenSpan, TokenSpan, How]]:
    """Of each piece: which of own tokens it is, which of all, and how it attends."""
    assert how.part is not None and not how.ragged and how.bias is None and how.mask is None
    start = 0
    for first, end in how.part.rows.pieces:
        own = start, start + end - first
        backend = how.backend
        if backend == "cudnn" and (0 < first < WORTH or end - first == 1):
            backend = "flash"
        one = replace(how, backend=backend, part=None)
        if how.drop is not None:
            one = replace(one, drop=how.drop._replace(numbers=_rows(how.drop.numbers, how, own)))
        yield own, (first, end), one
        start = own[1]


def _rows(x: Tensor, how: How, part: TokenSpan) -> Tensor:
    """Some tokens of each row of x [m, ...]: views [batch, length, ...] for kernels that take them so, else
    [batch * length, ...]."""
    found = x.view(how.batch, -1, *x.shape[1:])[:, slice(*part)]
    return found if how.backend in ("cudnn", "flash") else found.flatten(0, 1)


def _ahead(q: Tensor, k: Tensor, v: Tensor, how: How, first: int) -> tuple[Tensor, KeptTensors]:
    """`forward` of one piece, `first` keys before it."""
    if how.backend != "cudnn" or not first:
        return attending.forward(q, k, v, how)
    before, (lse, *_) = attending.forward(q, k[:, :first], v[:, :first], replace(how, causal=False))
    within, (own_lse, *state) = attending.forward(q, k[:, first:], v[:, first:], how)
    share = torch.sigmoid(lse - own_lse).view(len(q), q.shape[2], -1).transpose(1, 2)
    out = torch.lerp(within, before, share.reshape(*within.shape[:2], 1).to(within.dtype))
    return out, (torch.logaddexp(lse, own_lse), *state)


def _back(dout: Tensor, done: AttentionPass, first: int, dsinks: Tensor | None) -> QkvGradients:
    """`backward` of one piece."""
    q, k, v, out, kept, how = done
    if how.backend != "cudnn" or not first:
        return attending.backward(dout, *done, None, dsinks)
    (k, own_k), (v, own_v) = (x.tensor_split([first], 1) for x in (k, v))
    dq, dk, dv = attending.backward(dout, q, k, v, out, kept, replace(how, causal=False))
    own_dq, own_dk, own_dv = attending.backward(dout, q, own_k, own_v, out, kept, how)
    dk, dv = (
        torch.cat([attending.in_rows(x, how.batch) for x in pair], 1) for pair in ((dk, own_dk), (dv, own_dv))
    )
    return dq.add_(own_dq), dk, dv
