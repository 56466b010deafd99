"""Attention with scores of positions in segments: both forms beside transformers' formula on padded rows, in
float64, with dropout by index and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from petune.kernels.block.scored import ScoredAttention, ScoredInputs
from petune.kernels.block.varlen import Segments, from_mask
from petune.kernels.fuse import fused_blocks
from petune.models.disentangled import by_distance
from petune.rng.context import Running, bound_to
from petune.rng.dropout import drop_attention, step_key
from tests.kernels.own_blocks import fused, tuned
from tests.methods.zoo import batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, WIDTH, SPAN, SCALE = 2, 24, 8, 0.2
NEAR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-5}  # of the largest element
LENGTHS = (37, 1, 20)
KINDS = {"both": (True, True), "c2p": (False, True), "p2c": (True, False), "none": (False, False)}


def here() -> Running:
    return Running(key=step_key(0, 2), site="encoder.1", rows=torch.tensor([5, 0, 7], device=DEVICE))


def far_of(tokens: int) -> Tensor:
    """The column for each query and key: near distances have one each, others share."""
    x = torch.empty(1, tokens, 1)
    found = build_relative_position(x, x, bucket_size=SPAN, max_position=32)
    return (found[0] + SPAN).clamp(0, 2 * SPAN - 1).to(DEVICE)


def buckets_of(tokens: int) -> Tensor:
    """The same for each distance."""
    return by_distance(far_of(tokens)).to(torch.int32)


def segments(lengths: tuple[int, ...] = LENGTHS) -> Segments:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    found = from_mask(mask)
    assert isinstance(found, Segments)
    return found.to(torch.device(DEVICE))


def given(kept: int, dtype: torch.dtype, kinds: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
    """q, k, v, q_pos, k_pos."""
    generator = torch.Generator().manual_seed(0)
    sizes = (kept, kept, kept, 2 * SPAN, 2 * SPAN)
    made = [torch.randn(size, HEADS, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]
    made = [one.to(DEVICE, dtype) for one in made]
    return *made[:3], *(one if there else None for one, there in zip(made[3:], kinds, strict=True))


def expected(inputs: ScoredInputs, own: Segments, p: float) -> Tensor:
    """By transformers' formula on rows with padding."""
    rows, tokens = own.shape
    q, k, v = (
        x.new_zeros(rows * tokens, HEADS, WIDTH)
        .index_copy(0, own._places, x)
        .view(rows, tokens, HEADS, WIDTH)
        for x in inputs[:3]
    )
    scores, far = torch.einsum("bihd,bjhd->bhij", q, k), far_of(tokens)
    if (k_pos := inputs[4]) is not None:
        scores = scores + torch.einsum("bihd,phd->bhip", q, k_pos).gather(-1, far.expand_as(scores))
    if (q_pos := inputs[3]) is not None:
        turned = torch.einsum("bjhd,phd->bhjp", k, q_pos)
        scores = scores + turned.gather(-1, far.T.expand_as(scores)).mT
    real = torch.zeros(rows * tokens, dtype=torch.bool, device=q.device)
    real[own._places] = True
    scores = (scores * SCALE).masked_fill(~real.view(rows, 1, 1, tokens), torch.finfo(scores.dtype).min)
    weights = drop_attention(scores.softmax(-1), p, 3, 0) if p else scores.softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).reshape(rows * tokens, -1)[own._places]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(
    ("kernels", "dtype", "p"),
    [
        (False, torch.float64, 0.3),
        (True, torch.float32, 0.3),
        pytest.param(True, torch.float32, 0.0, marks=pytest.mark.long),
        pytest.param(True, torch.bfloat16, 0.0, marks=pytest.mark.long),
    ],
)
def test_segments_attend_as_padded_rows_do(kinds: str, kernels: bool, dtype: Any, p: float) -> None:
    own = segments()
    inputs = given(own.total, dtype, KINDS[kinds])
    leaves = [None if one is None else one.detach().clone().requires_grad_() for one in inputs]
    exact = [None if one is None else one.detach().double().requires_grad_() for one in inputs]
    there = [one for one in leaves if one is not None]
    buckets = buckets_of(own.shape[1]) if any(KINDS[kinds]) else None
    dout = torch.randn(own.total, HEADS * WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with bound_to(here()):
        out = ScoredAttention(own, kernels)(leaves, buckets, SCALE, p, 3)  # type: ignore[arg-type]  # a list
    with bound_to(here()):
        wanted = expected(exact, own, p)  # type: ignore[arg-type]  # a list
    found = [out, *torch.autograd.grad(out, there, dout.to(dtype))]
    right = [wanted, *torch.autograd.grad(wanted, [one for one in exact if one is not None], dout.double())]
    for one, other in zip(found, right, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).abs().max() <= NEAR[dtype] * other.abs().max()


def test_the_same_call_gives_the_same_bits() -> None:
    own = segments(LENGTHS if DEVICE == "cuda" else (9, 1))  # the interpreter has one order
    inputs, found = given(own.total, torch.float32, KINDS["both"]), []
    for _ in range(2):
        leaves = [one.detach().requires_grad_() for one in inputs if one is not None]
        out = ScoredAttention(own, True)(tuple(leaves), buckets_of(own.shape[1]), SCALE, 0.0, 0)  # type: ignore[arg-type]  # all are there
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("width", [64, 20])
def test_heads_that_kernels_do_not_take_are_attended_by_torch(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fused(tuned("deberta-classify", "lora", {"r": 2}, torch.float32, attention_head_size=width))
    block, seen = fused_blocks(made)[0], list[bool]()
    block.spec.ops = replace(block.spec.ops, name="triton")
    monkeypatch.setattr(ScoredAttention, "__call__", lambda self, *args: seen.append(self.kernels) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made(**batch("deberta-classify"))
    assert seen == [width == 64]
