"""Attention without autograd: each form against softmax(q k^T) v in wide arithmetic, forward and backward,
and why a form is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels.block import attention as attending
from petune.kernels.block.attention import ChosenForm, How, choose
from petune.kernels.block.varlen import Segments, overlapping

LENGTHS = (5, 1, 7, 5, 2)
GPU = torch.device("cuda:0")
BF16 = torch.bfloat16


def segments_of(lengths: tuple[int, ...], device: str = "cpu") -> Segments:
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return Segments(starts, lengths, None, (1, sum(lengths)))


def split(
    m: int, heads: int, kv: int, d: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    """q, k and v as views of one matrix, which has columns of something else beside them."""
    torch.manual_seed(0)
    whole = torch.randn(m, (heads + 2 * kv) * d + 3 * d, dtype=torch.float64).to(device, dtype)
    return [x.unflatten(1, (-1, d)) for x in whole.split([heads * d, kv * d, kv * d, 3 * d], 1)][:3]


def oracle(q: Tensor, k: Tensor, v: Tensor, how: How, rows: list[int]) -> Tensor:
    """The formula itself, one row and one query head at a time; `rows` are their lengths."""
    out, group = [], q.shape[1] // k.shape[1]
    for number, (a, b, c) in enumerate(zip(q.split(rows), k.split(rows), v.split(rows), strict=True)):
        heads = []
        for head in range(q.shape[1]):
            scores = how.scale * a[:, head] @ b[:, head // group].T
            if how.mask is not None and how.mask.dtype is torch.bool:
                scores = scores.masked_fill(~how.mask[number, 0], -torch.inf)
            elif how.mask is not None:
                scores = scores + how.mask[number, 0]
            elif how.causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ c[:, head // group])
        out.append(torch.stack(heads, 1))
    return torch.cat(out)


def ways() -> dict[str, tuple[How, list[int]]]:
    torch.manual_seed(3)
    seen = torch.rand(4, 1, 5, 5) > 0.4
    seen |= torch.eye(5, dtype=torch.bool)
    return {
        "rows": (How(False, 0.3, 4), [5] * 4),
        "causal rows": (How(True, 0.3, 4), [5] * 4),
        "segments": (How(False, 0.5, 1, segments_of(LENGTHS)), list(LENGTHS)),
        "causal segments": (How(True, 0.5, 1, segments_of(LENGTHS)), list(LENGTHS)),
        "bool mask": (How(True, 0.3, 4, mask=seen), [5] * 4),
        "added mask": (How(False, 0.3, 4, mask=torch.randn(4, 1, 5, 5).double()), [5] * 4),
    }


@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.parametrize("way", ways())
def test_forward_and_backward_are_those_of_the_formula(way: str, kv: int) -> None:
    how, rows = ways()[way]
    q, k, v = split(sum(rows), 4, kv, 6)
    assert not q.is_contiguous()
    out, kept = attending.forward(q, k, v, how)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = oracle(*leaves, how, rows)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    assert out.is_contiguous() and not out.requires_grad
    dout = torch.randn(sum(rows), 8, 6, dtype=torch.float64)[:, ::2]
    found = attending.backward(dout, q, k, v, out, kept, how)
    for gradient, wanted in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-12)


def last(whole: How, first: int, tokens: int) -> tuple[How, slice, Tensor]:
    """How queries from `first` on of each row of so many tokens, or of all segments, attend to the keys that
    are left to them; which keys these are, and which queries of all."""
    if whole.segments is None:
        own = torch.arange(whole.batch * tokens).view(whole.batch, -1)[:, first:].flatten()
        return whole, slice(None), own
    queries, keys, seen = overlapping(whole.segments, whole.segments, first, tokens, True)
    return replace(whole, segments=queries, memory=keys), slice(*seen), torch.arange(first, tokens)


LAST = {
    "rows": How(True, 0.3, 2),
    "a window": How(True, 0.3, 2, window=3),
    "segments": How(True, 0.3, 1, segments_of(LENGTHS)),
    "a window in segments": How(True, 0.3, 1, segments_of(LENGTHS), window=3),
    "a cap": How(True, 0.3, 2, softcap=2.0),
}


@pytest.mark.parametrize("way", LAST)
def test_queries_that_are_the_last_of_their_keys_attend_as_among_all(way: str) -> None:
    whole = LAST[way]
    tokens, total = (20, 20) if whole.segments else (10, 20)
    how, seen, own = last(whole, 7, tokens)
    q, k, v = split(total, 4, 2, 6)
    dout = torch.zeros(total, 4, 6, dtype=torch.float64)
    dout[own] = torch.randn(len(own), 4, 6, dtype=torch.float64)
    expected, kept = attending.forward(q, k, v, whole)
    dq, dk, dv = attending.backward(dout, q, k, v, expected, kept, whole)
    out, kept = attending.forward(q[own], k[seen], v[seen], how)
    found = attending.backward(dout[own], q[own], k[seen], v[seen], out, kept, how)
    for one, other in zip((out, *found), (expected[own], dq[own], dk[seen], dv[seen]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", [How(True, 1.0, 1), How(False, 1.0, 1, segments_of(()), backend="varlen")])
def test_no_tokens_give_no_tokens(way: How) -> None:
    q, k, v = split(0, 4, 2, 8)
    out, kept = attending.forward(q, k, v, way)
    assert out.shape == (0, 4, 8)
    assert [x.shape for x in attending.backward(out, q, k, v, out, kept, way)] == [
        (0, 4, 8),
        (0, 2, 8),
        (0, 2, 8),
    ]


def test_backward_works_inside_no_grad_and_leaves_no_graph() -> None:
    how = How(True, 1.0, 2)
    q, k, v = (x.requires_grad_() for x in split(6, 2, 2, 4))
    with torch.no_grad():
        out, kept = attending.forward(q, k, v, how)
        found = attending.backward(torch.ones_like(out), q, k, v, out, kept, how)
    assert all(not x.requires_grad for x in (out, *found)) and q.grad is None


SINKS = {
    "rows": How(True, 0.3, 2),
    "a window": How(True, 0.3, 2, window=3),
    "segments": How(True, 0.3, 1, segments_of(LENGTHS)),
    "a window in segments": How(True, 0.3, 1, segments_of(LENGTHS), window=2),
    "a mask": How(True, 0.3, 2, mask=torch.ones(10, 10, dtype=torch.bool).tril()[None, None]),
}


@pytest.mark.parametrize("way", SINKS)
def test_a_sink_is_one_more_key_whose_value_is_zero(way: str) -> None:
    """Of every row or segment, in front of its keys and seen by all queries."""
    q, k, v = split(20, 4, 2, 6)
    sinks = torch.linspace(-2, 3, 4, dtype=torch.float64)
    how = replace(SINKS[way], sinks=sinks)
    lengths = [10, 10] if how.segments is None else list(LENGTHS)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    expected = []
    for a, b, c in zip(*(x.split(lengths) for x in leaves[:3]), strict=True):
        seen = torch.ones(len(a), len(a), dtype=torch.bool).tril()
        seen = seen.triu(1 - how.window) if how.window else seen
        b, c = (x.repeat_interleave(2, 1) for x in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b).mul(how.scale).masked_fill(~seen, -torch.inf)
        scores = torch.cat([leaves[3][:, None, None].expand(4, len(a), 1), scores], -1)
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., 1:], c))
    wanted, dout = torch.cat(expected), torch.randn(20, 4, 6, dtype=torch.float64)
    out, kept = attending.forward(q, k, v, how)
    torch.testing.assert_close(out, wanted.detach(), rtol=1e-12, atol=1e-12)
    dsinks = torch.zeros(4, dtype=torch.float64)
    found = attending.backward(dout, q, k, v, out, kept, how, None, dsinks)
    for one, other in zip((*found, dsinks), torch.autograd.grad(wanted, leaves, dout), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


# ------------------------------------------------------------------ choosing


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pretends that there is a CUDA device: a function that sets its capability."""
    state = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: state.capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    attending._chosen.cache_clear()
    yield state
    attending._chosen.cache_clear()


def test_on_the_cpu_torch_attends() -> None:
    assert choose(torch.device("cpu"), BF16, 64, 512) == ChosenForm("sdpa", "no CUDA device: cpu")
    assert choose(torch.device("cpu"), BF16, 64, 512, segmented=True).backend == "sdpa"


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "tokens", "kind", "expected", "reason"),
    [
        ((9, 0), BF16, 128, 2048, "", "cudnn", "cuDNN is best on"),
        ((10, 0), torch.float16, 64, 2048, "", "cudnn", "cuDNN is best on"),
        ((9, 0), BF16, 128, 512, "segmented", "varlen", "unequal length"),
        ((9, 0), BF16, 64, 1024, "segmented", "triton", "narrow heads on Hopper"),
        ((9, 0), BF16, 64, 1025, "segmented", "varlen", "unequal length"),
        ((8, 0), BF16, 64, 512, "segmented", "varlen", "unequal length"),
        ((8, 0), BF16, 128, 2048, "", "flash", "no faster"),
        ((9, 0), BF16, 160, 2048, "", "flash", "not 160"),
        ((9, 0), BF16, 128, 1, "", "flash", "one token"),
        ((9, 0), BF16, 256, 2048, "", "flash", "not 256"),
        ((8, 6), BF16, 256, 2048, "", "sdpa", "head dim 256"),
        ((9, 0), BF16, 20, 2048, "", "sdpa", "head dim 20"),
        ((9, 0), torch.float32, 64, 2048, "", "sdpa", "float32"),
        ((9, 0), BF16, 64, 2048, "masked", "sdpa", "a mask"),
        ((7, 5), torch.float16, 64, 2048, "", "sdpa", "sm_80"),
    ],
)
def test_the_form_follows_from_device_dtype_and_call(
    device: Any,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    tokens: int,
    kind: str,
    expected: str,
    reason: str,
) -> None:
    device.capability = capability
    found = choose(GPU, dtype, head_dim, tokens, segmented=kind == "segmented", masked=kind == "masked")
    assert found.backend == expected
    assert reason in found.reason


@pytest.mark.parametrize(
    ("asked", "expected", "reason"),
    [
        ({"keys": 512}, "cudnn", "equal length"),
        ({"keys": 1}, "flash", "one token"),
        ({"keys": 512, "segmented": True}, "varlen", "unequal length"),
        ({"keys": 512, "segmented": True, "drops": True}, "triton", "dropout of attention"),
        ({"keys": 512, "segmented": True, "dtype": torch.float32}, "triton", "segments, and float32"),
        ({"window": 128}, "flash", "sliding window"),
        ({"window": 512}, "cudnn", "equal length"),
        ({"window": 128, "segmented": True}, "triton", "narrow heads on Hopper"),
        ({"window": 128, "segmented": True, "head_dim": 256}, "varlen", "unequal length"),
        ({"distant": True}, "triton", "a bias by distance"),
        ({"distant": True, "segmented": True, "drops": True}, "triton", "dropout of attention"),
        ({"distant": True, "plain": True}, "sdpa", "plain torch"),
        ({"distant": True, "masked": True}, "sdpa", "a mask"),
        ({"capped": True}, "triton", "a soft cap"),
        ({"capped": True, "head_dim": 256}, "triton", "a soft cap"),
        ({"capped": True, "head_dim": 520}, "sdpa", "head dim 520"),
        ({"head_dim": 512}, "triton", "head dim 512"),
        ({"head_dim": 512, "segmented": True}, "triton", "segments, and head dim 512"),
        ({"head_dim": 512, "dtype": torch.float32}, "sdpa", "float32"),
        ({"head_dim": 512, "plain": True}, "sdpa", "head dim 512"),
        ({"last": True}, "flash", "the first of the keys"),
        ({"last": True, "segmented": True}, "varlen", "unequal length"),
        ({"last": True, "drops": True}, "sdpa", "keys on several"),
    ],
)
def test_what_other_families_ask_for_has_the_form_that_knows_it(
    device: Any, asked: dict[str, Any], expected: str, reason: str
) -> None:
    given = {"dtype": BF16, "head_dim": 64, "tokens": 512, **asked}
    found = choose(GPU, **given)
    assert found.backend == expected
    assert reason in found.reason


def test_wide_heads_are_for_devices_with_memory_for_their_tiles(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    attending._no_triton.cache_clear()
    assert choose(GPU, BF16, 256, 512, capped=True).backend == "sdpa"
    assert choose(GPU, BF16, 128, 512, capped=True).backend == "triton"


def test_plain_torch_is_given_no_kernel_of_ours(device: Any) -> None:
    assert choose(GPU, BF16, 64, 512, segmented=True, plain=True).backend == "varlen"


def test_each_form_is_told_of_once(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(attending, "say", said.append)
    attending._tell.cache_clear()
    for tokens in (512, 512, 256):
        choose(GPU, BF16, 128, tokens)
    choose(GPU, BF16, 128, 512, masked=True)
    choose(torch.device("cpu"), BF16, 128, 512)
    attending._tell.cache_clear()
    assert said == [
        "kernels: attention by cudnn: rows of equal length on a device that cuDNN is best on",
        "kernels: attention by sdpa: a mask",
    ]


def test_a_run_that_must_be_deterministic_is_not_given_cudnn(device: Any) -> None:
    assert choose(GPU, BF16, 64, 128).backend == "cudnn"
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(GPU, BF16, 64, 128).backend == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


# -------------------------------------------------------------- what the library's operations are called with


class Recorder:
    """Stands in for torch.ops.aten: each operation checks what it is given, and computes the same by way of
    `sdpa`."""

    def _scaled_dot_product_cudnn_attention(self, q, k, v, bias, lse, dropout, causal, debug, *, scale):  # type: ignore[no-untyped-def]
        assert (bias, lse, dropout, debug) == (None, True, 0.0, False)
        assert all(x.dim() == 4 and x.stride(3) == 1 for x in (q, k, v)) and k.shape == v.shape
        out, _ = self._same(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, scale)
        return out.transpose(1, 2), "lse", None, None, q.shape[2], k.shape[2], "seed", "offset", None

    def _scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-untyped-def]
        self,
        dout,
        q,
        k,
        v,
        out,
        lse,
        seed,
        offset,
        bias,
        cum_q,
        cum_k,
        max_q,
        max_k,
        dropout,
        causal,
        *,
        scale,
    ):
        assert (lse, seed, offset, bias, cum_q, cum_k, dropout) == (
            "lse",
            "seed",
            "offset",
            None,
            None,
            None,
            0.0,
        )
        assert (max_q, max_k) == (q.shape[2], k.shape[2]) and out.shape == q.shape == dout.shape
        found = self._gradients(*(x.transpose(1, 2) for x in (dout, q, k, v)), causal, scale)
        return tuple(x.transpose(1, 2) for x in found)

    def _flash_attention_forward(  # type: ignore[no-untyped-def]
        self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, **window
    ):
        self._check(q, k, v, cum_q, cum_k, max_q, max_k)
        assert (dropout, debug) == (0.0, False)
        out, _ = self._same(q, k, v, causal, scale, cum_q, cum_k, **window)
        return out, "lse", "state", "unused", None

    def _flash_attention_backward(  # type: ignore[no-untyped-def]
        self,
        dout,
        q,
        k,
        v,
        out,
        lse,
        cum_q,
        cum_k,
        max_q,
        max_k,
        dropout,
        causal,
        state,
        unused,
        *,
        scale,
        **window,
    ):
        self._check(q, k, v, cum_q, cum_k, max_q, max_k)
        assert (lse, dropout, state, unused) == (
            "lse",
            0.0,
            "state",
            "unused",
        ) and dout.shape == out.shape == q.shape
        return self._gradients(dout, q, k, v, causal, scale, cum_q, cum_k, **window)

    def _check(self, q, k, v, cum_q, cum_k, max_q, max_k):  # type: ignore[no-untyped-def]
        assert all(x.stride(-1) == 1 for x in (q, k, v)) and k.shape == v.shape
        if cum_q is None:
            assert cum_k is None and (max_q, max_k) == (q.shape[1], k.shape[1]) and q.dim() == 4
            return
        assert q.dim() == 3 and (cum_q is cum_k) == (q.shape[0] == k.shape[0])
        for x, starts, longest in ((q, cum_q, max_q), (k, cum_k, max_k)):
            assert starts.dtype == torch.int32 and starts.is_contiguous()
            assert (len(x), longest) == (int(starts[-1]), int(starts.diff().max()))

    def _how(self, q, causal, scale, starts, others, window_size_left=None, window_size_right=None):  # type: ignore[no-untyped-def]
        assert window_size_right == (0 if causal and window_size_left is not None else window_size_left)
        window = None if window_size_left is None else window_size_left + 1
        sides = [None if one is None else segments_of(tuple(one.diff().tolist())) for one in (starts, others)]
        memory = None if others is starts else sides[1]
        return How(causal, scale, len(q) if starts is None else 1, sides[0], memory=memory, window=window)

    def _same(self, q, k, v, causal, scale, starts=None, others=None, **window):  # type: ignore[no-untyped-def]
        flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
        out, kept = attending.forward(*flat, self._how(q, causal, scale, starts, others, **window))
        return out.view_as(q), kept

    def _gradients(self, dout, q, k, v, causal, scale, starts=None, others=None, **window):  # type: ignore[no-untyped-def]
        flat = [x.reshape(-1, *x.shape[-2:]) for x in (dout, q, k, v)]
        found = attending.backward(*flat, flat[1], (), self._how(q, causal, scale, starts, others, **window))
        return tuple(gradient.view_as(x) for gradient, x in zip(found, (q, k, v), strict=True))


FUSED = {
    "cudnn": How(False, 0.5, 4, backend="cudnn"),
    "flash": How(False, 0.5, 4, backend="flash"),
    "varlen": How(False, 0.5, 1, segments_of(LENGTHS), backend="varlen"),
}
FUSED |= {f"causal {name}": replace(how, causal=True) for name, how in FUSED.items()}
FUSED |= {f"windows of {name}": replace(FUSED[f"causal {name}"], window=3) for name in ("flash", "varlen")}
FUSED |= {f"windows to both sides of {name}": replace(FUSED[name], window=3) for name in ("flash", "varlen")}
ACROSS = {f"{name} across": FUSED[name] for name in ("cudnn", "flash")} | {
    "varlen across": replace(FUSED["varlen"], memory=segments_of((3, 2, 1, 9, 13))),
    "varlen across, rows of queries": replace(
        FUSED["flash"], backend="varlen", memory=segments_of((3, 2, 1, 22))
    ),
}
ACROSS |= {f"the last of {name}": FUSED[name] for name in ("causal flash", "windows of flash")}
ACROSS |= {
    f"the last of {name}": replace(FUSED[name], memory=segments_of((6, 2, 8, 9, 3)))
    for name in ("causal varlen", "windows of varlen")
}


@pytest.mark.parametrize("name", [*FUSED, *ACROSS])
def test_fused_forms_call_the_library_as_it_wants(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(attending, "aten", Recorder())
    how = (FUSED | ACROSS)[name]
    plain = replace(how, backend="sdpa")
    q, k, v = split(20, 4, 2, 8)
    if name in ACROSS:
        _, k, v = split(28, 4, 2, 8)
    dout = torch.randn(20, 4, 8, dtype=torch.float64)
    (out, kept), (expected, _) = (attending.forward(q, k, v, way) for way in (how, plain))
    assert torch.equal(out, expected) and out.is_contiguous() and kept[0] == "lse"
    found = attending.backward(dout, q, k, v, out, kept, how)
    for gradient, wanted in zip(found, attending.backward(dout, q, k, v, out, (), plain), strict=True):
        assert gradient.shape == wanted.shape
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv", "head_dim"), [(8, 2, 128), (4, 4, 64), (6, 1, 32)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["cudnn", "flash", "varlen", "triton"])
def test_fused_forms_agree_with_float32_on_a_gpu(
    backend: Any, causal: bool, heads: int, kv: int, head_dim: int, dtype: torch.dtype
) -> None:
    if backend == "cudnn" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN is not chosen here")
    lengths = (300, 1, 77, 128, 6)
    segments = segments_of(lengths, "cuda") if backend in ("varlen", "triton") else None
    how = How(causal, head_dim**-0.5, 4, segments, backend=backend)
    q, k, v = split(sum(lengths), heads, kv, head_dim, dtype, "cuda")
    dout = torch.randn(len(q), heads, head_dim, device="cuda").to(dtype)
    out, kept = attending.forward(q, k, v, how)
    assert out.is_contiguous()
    found = (out, *attending.backward(dout, q, k, v, out, kept, how))
    wide = How(causal, how.scale, how.batch, segments)
    q, k, v = q.float(), k.float(), v.float()
    expected = attending.forward(q, k, v, wide)[0]
    wanted = (expected, *attending.backward(dout.float(), q, k, v, expected, (), wide))
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == dtype
        assert float((one.float() - other).norm() / other.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("backend", ["flash", "varlen"])
def test_queries_that_are_the_last_of_their_keys_agree_with_float32_on_a_gpu(
    backend: Any, window: int | None
) -> None:
    lengths = (300, 1, 77, 128, 6)
    segments = segments_of(lengths, "cuda") if backend == "varlen" else None
    how, seen, own = last(How(True, 0.1, 4, segments, window=window), 100, 512 if segments else 128)
    q, k, v = split(512, 8, 2, 64, BF16, "cuda")
    given = q[own.cuda()], k[seen], v[seen]
    dout, found, wide = torch.randn(len(own), 8, 64, device="cuda").to(BF16), [], [x.float() for x in given]
    for form, inputs, grad in ((backend, given, dout), ("sdpa", wide, dout.float())):
        one = replace(how, backend=form)
        out, kept = attending.forward(*inputs, one)
        found.append((out, *attending.backward(grad, *inputs, out, kept, one)))
    for one, other in zip(*found, strict=True):
        assert float((one.float() - other).norm() / other.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_last_of_half_a_million_tokens_are_right_on_a_gpu() -> None:
    """At 524,288 tokens the heads of a Llama have 2^31 numbers; the last rows depend on all keys, the last
    keys on the last rows alone."""
    tokens, heads, kv, head_dim, last = 524_288, 32, 8, 128, 64
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    torch.manual_seed(0)
    both = torch.randn(tokens, (heads + 2 * kv) * head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = (
        part.unflatten(-1, (-1, head_dim))
        for part in both.split([heads * head_dim, kv * head_dim, kv * head_dim], -1)
    )
    backend = attending.choose(q.device, q.dtype, head_dim, tokens).backend
    how = How(True, head_dim**-0.5, 1, backend=backend)
    dout = torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    out, kept = attending.forward(q, k, v, how)
    dq, dk, dv = attending.backward(dout, q, k, v, out, kept, how)
    later = torch.ones(last, tokens, dtype=torch.bool, device="cuda").triu(tokens - last + 1)
    for group in (0, kv - 1):
        keys, values = k[:, group].float(), v[:, group].float()
        in_group = slice(group * heads // kv, (group + 1) * heads // kv)
        dk_last, dv_last = torch.zeros(2, last, head_dim, device="cuda").unbind()
        for head in range(heads)[in_group]:
            queries, grads = q[-last:, head].float(), dout[-last:, head].float()
            weights = (queries @ keys.T * how.scale).masked_fill(later, float("-inf")).softmax(-1)
            expected = weights @ values
            scores = weights * (grads @ values.T - (grads * expected).sum(-1, keepdim=True)) * how.scale
            close(out[-last:, head], expected)
            close(dq[-last:, head], scores @ keys)
            dk_last += scores[:, -last:].T @ queries
            dv_last += weights[:, -last:].T @ grads
        close(dk[-last:, group], dk_last)
        close(dv[-last:, group], dv_last)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As near as bf16 is."""
    assert float((found.float() - expected).norm() / expected.norm()) < 2e-2
