"""Attention with dropout by index, in kernels: against explicit attention on the padded batch, masks and
gradients included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from petune.kernels.block import attention as attending
from petune.kernels.block.attention import How
from petune.kernels.block.varlen import Segments
from petune.kernels.triton import attention
from petune.models.attention import _explicit
from petune.rng.context import Running, bound_to
from petune.rng.dropout import Drop, draw, drop_attention, places, step_key

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = (5, -1, 7, 2**20, 0, 3)
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}  # of the largest element
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Segment = tuple[int, int, int]  # row of the batch, first token, tokens
# padding on both sides; the edges of float32's block
RAGGED = [(0, 2, 31), (1, 3, 1), (2, 0, 0), (3, 0, 33), (4, 1, 32)]
PACKED = [(0, 0, 9), (0, 9, 20), (1, 12, 17)]


class Given(NamedTuple):
    """A batch [rows, tokens] of segments, and what its attention is given: q, k, v and dout of its kept
    tokens, `at` these places."""

    segments: list[Segment]
    at: Tensor
    shape: tuple[int, int]
    tensors: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    starts: Tensor
    longest: int
    how: Drop
    scale: float = 0.3

    def rest(self, causal: bool = False) -> tuple[Any, ...]:
        return self.starts, self.longest, causal, self.scale, self.how


def here(rows: int) -> Running:
    return Running(
        key=step_key(0, 3), site="encoder.4", rows=torch.tensor((ROWS * rows)[:rows], device=DEVICE)
    )


def given(
    segments: list[Segment],
    dtype: torch.dtype = torch.float32,
    p: float = 0.1,
    heads: int = 4,
    kv: int = 2,
    d: int = 24,
) -> Given:
    """q, k and v are views of one matrix with other columns beside them, dout of a wider one."""
    rows, tokens = (
        max(row for row, _, _ in segments) + 1,
        max(first + length for _, first, length in segments),
    )
    at = torch.tensor(
        [row * tokens + first + token for row, first, length in segments for token in range(length)],
        device=DEVICE,
    )
    with bound_to(here(rows)):
        how = draw(places(rows, tokens, at.device)[at], p)
    generator = torch.Generator().manual_seed(len(at))
    whole = torch.randn(len(at), heads + 2 * kv + 3, d, generator=generator).to(DEVICE, dtype)
    q, k, v, _ = whole.split([heads, kv, kv, 3], 1)
    dout = torch.randn(len(at), heads, d + 8, generator=generator).to(DEVICE, dtype)[:, :, :d]
    lengths = [length for _, _, length in segments]
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    return Given(segments, at, (rows, tokens), (q, k, v), dout, starts, max(lengths), how)


def ran(case: Given, causal: bool = False) -> dict[str, Tensor]:
    """Forward and backward by the kernels."""
    out, lse = attention.forward(*case.tensors, *case.rest(causal))
    grads = attention.backward(case.dout, *case.tensors, out, lse, *case.rest(causal))
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def explicit(case: Given, causal: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The same by torch on the padded batch, dropped by `drop_attention`, with gradients by autograd."""
    rows, tokens = case.shape
    leaves = [x.detach().to(dtype).requires_grad_() for x in case.tensors]
    q, k, v = (
        x.new_zeros(rows * tokens, *x.shape[1:])
        .index_copy(0, case.at, x)
        .view(rows, tokens, *x.shape[1:])
        .transpose(1, 2)
        for x in leaves
    )
    owner = torch.full((rows * tokens,), -1, device=DEVICE)
    owner[case.at] = torch.arange(len(case.segments), device=DEVICE).repeat_interleave(case.starts.diff())
    owner = owner.view(rows, 1, tokens, 1)
    # padding sees itself
    seen = (owner == owner.mT) & (owner >= 0) | torch.eye(tokens, dtype=torch.bool, device=DEVICE)
    seen = seen.tril() if causal else seen
    with bound_to(here(rows)):
        out = _explicit(nn.Module(), q, k, v, seen, case.how.p, (0, 0), scaling=case.scale)[0].flatten(0, 1)[
            case.at
        ]
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * case.scale).masked_fill(
        ~seen, -torch.inf
    )
    grads = torch.autograd.grad(out, leaves, case.dout.to(dtype))
    lse = scores.detach().logsumexp(-1).transpose(1, 2).flatten(0, 1)[case.at].T
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def assert_near(
    found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, times: int = 1
) -> None:
    for name, exact in expected.items():
        assert found[name].shape == exact.shape and found[name].is_contiguous(), name
        assert found[name].dtype == (torch.float32 if name == "lse" else dtype), name
        near = NEAR[torch.float32 if name == "lse" else dtype]
        assert float((found[name].double() - exact).abs().max()) <= times * near * float(exact.abs().max()), (
            name
        )


# ------------------------------------------------------------------ against explicit attention


@pytest.mark.parametrize(
    ("p", "causal", "heads"), [(0.0, True, 2), (0.1, False, 2), (0.1, True, 4), (1.0, False, 2)]
)
def test_ragged_segments_attend_as_the_padded_batch_does(p: float, causal: bool, heads: int) -> None:
    case = given(RAGGED, p=p, heads=heads, kv=heads // 2)
    found = ran(case, causal)
    assert_near(found, explicit(case, causal), torch.float32)
    assert all(bool(found[name].any()) == (p < 1) for name in ("out", "dq", "dk", "dv"))


def test_without_a_draw_nothing_drops_out() -> None:
    case = given(RAGGED[:4], p=0.0, heads=2, kv=1)
    *rest, _ = case.rest()
    out, lse = attention.forward(*case.tensors, *rest, None)
    grads = attention.backward(case.dout, *case.tensors, out, lse, *rest, None)
    assert all(map(torch.equal, ran(case).values(), (out, lse, *grads)))


@pytest.mark.parametrize(
    ("dtype", "causal"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)], ids=str
)
def test_half_precision_too_on_both_sides_of_its_blocks_edge(dtype: torch.dtype, causal: bool) -> None:
    case = given([(0, 0, 65), (1, 2, 63), (2, 1, 64), (3, 0, 1)], dtype, heads=2, kv=1)
    assert_near(ran(case, causal), explicit(case, causal), dtype)


@pytest.mark.crossed(1)
@pytest.mark.parametrize(("heads", "kv", "d"), [(1, 1, 8), (3, 1, 64), (2, 2, 72), (2, 1, 128), (1, 1, 264)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_of_any_width_and_sharing(dtype: torch.dtype, heads: int, kv: int, d: int) -> None:
    case = given(PACKED[:2], dtype, 0.4, heads, kv, d)
    assert_near(ran(case, True), explicit(case, True), dtype)


@pytest.mark.parametrize("longest", [16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_segments_have_small_blocks(dtype: torch.dtype, longest: int) -> None:
    case = given([(0, 0, longest), (1, 1, longest - 1), (2, 0, 2)], dtype, heads=2, kv=1)
    assert attention._tile(dtype, 24, longest)[0] == (16 if longest <= 16 else 32)
    assert_near(ran(case), explicit(case), dtype)


@pytest.mark.parametrize("scale", [-2.0, 0.0, 40.0])
def test_scores_may_be_of_any_sign_and_size(scale: float) -> None:
    case = given([(0, 0, 17), (1, 0, 40)], heads=1, kv=1)._replace(scale=scale)
    assert_near(ran(case, True), explicit(case, True), torch.float32, times=10)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_what_lies_past_a_segments_end_weighs_nothing_beside_very_low_scores() -> None:
    case = given([(0, 0, 17), (1, 0, 40)], heads=1, kv=1)
    q, k, v = case.tensors
    case = case._replace(tensors=(q / 10 + 4, k / 10 - 4, v))  # zeros in their place would weigh exp(100)
    assert float(explicit(case)["lse"].max()) < -100
    assert_near(ran(case), explicit(case), torch.float32, times=10)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 5])
def test_sinks_take_their_share_of_the_probability(window: int, dtype: torch.dtype) -> None:
    case = given([(0, 0, 33), (1, 0, 1), (2, 0, 16)], dtype, 0.1, heads=2, kv=1, d=16)
    sinks = torch.tensor([-1.5, 2.5], device=DEVICE)
    lengths = tuple(case.starts.diff().tolist())
    segments = Segments(case.starts, lengths, None, (1, sum(lengths)))
    how = How(True, case.scale, 1, segments, drop=case.how, window=window or None, sinks=sinks)
    wide = [x.double() for x in (*case.tensors, case.dout)]
    exact, kept = attending.forward(*wide[:3], replace(how, sinks=sinks.double()))
    rest, more = case.rest(True), attention.More(window=window, sinks=sinks)
    totals = [torch.zeros(2, dtype=dtype, device=DEVICE) for dtype in (torch.float64, torch.float32)]
    given_back = (wide[3], *wide[:3], exact, kept, replace(how, sinks=sinks.double()), None, totals[0])
    expected = exact, *attending.backward(*given_back)
    out, lse = attention.forward(*case.tensors, *rest, more)
    grads = attention.backward(case.dout, *case.tensors, out, lse, *rest, more, None, totals[1])
    pairs = zip((out, *grads, totals[1]), (*expected, totals[0]), strict=True)
    for found, true in pairs:
        near = 4 * NEAR[dtype] * float(true.abs().max())
        assert float((found.double() - true).abs().max()) <= near


# ------------------------------------------------------------------ the mask


@pytest.mark.parametrize("segments", [RAGGED, PACKED], ids=["ragged", "packed"])
def test_the_mask_is_that_of_the_padded_batch_to_the_bit(segments: list[Segment]) -> None:
    """Equal scores, and values that are a number's own unit vector: an output's element is there where its
    probability is."""
    case, heads = given(segments, p=0.3, d=64), 4
    own = torch.cat([torch.arange(length) for _, _, length in segments]).to(DEVICE)
    q, k, v = (torch.zeros_like(x) for x in case.tensors)
    v[torch.arange(len(own)), :, own] = 1
    out = attention.forward(q, k, v, *case.rest())[0]
    rows, tokens = case.shape
    with bound_to(here(rows)):
        kept = (
            drop_attention(
                torch.ones(rows, heads, tokens, tokens, dtype=torch.float64, device=DEVICE), 0.3, 0, 0
            )
            > 0
        )
    for (row, first, length), begin in zip(segments, case.starts.tolist(), strict=False):
        there = slice(first, first + length)
        found = out[begin : begin + length, :, :length].transpose(0, 1) > 0
        assert torch.equal(found, kept[row, :, there, there])


def test_as_many_probabilities_are_dropped_as_should_be_and_others_by_every_head() -> None:
    case = given([(0, 0, 200)], torch.bfloat16, p=0.1)
    q, k, v = (torch.zeros_like(x) for x in case.tensors)
    counts = attention.forward(q, k, v.fill_(1), *case.rest())[0][:, :, 0].float() * 0.9 * 200
    assert abs(float(counts.mean()) / 200 - 0.9) < 4 * (0.09 / 160_000) ** 0.5
    assert len({tuple(head.tolist()) for head in counts.T}) == 4


def test_a_base_in_memory_is_that_base_to_the_bit() -> None:
    case = given(PACKED, heads=2, kv=1)
    base = torch.tensor([case.how.base], device=DEVICE)
    loaded, other = (case._replace(how=case.how._replace(base=value)) for value in (base, base + 1))
    found, expected = ran(loaded), ran(case)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(ran(other)["out"], expected["out"])


def test_another_step_row_or_token_is_another_mask() -> None:
    case = given(PACKED)
    out = attention.forward(*case.tensors, *case.rest())[0]
    for change in (
        {"base": case.how.base + 1},
        {"numbers": case.how.numbers + (1 << 32)},
        {"numbers": case.how.numbers + 1},
    ):
        other = case._replace(how=case.how._replace(**change))
        assert not torch.equal(attention.forward(*other.tensors, *other.rest())[0], out)


# ------------------------------------------------------------------ bits and sizes


def test_the_same_call_gives_the_same_bits() -> None:
    case = given(PACKED, torch.bfloat16, heads=2, kv=1)
    first, again = ran(case), ran(case)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_segments_bits_do_not_depend_on_what_is_beside_it_or_on_spare_programs() -> None:
    case, alone = given(PACKED, heads=2, kv=1), slice(9, 29)
    whole = ran(case._replace(longest=100))
    q, k, v, dout, numbers = (x[alone] for x in (*case.tensors, case.dout, case.how.numbers))
    starts = torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)
    own = case._replace(
        tensors=(q, k, v), dout=dout, starts=starts, longest=20, how=case.how._replace(numbers=numbers)
    )
    for name, value in ran(own).items():
        assert torch.equal(value, whole[name][:, alone] if name == "lse" else whole[name][alone])


@pytest.mark.parametrize("segments", [[], [(0, 0, 0), (1, 0, 0)]], ids=["none", "empty"])
def test_no_tokens_give_no_tokens(segments: list[Segment]) -> None:
    starts = torch.zeros(len(segments) + 1, dtype=torch.int32, device=DEVICE)
    q, kv = (torch.zeros(0, heads, 8, device=DEVICE) for heads in (4, 2))
    rest = (starts, 0, False, 0.3, Drop(torch.zeros(0, dtype=torch.int64, device=DEVICE), 3, 0.1, 0))
    out, lse = attention.forward(q, kv, kv, *rest)
    assert (out.shape, lse.shape) == ((0, 4, 8), (4, 0))
    assert [x.shape for x in attention.backward(out, q, kv, kv, out, lse, *rest)] == [
        (0, 4, 8),
        (0, 2, 8),
        (0, 2, 8),
    ]


# ------------------------------------------------------------------ on devices


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv", "d"),
    [(torch.bfloat16, 16, 16, 64), (torch.float16, 8, 2, 128), (torch.float32, 4, 4, 64)],
)
def test_a_batch_of_texts_agrees_with_float32_on_a_gpu(
    dtype: torch.dtype, heads: int, kv: int, d: int, causal: bool
) -> None:
    lengths = (512, 8, 77, 300, 511, 128, 129, 1, 450, 64)
    case = given(
        [(row, row % 3 * (512 - length) // 2, length) for row, length in enumerate(lengths)],
        dtype,
        0.1,
        heads,
        kv,
        d,
    )
    found, expected = ran(case, causal), explicit(case, causal, torch.float32)
    for name, exact in expected.items():
        assert float((found[name].float() - exact).norm() / exact.norm()) < (
            1e-4 if dtype == torch.float32 else 1e-2
        ), name
    again = ran(case, causal)
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.gpu
@on_a_gpu
def test_a_captured_call_reads_its_base_and_its_segments_anew() -> None:
    case = given([(0, 0, 300), (1, 0, 212)], torch.bfloat16, heads=8, kv=8, d=64)
    case = case._replace(
        longest=512, how=case.how._replace(base=torch.tensor([case.how.base], device=DEVICE))
    )
    ran(case)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ran(case)
    case.how.base.add_(1)  # type: ignore[union-attr]
    case.starts[1] = 40
    graph.replay()
    found, expected = {name: value.clone() for name, value in captured.items()}, ran(case)
    assert all(torch.equal(found[name], expected[name]) for name in found)
