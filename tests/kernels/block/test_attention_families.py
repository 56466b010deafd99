"""Attention of BART, T5 and Gemma within fused blocks: against Hugging Face's own eager attention on the
padded batch."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_causal_mask_function,
)
from transformers.models.bart.modeling_bart import eager_attention_forward as bart
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward as gemma
from transformers.models.t5.modeling_t5 import T5Attention, T5Config
from transformers.models.t5.modeling_t5 import eager_attention_forward as t5

from petune.kernels.block import attention as attending
from petune.kernels.block.attention import Backend, How
from petune.kernels.block.distance import from_table
from petune.kernels.block.varlen import Segments, of_rows
from petune.rng.context import Running, bound_to
from petune.rng.dropout import draw, drawing, places, step_key

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F64 = torch.float64
QUERIES, KEYS = (5, 1, 8, 3), (4, 6, 1, 9)  # tokens of each text in the decoder, and in the encoder
LONG, SHORT = (40, 1, 17), (9, 35, 1)  # on both sides of the edges of a kernel's blocks
ROWS = (5, -1, 2**20, 0)
BUCKETS, MAX_DISTANCE = 8, 20


class Case(NamedTuple):
    """One kind of attention. tokens: of each text; keys: of its memory, None for attention to itself; rows:
    which of the two are rows of equal length, padding and all, of "queries", "keys" or both."""

    eager: Any
    tokens: tuple[int, ...] = QUERIES
    keys: tuple[int, ...] | None = None
    rows: str = ""
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    bias: str = ""  # "distance" or "dense"
    p: float = 0.0
    heads: int = 4
    kv: int = 4
    d: int = 6
    scale: float = 1.0


CASES = {
    "bart across": Case(bart, keys=KEYS, scale=0.4),
    "bart across, full rows": Case(bart, (5,) * 4, (7,) * 4, "queries keys"),
    "bart across, full rows of queries": Case(bart, (5,) * 4, KEYS, "queries"),
    "bart across, full rows of keys": Case(bart, keys=(7,) * 4, rows="keys"),
    "bart across, dropout": Case(bart, keys=KEYS, p=0.3),
    "bart across, dropout, full rows": Case(bart, (5,) * 4, (7,) * 4, "queries keys", p=0.3),
    "t5 encoder": Case(t5, bias="distance"),
    "t5 encoder, dropout": Case(t5, bias="distance", p=0.3),
    "t5 encoder, full rows": Case(t5, (9,) * 4, rows="queries", bias="distance"),
    "t5 encoder, dense bias": Case(t5, (9,) * 4, rows="queries", bias="dense"),
    "t5 decoder": Case(t5, bias="distance", causal=True),
    "t5 across": Case(t5, keys=KEYS),
    "gemma local": Case(gemma, causal=True, window=3, kv=2, scale=0.4),
    "gemma local, full rows": Case(gemma, (9,) * 4, rows="queries", causal=True, window=2, kv=1),
    "gemma global": Case(gemma, causal=True, window=8, kv=2),
    "local, softmax in float64": Case(bart, causal=True, window=3),
    "gemma 2": Case(gemma, causal=True, window=4, softcap=0.7, kv=2),
    "gemma 2, full rows": Case(gemma, (9,) * 4, rows="queries", causal=True, softcap=0.7, kv=2),
    "t5gemma encoder": Case(gemma, window=3, softcap=0.7, kv=2, p=0.3),
    "t5gemma encoder, full rows": Case(gemma, (9,) * 4, rows="queries", window=3, softcap=0.7, kv=2),
    "to both sides, full rows": Case(bart, (9,) * 4, rows="queries", window=2),
}


def here(case: Case) -> Running:
    return Running(
        key=step_key(0, 3), site="decoder.4", rows=torch.tensor(ROWS[: len(case.tokens)], device=DEVICE)
    )


def segments(lengths: tuple[int, ...]) -> Segments:
    """Of texts padded on the right to the longest."""
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    kept = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Segments(
        starts, lengths, kept.flatten().nonzero().squeeze(1).to(DEVICE), (len(lengths), max(lengths))
    )


class Given(NamedTuple):
    """What both get: tensors of kept tokens, the bias or T5's table, the gradient of the result."""

    tensors: list[Tensor]
    bias: Tensor | None
    dout: Tensor
    queries: Segments
    keys: Segments


def given(case: Case, dtype: torch.dtype = F64) -> Given:
    torch.manual_seed(0)
    queries = segments(case.tokens)
    keys = queries if case.keys is None else segments(case.keys)
    sizes = (
        (queries.total, case.heads),
        (keys.total, case.kv),
        (keys.total, case.kv),
        (queries.total, case.heads),
    )
    *tensors, dout = (torch.randn(*size, case.d, dtype=F64).to(DEVICE, dtype) for size in sizes)
    longest = queries.longest
    shape = (BUCKETS, case.heads) if case.bias == "distance" else (1, case.heads, longest, longest)
    bias = torch.randn(shape, dtype=F64).to(DEVICE, dtype) if case.bias else None
    return Given(tensors, bias, dout, queries, keys)


def ours(case: Case, ask: Given, backend: Backend = "sdpa") -> list[Tensor]:
    """out, dq, dk, dv and the gradient of the table or of the dense bias."""
    own = None if "queries" in case.rows else ask.queries
    memory = None if case.keys is None or (own is None and "keys" in case.rows) else ask.keys
    if memory is not None and "keys" in case.rows:
        memory = of_rows(*memory.shape[:1], memory.total, memory.starts.device)
    with bound_to(here(case)):
        numbers = places(*ask.queries.shape, ask.dout.device)[ask.queries._places]
        drop = draw(numbers, case.p) if case.p else None
    table, bias = ask.bias, ask.bias
    if table is not None and case.bias == "distance":
        table = table.detach().requires_grad_()
        bias = from_table(table, ask.queries.longest + 2, not case.causal, MAX_DISTANCE)
    how = How(
        case.causal,
        case.scale,
        len(case.tokens),
        own,
        None,
        backend,
        drop,
        memory,
        case.window,
        bias,
        case.softcap,
    )
    out, kept = attending.forward(*ask.tensors, how)
    dbias = (
        None if bias is None else torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
    )
    dbias = None if dbias is None else dbias.contiguous()
    found = [out, *attending.backward(ask.dout, *ask.tensors, out, kept, how, dbias)]
    if table is not None and bias is not None and dbias is not None:
        found += (
            torch.autograd.grad(bias, table, dbias.to(bias.dtype)) if case.bias == "distance" else [dbias]
        )
    return found


def theirs(case: Case, ask: Given) -> list[Tensor]:
    """The same by Hugging Face, padded, with gradients by autograd."""
    leaves = [x.detach().to(F64).requires_grad_() for x in ask.tensors]
    sides = ask.queries, ask.keys, ask.keys
    q, k, v = (padded(x, side) for x, side in zip(leaves, sides, strict=True))
    seen = causal_mask_function if case.causal else lambda batch, head, query, key: key > -1
    if case.window is not None:
        far = (
            sliding_window_causal_mask_function(case.window)
            if case.causal
            else sliding_window_bidirectional_overlay(case.window - 1)
        )
        seen = and_masks(seen, far)
    t, s = q.shape[2], k.shape[2]
    there = torch.arange(s) < torch.tensor(ask.keys.lengths)[:, None]
    mask = seen(0, 0, torch.arange(t)[:, None], torch.arange(s)[None]) & there[:, None, None]
    mask |= ~mask.any(-1, keepdim=True)  # padding that sees nothing
    added = torch.zeros(mask.shape, dtype=F64).masked_fill(~mask, torch.finfo(F64).min).to(DEVICE)
    module = SimpleNamespace(training=True, num_key_value_groups=case.heads // case.kv)
    more: dict[str, Any] = {"softcap": case.softcap} if case.softcap else {}
    if ask.bias is not None:
        leaves.append(bias := ask.bias.detach().to(F64).requires_grad_())
        more["position_bias"] = t5_bias(bias, t, case.causal) if case.bias == "distance" else bias
    with drawing(here(case)):
        out = case.eager(module, q, k, v, added, scaling=case.scale, dropout=case.p, **more)[0]
    out = out.flatten(0, 1)[ask.queries._places]
    return [out.detach(), *torch.autograd.grad(out, leaves, ask.dout.to(F64))]


def padded(x: Tensor, side: Segments) -> Tensor:
    rows, tokens = side.shape
    whole = x.new_zeros(rows * tokens, *x.shape[1:]).index_copy(0, side._places, x)
    return whole.view(rows, tokens, *x.shape[1:]).transpose(1, 2)


def t5_bias(table: Tensor, tokens: int, decoder: bool) -> Tensor:
    """Hugging Face's [1, heads, tokens, tokens] of a table [buckets, heads]."""
    module: Any = SimpleNamespace(
        is_decoder=decoder,
        relative_attention_num_buckets=len(table),
        relative_attention_max_distance=MAX_DISTANCE,
        _relative_position_bucket=T5Attention._relative_position_bucket,
        relative_attention_bias=partial(torch.nn.functional.embedding, weight=table),
    )
    found: Tensor = T5Attention.compute_bias(module, tokens, tokens, table.device)
    return found


@pytest.mark.parametrize("name", CASES)
def test_plain_torch_is_hugging_faces_to_the_last_bits_of_float64(name: str) -> None:
    case = CASES[name]
    ask = given(case)
    near = 2e-6 if case.eager is gemma else 1e-12  # whose softmax is float32
    for found, expected in zip(ours(case, ask), theirs(case, ask), strict=True):
        torch.testing.assert_close(found, expected, rtol=near, atol=near)
        assert expected.any()


@pytest.mark.parametrize("decoder", [False, True])
def test_the_bias_of_a_table_is_hugging_faces_at_every_distance(decoder: bool) -> None:
    config = T5Config()
    heads, table = 3, torch.randn(config.relative_attention_num_buckets, 3)
    far, longest = config.relative_attention_max_distance, 200
    found = from_table(table, longest, not decoder, far)
    assert found.shape == (heads, 2 * longest - 1)
    buckets = T5Attention._relative_position_bucket(
        torch.arange(1 - longest, longest), not decoder, len(table), far
    )
    assert torch.equal(found, table[buckets].T)


def test_masks_and_a_bias_by_distance_act_together_on_padded_rows() -> None:
    """T5 where padding is computed: 0 for the mask says the same as segments do, to every real token."""
    case = CASES["t5 encoder"]
    ask = given(case)
    expected = ours(case, ask)
    rows, tokens = ask.queries.shape
    whole = [padded(x, ask.queries).transpose(1, 2).flatten(0, 1) for x in (*ask.tensors, ask.dout)]
    mask = (torch.arange(tokens) < torch.tensor(ask.queries.lengths)[:, None])[:, None, None].to(DEVICE)
    bias = from_table(ask.bias, tokens, True, MAX_DISTANCE)  # type: ignore[arg-type]
    how = How(False, case.scale, rows, mask=mask, bias=bias)
    out, kept = attending.forward(*whole[:3], how)
    found = (out, *attending.backward(whole[3], *whole[:3], out, kept, how))
    for one, wanted in zip(found, expected, strict=False):
        torch.testing.assert_close(one[ask.queries._places], wanted, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ our kernels

NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # of the largest element
KERNELS = {
    "across": Case(t5, LONG, SHORT, heads=2, kv=1, d=32, p=0.3),
    "across, full rows of queries": Case(
        t5, (17,) * 4, (3, 33, 1, 7), "queries", heads=1, kv=1, d=64, scale=0.2
    ),
    "across, full rows, dropout": Case(t5, (3,) * 4, (18,) * 4, "queries keys", heads=1, kv=1, d=32, p=0.3),
    "bias": Case(t5, LONG, bias="distance", heads=2, kv=2, d=32, p=0.1, scale=0.4),
    "bias, decoder": Case(t5, LONG, bias="distance", causal=True, heads=2, kv=2, d=64, scale=0.2),
    "bias, wide heads": Case(t5, (20, 1, 3, 9), bias="distance", heads=1, kv=1, d=128, scale=0.2),
    "window": Case(bart, LONG, causal=True, window=7, heads=1, kv=1, d=32, scale=0.4),
    "window past a block": Case(gemma, LONG, causal=True, window=33, heads=2, kv=1, d=64, scale=0.2, p=0.1),
    "window of one token": Case(bart, (33, 1, 2, 5), causal=True, window=1, heads=1, kv=1, d=32),
    "window to both sides": Case(bart, LONG, window=7, heads=1, kv=1, d=32, scale=0.4),
    "window to both sides past a block": Case(
        gemma, LONG, window=33, softcap=0.7, heads=2, kv=1, d=64, scale=0.2, p=0.1
    ),
    "window of one token to both sides": Case(bart, (33, 1, 2, 5), window=1, heads=1, kv=1, d=32),
    "bias in windows": Case(t5, LONG, window=9, bias="distance", heads=1, kv=1, d=32, scale=0.4),
    "soft cap": Case(
        gemma, LONG, causal=True, window=16, softcap=0.7, heads=2, kv=1, d=32, bias="", scale=0.4
    ),
}


def assert_near(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype, times: int = 1) -> None:
    for one, exact in zip(found, expected, strict=True):
        assert one.shape == exact.shape and one.isfinite().all()
        assert float((one.double() - exact).abs().max()) <= times * NEAR[dtype] * max(
            float(exact.abs().max()), 0.5
        )


@pytest.mark.parametrize("name", KERNELS)
def test_our_kernels_agree_with_hugging_face(name: str) -> None:
    case = KERNELS[name]
    ask = given(case, torch.float32)
    assert_near(ours(case, ask, "triton"), theirs(case, ask), torch.float32)


@pytest.mark.parametrize("name", ["across", "bias", "soft cap"])
def test_our_kernels_sum_bfloat16_in_float32(name: str) -> None:
    case = KERNELS[name]._replace(tokens=(65, 1), p=0.0, heads=1, kv=1)
    case = case._replace(keys=case.keys and (3, 64))
    ask = given(case, torch.bfloat16)
    assert_near(ours(case, ask, "triton"), theirs(case, ask), torch.bfloat16, 2)


def test_a_bias_of_any_size_leaves_what_is_no_token_alone() -> None:
    """Where a block goes on behind a segment's end there are zeros instead of queries, which a bias may blow
    up."""
    case = KERNELS["bias"]._replace(tokens=(17, 40), heads=1, kv=1, p=0.0)
    ask = given(case, torch.float32)
    assert ask.bias is not None
    ask = ask._replace(bias=ask.bias - ask.bias.min() + 200)
    assert_near(ours(case, ask, "triton"), theirs(case, ask), torch.float32, 10)


def test_the_gradient_of_a_bias_is_added_and_its_bits_repeat() -> None:
    case = KERNELS["bias"]._replace(heads=1, kv=1)
    ask = given(case, torch.float32)
    bias = from_table(ask.bias, 50, True, MAX_DISTANCE)  # type: ignore[arg-type]
    how = How(False, 0.4, 1, ask.queries, backend="triton", bias=bias)
    out, kept = attending.forward(*ask.tensors, how)
    sums = [torch.full_like(bias, start) for start in (0.0, 0.0, 3.0)]
    for dbias in sums:
        attending.backward(ask.dout, *ask.tensors, out, kept, how, dbias)
    assert torch.equal(sums[0], sums[1])
    torch.testing.assert_close(sums[2] - 3, sums[0], rtol=0, atol=1e-5)
    reach = max(case.tokens) - 1
    assert not sums[0][:, : 49 - reach].any() and not sums[0][:, 50 + reach :].any() and sums[0].any()


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_queries_without_keys_get_zeros(backend: Backend) -> None:
    case = Case(t5, (3, 2), (4, 0), heads=1, kv=1, d=32)
    ask = given(case, torch.float32)
    out, dq, dk, dv = ours(case, ask, backend)
    assert out[:3].any() and not out[3:].any() and not dq[3:].any()
    assert dk.shape == (4, 1, 32) and all(x.isfinite().all() for x in (out, dq, dk, dv))
    empty = [ask.tensors[0], *(x[:0] for x in ask.tensors[1:])]
    how = How(False, 1.0, 2, backend=backend)
    out, kept = attending.forward(*empty, how)
    assert not out.any() and not attending.backward(out, *empty, out, kept, how)[0].any()


# ------------------------------------------------------------------ on devices

GPU = {
    "across": (
        Case(t5, (300, 1, 77, 130), (512, 64, 1, 300), heads=8, kv=8, d=64, scale=0.125),
        ("varlen", "triton"),
    ),
    "across, full rows": (
        Case(t5, (128,) * 4, (300,) * 4, "queries keys", heads=8, kv=8, d=64, scale=0.125),
        ("cudnn", "flash", "triton"),
    ),
    "window": (
        Case(gemma, (300, 1, 77, 513), causal=True, window=100, heads=8, kv=2, d=128, scale=0.09),
        ("varlen", "triton"),
    ),
    "window, wide": (
        Case(gemma, (300, 1, 77, 513), causal=True, window=100, heads=4, kv=1, d=256, scale=0.06),
        ("varlen",),
    ),
    "window, full rows": (
        Case(gemma, (513,) * 4, None, "queries", True, 100, heads=8, kv=2, d=128, scale=0.09),
        ("flash",),
    ),
    "bias": (
        Case(t5, (300, 1, 77, 512), bias="distance", heads=8, kv=8, d=64, p=0.1, scale=0.125),
        ("triton",),
    ),
    "bias, decoder": (
        Case(t5, (300, 1, 77, 512), None, "", True, bias="distance", heads=8, kv=8, d=128, scale=0.09),
        ("triton",),
    ),
    "soft cap": (
        Case(gemma, (300, 1, 77, 512), causal=True, softcap=5.0, heads=8, kv=2, d=128, scale=0.09),
        ("triton",),
    ),
    "soft cap, wide": (
        Case(gemma, (300, 1, 77, 512), causal=True, softcap=5.0, heads=8, kv=4, d=256, scale=0.06),
        ("triton",),
    ),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "backend"), [(name, form) for name, (_, forms) in GPU.items() for form in forms]
)
def test_every_form_agrees_with_hugging_face_on_a_gpu(
    name: str, backend: Backend, dtype: torch.dtype
) -> None:
    if backend == "cudnn" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN is not chosen here")
    case = GPU[name][0]
    ask = given(case, dtype)
    for found, exact in zip(ours(case, ask, backend), theirs(case, ask), strict=True):
        assert found.shape == exact.shape
        assert float((found.double() - exact).norm() / exact.norm()) < 1e-2
