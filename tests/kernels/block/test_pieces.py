"""Attention of two pieces of each row against that of whole rows, in float64: by torch, and as libraries'
kernels compute it, of which cuDNN's know no queries that are the last of their keys' tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels.block import attention as attending
from petune.kernels.block import pieces
from petune.kernels.block.attention import How
from petune.kernels.block.part import AttentionPart
from petune.models.exchange import fold, rows_of, unfold
from petune.parallel.sequence.exchange import GatherExchange
from petune.rng.dropout import Drop

ROWS, HEADS, KV_HEADS, WIDTH, SIZES = 2, 4, 2, 8, (5, 8, 3)


def scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """[batch, heads, q, k], -inf where a query that is one of the last does not look."""
    found = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
    seen = torch.ones(found.shape[-2:]).tril(k.shape[2] - q.shape[2]).bool() | (not causal)
    return found.masked_fill(~seen, -torch.inf)


def ahead(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(output, log of the sum of exponentials) by the formula; [batch, heads, length, width] each."""
    found = scores(q, k, causal, scale)
    return found.softmax(-1) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1), found.logsumexp(-1)


def back(given: tuple[Tensor, ...], lse: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """dq, dk, dv by the formula, of what all keys gave."""
    dout, q, k, v, out = given
    group = q.shape[1] // k.shape[1]
    p = torch.exp(scores(q, k, causal, scale) - lse[..., None])
    ds = p * (dout @ v.repeat_interleave(group, 1).transpose(-1, -2) - (dout * out).sum(-1, keepdim=True))
    dk, dv = ds.transpose(-1, -2) @ q * scale, p.transpose(-1, -2) @ dout
    shared = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return ds @ k.repeat_interleave(group, 1) * scale, *shared


def kernels(called: list[str]) -> Any:
    """Stand-ins for cuDNN's and flash's. cuDNN takes causal queries to be the first of the keys' tokens."""

    def cudnn(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
        causal = rest[3]
        assert not causal or q.shape[2] == k.shape[2]
        called.append("cudnn")
        out, lse = ahead(q, k, v, causal, scale)
        return out, lse[..., None], None, None, None, None, torch.ones(1), torch.ones(1), None

    def cudnn_back(*given: Any, scale: float) -> tuple[Tensor, ...]:
        lse, lengths, causal = given[5], given[11:13], given[14]
        assert lengths == (given[1].shape[2], given[2].shape[2])
        return back(given[:5], lse[..., 0], causal, scale)

    def flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
        assert rest[2:4] == (q.shape[1], k.shape[1])
        called.append("flash")
        out, lse = ahead(*(x.transpose(1, 2) for x in (q, k, v)), rest[5], scale)
        return out.transpose(1, 2).contiguous(), lse, torch.ones(1), torch.ones(1), None

    def flash_back(*given: Any, scale: float) -> tuple[Tensor, ...]:
        found = back(tuple(x.transpose(1, 2) for x in given[:5]), given[5], given[11], scale)
        return tuple(x.transpose(1, 2).contiguous() for x in found)

    return SimpleNamespace(
        _scaled_dot_product_cudnn_attention=cudnn,
        _scaled_dot_product_cudnn_attention_backward=cudnn_back,
        _flash_attention_forward=flash,
        _flash_attention_backward=flash_back,
    )


def in_rows(x: Tensor) -> Tensor:
    return x.view(ROWS, -1, *x.shape[1:])


@pytest.mark.parametrize(
    ("form", "worth", "drops", "said"),
    [
        ("sdpa", 0, False, [[], [], []]),
        ("sdpa", 0, True, [[], [], []]),
        ("cudnn", 0, False, [["cudnn"] * 3, ["cudnn"] * 4, ["cudnn"] * 2 + ["flash"]]),
        ("cudnn", 9, False, [["cudnn"] * 3, ["flash", "cudnn", "cudnn"], ["flash"] * 2]),
        ("flash", 0, False, [["flash"] * 2] * 3),
    ],
)
def test_two_pieces_of_every_rank_attend_as_whole_rows_do(
    form: Any, worth: int, drops: bool, said: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(SIZES)
    draw = torch.Generator().manual_seed(3)
    # views of wider matrices, as those of q | k | v are
    q, k, v, dout = (
        torch.randn(ROWS * whole, heads, 2 * WIDTH, generator=draw, dtype=torch.float64)[..., :WIDTH]
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    numbers = torch.arange(ROWS)[:, None] * 2**32 + torch.arange(whole)
    how = How(True, 0.3, ROWS, drop=Drop(numbers.flatten(), 5, 0.4, 0) if drops else None)
    out, kept = attending.forward(q, k, v, how)
    dq, dk, dv = attending.backward(dout, q, k, v, out, kept, how)
    sums, parts = [torch.zeros_like(in_rows(x)) for x in (dk, dv)], []
    for index in range(len(SIZES)):
        rows, calls = rows_of(SIZES, index, folded=True), list[str]()
        part = AttentionPart(GatherExchange(None, index, SIZES), rows, seen=(0, rows.end))
        first = sum(SIZES[:index])
        own = slice(first, first + SIZES[index])
        q_own, dout_own, drawn = (
            fold(x, SIZES)[:, own].flatten(0, 1) for x in (in_rows(q), in_rows(dout), numbers)
        )
        one = replace(how, backend=form, part=part)
        if how.drop is not None:
            one = replace(one, drop=how.drop._replace(numbers=drawn))
        keys = [in_rows(x)[:, : rows.end].flatten(0, 1) for x in (k, v)]
        with monkeypatch.context() as patch:
            patch.setattr(pieces, "WORTH", worth)
            if form != "sdpa":
                patch.setattr(attending, "aten", kernels(calls))
            found, rest = pieces.forward(q_own, *keys, one)
            grads = pieces.backward(dout_own, q_own, *keys, found, rest, one)
        assert calls == said[index]
        parts.append((in_rows(found), in_rows(grads[0])))
        for total, grad in zip(sums, grads[1:], strict=True):
            total[:, : rows.end] += in_rows(grad)
    together = [unfold(torch.cat(each, 1), SIZES) for each in zip(*parts, strict=True)]
    for own, plain in zip((*together, *sums), (out, dq, dk, dv), strict=True):
        torch.testing.assert_close(own, in_rows(plain), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [SIZES, (4, 4, 4, 4), (2, 7)], ids=str)
def test_pieces_are_folded_and_unfolded_and_see_as_many_keys_a_query(sizes: tuple[int, ...]) -> None:
    x = torch.arange(sum(sizes))[None, :, None]
    folded = fold(x, sizes)
    assert torch.equal(unfold(folded, sizes), x)
    for index, own in enumerate(folded.split(sizes, 1)):
        rows = rows_of(sizes, index, folded=True)
        assert own.flatten().tolist() == [token for piece in rows.pieces for token in range(*piece)]
        assert torch.equal(unfold(folded, sizes, index), x[:, : rows.end])
        seen = fold(x[:, : rows.end] + 1, sizes)
        assert torch.equal(seen, (folded + 1) * (folded < rows.end))  # zeros where nothing is seen
        if not any(size % 2 for size in sizes):
            assert float(own.double().mean()) == (sum(sizes) - 1) / 2
