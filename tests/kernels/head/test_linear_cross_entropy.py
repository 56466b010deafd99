"""The head and its cross-entropy in one step against autograd of the plain formula, and Hugging Face's models
with it against themselves.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.errors import UsageError
from petune.kernels.dispatch import reference_ops
from petune.kernels.head import linear_cross_entropy as heads
from petune.kernels.head.hooks import fuse_head, head_loss, unfuse_head
from petune.kernels.head.lazy_logits import Unmade, unmade
from petune.kernels.head.linear_cross_entropy import linear_cross_entropy
from petune.kernels.triton import loss as kernels
from petune.methods.configs import LoraConfig
from petune.methods.lora import tune
from petune.models.boundary import put_slice
from petune.run.evaluate import forward, outputs_of, real_rows
from petune.tasks import loss_sum
from tests.kernels.head.operands import SETTINGS, K, Made, N, V, assert_alike, grads, operands
from tests.methods.zoo import (
    GENERATE,
    GENERATING,
    VOCAB,
    assert_same_gradients,
    batch,
    gradients,
    prompt,
    tiny,
)

OPS = reference_ops()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
each_setting = pytest.mark.parametrize("setting", SETTINGS)
MODELS = (
    "llama-causal",
    "mistral-causal",
    "qwen2-causal",
    "qwen3-causal",
    "t5-seq2seq",
    "t5-gated",
    "bart-seq2seq",
    "bert-mlm",
    "gemma3-causal",
)


def plain(
    parts: dict[str, Tensor],
    labels: Tensor,
    softcap: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """The same by operations that autograd knows; b, a count twice."""
    logits = F.linear(parts["hidden"], parts["weight"], parts.get("bias"))
    if "a" in parts:
        logits = logits + 2 * parts["hidden"] @ parts["a"].T @ parts["b"].T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)


def fused(parts: dict[str, Tensor], labels: Tensor, **settings: Any) -> Tensor:
    low = (parts["a"], parts["b"], 2.0) if "a" in parts else None
    return linear_cross_entropy(
        parts["hidden"], parts["weight"], labels, ops=OPS, bias=parts.get("bias"), low=low, **settings
    )


# ------------------------------------------------------------------ the step


@pytest.mark.crossed
@each_setting
@pytest.mark.parametrize(
    "names", ["hidden weight", "hidden weight bias", "hidden weight a b", "hidden weight bias a b"]
)
@pytest.mark.parametrize("chunk", [None, 1, 8, 23])
@pytest.mark.parametrize("trained", [None, N])
def test_loss_and_gradients_are_the_plain_formulas(
    names: str, setting: str, chunk: int | None, trained: int | None
) -> None:
    every, labels = operands()
    parts = {name: every[name] for name in names.split()}
    expected, found = (
        plain(parts, labels, **SETTINGS[setting]),
        fused(parts, labels, chunk=chunk, trained=trained, **SETTINGS[setting]),
    )
    torch.testing.assert_close(found, expected)
    assert_alike(grads(found * 0.3, parts), grads(expected * 0.3, parts))


@pytest.mark.parametrize("trains", ["hidden", "weight", "bias", "a", "b"])
def test_what_does_not_train_gets_no_gradient(trains: str) -> None:
    every, labels = operands()
    expected = grads(plain(every, labels), every)[trains]
    parts = {name: value.detach().requires_grad_(name == trains) for name, value in every.items()}
    fused(parts, labels, chunk=5).backward()
    assert_alike({trains: parts[trains].grad}, {trains: expected})
    assert all(parts[name].grad is None for name in parts if name != trains)


@pytest.mark.parametrize("chunk", [4, 8, 22, 24])
def test_logits_of_all_rows_are_never_there(chunk: int) -> None:
    parts, labels = operands()
    labels = labels.clamp(min=0)
    with Made() as made:
        fused({name: parts[name] for name in ("hidden", "weight", "bias")}, labels, chunk=chunk).backward()
    pieces = -(-N // chunk)
    assert made.rows == N
    assert made.largest == max(-(-N // pieces) * V, V * K)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("each", [False, True])
def test_products_of_an_odd_vocabulary_are_aligned(setting: str, each: bool) -> None:
    parts, labels = operands()
    odd = {
        name: (value[:-1] if name in ("weight", "bias", "b") else value).detach().requires_grad_()
        for name, value in parts.items()
    }
    labels = labels.clamp(max=V - 2)
    with Made(V) as made:
        found = fused(odd, labels, each=each, **SETTINGS[setting]).sum()
        got = grads(found, odd)
    assert made.rows >= N  # of products with V columns, where the head has one less
    expected = plain(odd, labels, **SETTINGS[setting])
    torch.testing.assert_close(found, expected)
    assert_alike(got, grads(expected, odd))


def test_without_gradients_only_the_loss_is_made() -> None:
    parts, labels = operands()
    with torch.no_grad(), Made(K) as made:
        loss = fused(parts, labels, trained=N)
    assert made.rows == 0
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(parts, labels).detach())


@pytest.mark.parametrize("n", [0, 1])
def test_no_row_and_one_row(n: int) -> None:
    parts, labels = operands(n=n)
    expected, found = plain(parts, labels), fused(parts, labels)
    torch.testing.assert_close(found, expected)
    assert_alike(grads(found, parts), grads(expected, parts)) if n else grads(found, parts)


@pytest.mark.parametrize("trained", [None, N])
def test_nothing_to_train_on_is_a_loss_and_gradients_of_zero(trained: int | None) -> None:
    parts, labels = operands()
    loss = fused(parts, torch.full_like(labels, -100), trained=trained)
    assert loss == 0
    assert not any(value.any() for value in grads(loss, parts).values())


@pytest.mark.parametrize(("ignored", "computed"), [(2, N), (3, N - 3), (20, N - 20)])
def test_rows_that_do_not_count_are_left_out_from_an_eighth_on(ignored: int, computed: int) -> None:
    parts, labels = operands()
    labels = labels.clamp(min=0)
    labels[torch.randperm(N, generator=torch.Generator().manual_seed(0))[:ignored]] = -100
    parts = {name: parts[name] for name in ("hidden", "weight", "bias")}
    with Made() as made:
        found = fused(parts, labels)
    assert made.rows == computed
    assert_alike(grads(found, parts), grads(plain(parts, labels), parts))


def test_a_bound_on_what_counts_may_be_too_high() -> None:
    parts, labels = operands()
    parts = {name: parts[name] for name in ("hidden", "weight", "bias")}
    labels[3:] = -100
    with Made() as made:
        found = fused(parts, labels, trained=5)
    assert made.rows == 5
    torch.testing.assert_close(found, plain(parts, labels))


def test_a_bound_that_is_too_low_is_loud() -> None:
    parts, labels = operands()
    labels[3:] = -100
    assert fused(parts, labels, trained=3).isfinite()
    assert fused(parts, labels, trained=2).isnan()


@pytest.mark.parametrize("count", [17.0, torch.tensor(17)])
def test_the_mean_over_a_count(count: float | Tensor) -> None:
    parts, labels = operands()
    expected, found = plain(parts, labels) / 17, fused(parts, labels, count=count)
    torch.testing.assert_close(found, expected)
    assert_alike(grads(found, parts), grads(expected, parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_sum_in_float32(dtype: torch.dtype) -> None:
    """Ten thousand rows in many chunks: a sum of chunks in bfloat16 would be off by a percent."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10_000, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(16, 8, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 16, (10_000,), generator=generator)
    wide = {
        "hidden": hidden.detach().double().requires_grad_(),
        "weight": weight.detach().double().requires_grad_(),
    }
    expected = plain(wide, labels)
    found = linear_cross_entropy(hidden, weight, labels, ops=OPS, chunk=50)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)
    got, exact = grads(found / 7, {"hidden": hidden, "weight": weight}), grads(expected / 7, wide)
    assert got["hidden"].dtype == got["weight"].dtype == dtype
    assert float((got["weight"].double() - exact["weight"]).norm() / exact["weight"].norm()) < 4e-3


def test_the_incoming_scalar_is_not_rounded_to_the_gradients_dtype() -> None:
    hidden, weight = (
        torch.ones(300, 4, dtype=torch.bfloat16, requires_grad=True),
        torch.eye(4, dtype=torch.bfloat16),
    )
    once = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, torch.zeros(300, dtype=torch.int64), ops=OPS), hidden
    )[0]
    scalar = 1 + 2**-8 + 2**-9  # 1.0078 in bfloat16
    scaled = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, torch.zeros(300, dtype=torch.int64), ops=OPS) * scalar, hidden
    )[0]
    assert torch.equal(scaled, (once.float() * scalar).bfloat16())
    assert not torch.equal(scaled, once * torch.tensor(scalar).bfloat16())


def test_autocast_decides_the_dtype_of_matmuls_and_gradients_keep_theirs() -> None:
    parts, labels = operands(torch.float32)
    narrow = {name: value.detach().bfloat16().requires_grad_() for name, value in parts.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = fused(parts, labels)
    expected = fused(narrow, labels)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    got = grads(found, parts)
    assert {value.dtype for value in got.values()} == {torch.float32}
    assert_alike(got, {name: value.float() for name, value in grads(expected, narrow).items()}, 3e-2)
    assert bool((got["weight"].bfloat16().float() != got["weight"]).any())  # summed in float32 and left there


def test_the_gradient_is_given_once_and_has_no_derivative() -> None:
    parts, labels = operands()
    loss = fused(parts, labels)
    torch.autograd.grad(loss, parts["hidden"], retain_graph=True)
    with pytest.raises(RuntimeError, match="given away once"):
        torch.autograd.grad(loss, parts["hidden"])
    (grad,) = torch.autograd.grad(fused(parts, labels) ** 2, parts["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("columns", "itemsize", "rows"),
    [(32_000, 2, 4096), (128_256, 2, 4096), (256_000, 2, 2048), (128_256, 4, 2048), (2_000_000, 2, 1024)],
)
def test_chunks_are_large_but_their_logits_fit(columns: int, itemsize: int, rows: int) -> None:
    assert heads.chunk_rows(columns, itemsize) == rows


@each_setting
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_stands_in_for_the_reference(dtype: torch.dtype, setting: str) -> None:
    drawn, labels = operands(dtype)
    parts = {name: value.detach().to(DEVICE).requires_grad_() for name, value in drawn.items()}
    wide = {name: value.detach().double().requires_grad_() for name, value in drawn.items()}
    ops = replace(OPS, cross_entropy_=kernels.cross_entropy_)
    low = (parts["a"], parts["b"], 2.0)
    found = linear_cross_entropy(
        parts["hidden"],
        parts["weight"],
        labels,
        ops=ops,
        bias=parts["bias"],
        low=low,
        chunk=10,
        **SETTINGS[setting],
    )
    expected = plain(wide, labels, **SETTINGS[setting])
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=0)
    assert_alike(
        {name: value.cpu() for name, value in grads(found, parts).items()}, grads(expected, wide), tolerance
    )


# ------------------------------------------------------------------ a vocabulary in slices


class Meeting:
    """A vocabulary over threads, each of which holds a slice."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.barrier, self.brought = sizes, Barrier(len(sizes)), dict[int, Tensor]()

    def run(self, each: Callable[[int, Held], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.sizes)) as pool:
            return list(pool.map(lambda rank: each(rank, Held(self, rank)), range(len(self.sizes))))


@dataclass
class Held:
    """A slice that meets the others in threads: a VocabularySlice."""

    meeting: Meeting
    rank: int

    @property
    def first(self) -> int:
        return sum(self.meeting.sizes[: self.rank])

    @property
    def whole(self) -> int:
        return sum(self.meeting.sizes)

    @property
    def widest(self) -> int:
        return max(self.meeting.sizes)

    def gather(self, x: Tensor) -> Tensor:
        self.meeting.brought[self.rank] = x.clone()
        self.meeting.barrier.wait(10)
        found = torch.stack([self.meeting.brought[rank] for rank in range(len(self.meeting.sizes))])
        self.meeting.barrier.wait(10)
        return found

    def enter_backward(self, dx: Tensor) -> Tensor:
        return self.gather(dx).sum(0)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError


@each_setting
@pytest.mark.parametrize("sizes", [(V,), (20, 20), (13, 1, 26)])
@pytest.mark.parametrize(("chunk", "trained"), [(None, N), (7, N), (7, None)])
def test_slices_of_a_vocabulary_are_the_whole(
    sizes: tuple[int, ...], setting: str, chunk: int | None, trained: int | None
) -> None:
    whole, labels = operands()
    expected = plain(whole, labels, **SETTINGS[setting])
    wanted = grads(expected * 0.3, whole)

    def each(rank: int, part: Held) -> tuple[Tensor, dict[str, Tensor]]:
        rows = slice(part.first, part.first + sizes[rank])
        mine = {
            name: value.detach()[rows if name in ("weight", "bias", "b") else slice(None)]
            for name, value in whole.items()
        }
        mine = {name: value.clone().requires_grad_() for name, value in mine.items()}
        loss = fused(mine, labels, part=part, chunk=chunk, trained=trained, **SETTINGS[setting])
        return loss.detach(), grads(loss * 0.3, mine)

    found = Meeting(sizes).run(each)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach())
    for name in whole:
        parts = [got[name] for _, got in found]
        if name == "hidden":
            assert all(torch.equal(part, parts[0]) for part in parts), "the sum, on every rank"
            joined = parts[0]
        else:
            joined = sum(parts, torch.zeros(())) if name == "a" else torch.cat(parts)
        assert_alike({name: joined}, {name: wanted[name]})


def test_a_small_probability_of_another_slice_is_not_lost_in_bfloat16() -> None:
    """Written over p - 1, a probability of 1e-3 would be wrong by more than itself."""
    hidden, labels = torch.eye(2, dtype=torch.bfloat16).requires_grad_(), torch.tensor([3, 3])
    weight = torch.tensor([[0.0, 1], [2, -1], [3, 0], [7, 8]], dtype=torch.bfloat16)

    def each(rank: int, part: Held) -> Tensor:
        own = weight[2 * rank : 2 * rank + 2].clone().requires_grad_()
        return torch.autograd.grad(linear_cross_entropy(hidden, own, labels, ops=OPS, part=part), own)[0]

    wide = weight.double().requires_grad_()
    (exact,) = torch.autograd.grad(plain({"hidden": hidden.detach().double(), "weight": wide}, labels), wide)
    torch.testing.assert_close(torch.cat(Meeting((2, 2)).run(each)).double(), exact, rtol=2**-6, atol=0)


def test_chunks_of_unequal_slices_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    monkeypatch.setattr(heads, "chunk_rows", lambda columns, itemsize: widths.append(columns) or 7)
    whole, labels = operands()
    hidden, weight = whole["hidden"].detach(), whole["weight"].detach()

    def each(rank: int, part: Held) -> Tensor:
        own = weight[part.first : part.first + part.meeting.sizes[rank]]
        return linear_cross_entropy(hidden, own, labels, ops=OPS, part=part)

    Meeting((13, 1, 26)).run(each)
    assert widths == [26] * 3


def test_scores_of_slices_may_be_far_apart() -> None:
    """Exponentials of each slice are of what its own largest score leaves; nobody's are of the whole."""
    whole, labels = operands()
    hidden, weight = whole["hidden"].detach(), 1e3 * whole["weight"].detach()
    weight[20:] -= 1e3 * hidden.sum(0)
    expected = plain({"hidden": hidden, "weight": weight}, labels)

    def each(rank: int, part: Held) -> Tensor:
        own = weight[part.first : part.first + 20]
        return linear_cross_entropy(hidden, own, labels, ops=OPS, part=part)

    for loss in Meeting((20, 20)).run(each):
        torch.testing.assert_close(loss, expected)


def test_a_label_that_no_slice_holds_is_loud_everywhere() -> None:
    whole, labels = operands()
    labels[0] = V

    def each(rank: int, part: Held) -> Tensor:
        own = whole["weight"].detach()[part.first : part.first + 20]
        return linear_cross_entropy(whole["hidden"].detach(), own, labels, ops=OPS, part=part)

    assert all(loss.isnan() for loss in Meeting((20, 20)).run(each))


# ------------------------------------------------------------------ Hugging Face's models


def training(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model of the zoo that trains, its bias of the vocabulary, where it has one, not zero."""
    model = tiny(name, **changes).to(dtype).train()
    for key, buffer in model.named_buffers():
        if key == "final_logits_bias":
            buffer.normal_(generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_the_models_own(name: str, tied: bool) -> None:
    model, inputs = training(name, tie_word_embeddings=tied), batch(name)
    loss, expected = gradients(model, inputs)
    assert fuse_head(model, OPS)
    assert unmade(model(**inputs).logits)
    found, got = gradients(model, inputs)
    # Llama's own loss is float32
    torch.testing.assert_close(found.double(), loss.double(), rtol=1e-6, atol=0)
    assert_same_gradients(got, expected, 1e-6)


def test_logits_of_the_batch_are_never_there() -> None:
    model = training("llama-causal", torch.float32)
    inputs = batch("llama-causal", rows=8, length=64)
    whole = inputs["labels"].numel() * VOCAB
    with Made() as made:
        model(**inputs).loss.backward()
    assert made.largest >= whole
    fuse_head(model, OPS)
    with pytest.MonkeyPatch.context() as patch, Made() as made:
        patch.setattr(heads, "chunk_rows", lambda *_: 64)
        model(**inputs).loss.backward()
    assert made.largest < whole


@pytest.mark.parametrize("name", ["llama-causal", "t5-seq2seq", "bart-seq2seq", "gemma3-causal"])
def test_logits_that_are_looked_at_are_the_models_own(name: str) -> None:
    model, inputs = training(name), batch(name)
    expected = model(**inputs).logits
    (grad,) = torch.autograd.grad(expected.square().sum(), model.get_output_embeddings().weight)
    fuse_head(model, OPS)
    logits = model(**inputs).logits
    assert (logits.shape, logits.dtype, logits.dim(), logits.made) == (
        expected.shape,
        expected.dtype,
        3,
        None,
    )
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits[0, 1], expected[0, 1])
    assert torch.equal(torch.cat([logits, logits]), torch.cat([expected, expected]))
    assert torch.equal(logits * 2, expected * 2)
    again = model(**inputs).logits
    with torch.no_grad():
        assert torch.equal(again.sum(), expected.sum())
    assert torch.equal(
        torch.autograd.grad(again.square().sum(), model.get_output_embeddings().weight)[0], grad
    )
    assert repr(logits) == repr(expected)


def test_logits_are_made_with_the_autocast_of_their_forward_pass() -> None:
    model, inputs = training("llama-causal", torch.float32), batch("llama-causal")
    fuse_head(model, OPS)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**inputs)
        expected = model(**{**inputs, "labels": None}).logits
    assert output.logits.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(output.logits + 0, expected)
    assert output.loss.dtype == torch.float32


@pytest.mark.parametrize("ask", ["eval", "labels", "keep"])
def test_logits_are_real_where_they_are_asked_for(ask: str) -> None:
    model, inputs = training("llama-causal"), batch("llama-causal")
    fuse_head(model, OPS)
    if ask == "eval":
        model.eval()
    elif ask == "labels":
        del inputs["labels"]
    else:
        inputs |= {"logits_to_keep": 9}
    assert type(model(**inputs).logits) is Tensor


def test_labels_may_be_given_by_position() -> None:
    model, inputs = training("bert-mlm"), batch("bert-mlm")
    fuse_head(model, OPS)
    output = model(
        inputs["input_ids"], inputs["attention_mask"], None, None, None, None, None, inputs["labels"]
    )
    assert isinstance(output.logits, Unmade)


@pytest.mark.parametrize(
    "extra", [{"num_items_in_batch": 11}, {"num_items_in_batch": torch.tensor(5)}, {"shift_labels": True}]
)
def test_what_hugging_faces_loss_takes_counts_alike(extra: dict[str, Any]) -> None:
    model, inputs = training("llama-causal", torch.float32), batch("llama-causal")
    if "shift_labels" in extra:  # all of them count, and not one of the labels does
        extra = {"shift_labels": inputs["input_ids"].roll(-1, 1)}
        inputs["labels"] = torch.full_like(inputs["labels"], -100)
    expected = model(**inputs, **extra).loss
    fuse_head(model, OPS)
    torch.testing.assert_close(model(**inputs, **extra).loss, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"label_smoothing": 0.2},
        {"ignore_index": 7},
        {"weight": torch.arange(float(VOCAB))},
        {"reduction": "none"},
        {"reduction": "sum"},
    ],
)
def test_other_cross_entropies_of_unmade_logits_are_right(settings: dict[str, Any]) -> None:
    model, inputs = training("llama-causal", torch.float32), batch("llama-causal")
    labels = inputs["input_ids"].flatten()
    labels[3] = 7
    expected = F.cross_entropy(model(**inputs).logits.flatten(0, 1), labels, **settings)
    fuse_head(model, OPS)
    logits = model(**inputs).logits
    torch.testing.assert_close(F.cross_entropy(logits.flatten(0, 1), labels, **settings), expected)
    assert (logits.made is None) == ("weight" not in settings)


@pytest.mark.parametrize(
    "of",
    [
        lambda logits: torch.tanh(logits / 3) * 4,
        lambda logits: torch.tanh(logits) * 3,
        lambda logits: torch.tanh(logits / 3).tanh() * 3,
        lambda logits: torch.tanh(logits / 3) * 3 / 3,
        lambda logits: (logits / 3) * 3,
        lambda logits: torch.tanh(logits / 3) * 3 + torch.arange(VOCAB),
        lambda logits: torch.tanh(logits / 3),
    ],
)
def test_what_is_not_quite_a_soft_cap_is_computed(of: Callable[[Tensor], Tensor]) -> None:
    model, inputs = training("llama-causal"), batch("llama-causal")
    labels = inputs["input_ids"].flatten()
    expected = F.cross_entropy(of(model(**inputs).logits).flatten(0, 1), labels)
    fuse_head(model, OPS)
    logits = of(model(**inputs).logits)
    torch.testing.assert_close(F.cross_entropy(logits.flatten(0, 1), labels), expected)
    assert not unmade(logits)


def test_a_slice_of_the_vocabulary_refuses_what_needs_all_classes() -> None:
    model, inputs = training("llama-causal"), batch("llama-causal")
    put_slice(model.lm_head, Held(Meeting((VOCAB,)), 0))
    fuse_head(model, OPS)
    logits = model(**inputs).logits.flatten(0, 1)
    with pytest.raises(UsageError, match="cut across ranks is the plain cross-entropy"):
        F.cross_entropy(logits, inputs["input_ids"].flatten(), weight=torch.ones(VOCAB))


@pytest.mark.parametrize("name", GENERATING)
def test_generate_is_untouched(name: str) -> None:
    model = training(name, torch.float32)
    expected = model.generate(**prompt(name), **GENERATE)
    fuse_head(model, OPS)
    assert torch.equal(model.generate(**prompt(name), **GENERATE), expected)


@pytest.mark.parametrize("name", ["llama-causal", "t5-gated", "bart-seq2seq"])
@pytest.mark.parametrize("state", ["active", "inactive", "merged"])
def test_a_head_tuned_by_lora_gets_its_gradients(name: str, state: str) -> None:
    model, inputs = training(name, tie_word_embeddings=False), batch(name)
    layer = tune(model.lm_head, LoraConfig(r=4))
    nn.init.normal_(layer.lora_B)
    layer.active, layer.merged = state != "inactive", state == "merged"
    model.set_submodule("lm_head", layer)
    loss, expected = gradients(model, inputs)
    fuse_head(model, OPS)
    assert isinstance(model(**inputs).logits, Unmade)
    found, got = gradients(model, inputs)
    torch.testing.assert_close(found.double(), loss.double(), rtol=1e-6, atol=0)
    assert ("lm_head.lora_A" in got) == (state == "active")
    assert_same_gradients(got, expected, 1e-6)


class Odd(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(("case", "reason"), [("dropout", "dropout"), ("odd", "Odd"), ("hook", "hooks")])
def test_what_cannot_be_fused_runs_by_itself_and_says_so_once(
    case: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = training("llama-causal"), batch("llama-causal")
    if case == "dropout":
        model.set_submodule("lm_head", tune(model.lm_head, LoraConfig(r=4, dropout=0.5)))
    elif case == "odd":
        model.lm_head.__class__ = Odd
    else:
        seen: list[Tensor] = []
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    expected = model(**inputs).loss
    fuse_head(model, OPS)
    with caplog.at_level(logging.INFO, "petune"):
        for _ in range(2):
            output = model(**inputs)
    assert type(output.logits) is Tensor
    torch.testing.assert_close(output.loss, expected)
    assert [line for line in caplog.messages if reason in line] == caplog.messages
    assert len(caplog.messages) == 1


def test_dropout_that_is_off_forbids_nothing() -> None:
    model, inputs = training("llama-causal"), batch("llama-causal")
    model.set_submodule("lm_head", tune(model.lm_head, LoraConfig(r=4, dropout=0.5)))
    fuse_head(model, OPS)
    model.lm_head.eval()
    assert isinstance(model(**inputs).logits, Unmade)


def test_a_model_without_a_vocabulary_has_nothing_to_fuse(caplog: pytest.LogCaptureFixture) -> None:
    model = training("llama-classify")
    with caplog.at_level(logging.INFO, "petune"):
        assert not fuse_head(model, OPS)
    assert "no head over a vocabulary" in caplog.text
    unfuse_head(model)


def test_unfusing_leaves_no_trace() -> None:
    model, inputs = training("llama-causal"), batch("llama-causal")
    before = set(model.__dict__)
    fuse_head(model, OPS)
    fuse_head(model, OPS)  # twice is once
    logits = model(**inputs).logits
    unfuse_head(model)
    hooks = (
        model._forward_hooks,
        model._forward_pre_hooks,
        model.lm_head._forward_hooks,
        model.lm_head._forward_pre_hooks,
    )
    assert not any(hooks)
    assert set(model.__dict__) == before
    assert type(model(**inputs).logits) is Tensor
    assert torch.equal(logits + 0, model(**inputs).logits)


def test_after_a_forward_pass_that_fails_the_head_is_itself() -> None:
    model, inputs = training("llama-causal"), batch("llama-causal")
    fuse_head(model, OPS)
    failing = model.lm_head.register_forward_hook(lambda *_: 1 / 0, prepend=True)
    model.petune_fused_head.refusal = lambda: None
    with pytest.raises(ZeroDivisionError):
        model(**inputs)
    failing.remove()
    assert type(model.lm_head(torch.zeros(2, 64, dtype=torch.float64))) is Tensor


def test_a_copy_has_a_head_of_its_own() -> None:
    model, inputs = training("llama-causal"), batch("llama-causal")
    fuse_head(model, OPS)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    torch.testing.assert_close(twin(**inputs).loss, torch.tensor(float(VOCAB), dtype=torch.float64).log())
    unfuse_head(twin)
    assert type(twin(**inputs).logits) is Tensor
    assert isinstance(model(**inputs).logits, Unmade)


# ------------------------------------------------------------------ petune's own loop


@pytest.mark.parametrize(
    ("name", "task"), [("llama-causal", "causal"), ("t5-seq2seq", "seq2seq"), ("bart-seq2seq", "seq2seq")]
)
@pytest.mark.parametrize("known", [False, True])
def test_the_loss_of_the_loop_is_the_sum_over_real_rows(name: str, task: str, known: bool) -> None:
    model, inputs = training(name), batch(name)
    inputs |= {"rows": torch.tensor([0, 1, -1])}
    inputs["labels"][0, :3] = -100
    expected = loss_sum(*real_rows(forward(model, inputs), inputs), task)[0]
    parameters = {
        key: value
        for key, value in model.named_parameters()
        if key.startswith(("model.embed", "shared", "model.shared"))
    }
    wanted = grads(expected, parameters)
    fuse_head(model, OPS)
    trained = int((inputs["labels"] >= 0).sum()) if known else None
    found = head_loss(model, inputs, outputs_of, shift=task == "causal", trained=trained)
    torch.testing.assert_close(found, expected.detach())
    assert_alike(grads(found, parameters), wanted)
    assert type(forward(model, inputs)) is Tensor


def test_the_loss_of_the_loop_is_taken_in_the_autocast_of_its_forward_pass() -> None:
    model, inputs = training("llama-causal", torch.float32), batch("llama-causal")
    fuse_head(model, OPS)
    with torch.autocast("cpu", torch.bfloat16):
        expected = head_loss(model, inputs, outputs_of, shift=True)

    def ask(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return outputs_of(model, batch)

    assert torch.equal(head_loss(model, inputs, ask, shift=True), expected)


def test_the_loss_of_the_loop_is_right_where_the_head_runs_by_itself() -> None:
    model, inputs = training("llama-causal"), batch("llama-causal")
    expected = loss_sum(forward(model, inputs), inputs, "causal")[0]
    model.lm_head.register_forward_hook(lambda *_: None)
    fuse_head(model, OPS)
    torch.testing.assert_close(head_loss(model, inputs, outputs_of, shift=True), expected)


def test_the_loss_of_the_loop_over_slices_of_the_vocabulary() -> None:
    name, sizes = "llama-causal", (50, VOCAB - 50)
    inputs, whole = batch(name), training(name, tie_word_embeddings=False)
    expected = loss_sum(forward(whole, inputs), inputs, "causal")[0]
    models = [copy.deepcopy(whole) for _ in sizes]

    def each(rank: int, part: Held) -> tuple[Tensor, Tensor]:
        model = models[rank]
        model.lm_head.weight = nn.Parameter(
            model.lm_head.weight.detach()[part.first : part.first + sizes[rank]].clone()
        )
        put_slice(model.lm_head, part)
        fuse_head(model, OPS)
        loss = head_loss(model, inputs, outputs_of, shift=True)
        return loss.detach(), torch.autograd.grad(loss, model.lm_head.weight)[0]

    found = Meeting(sizes).run(each)
    assert all(torch.allclose(loss, expected) for loss, _ in found)
    torch.testing.assert_close(
        torch.cat([grad for _, grad in found]), torch.autograd.grad(expected, whole.lm_head.weight)[0]
    )


# ------------------------------------------------------------------ on a device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_is_never_waited_for() -> None:
    from petune.kernels.dispatch import triton_ops

    parts, labels = operands(torch.float32, 4096)
    parts = {name: value.detach().cuda().bfloat16().requires_grad_() for name, value in parts.items()}
    expected = grads(plain({name: value.double() for name, value in parts.items()}, labels.cuda()), parts)
    low, ready = (parts["a"], parts["b"], 2.0), labels.cuda()
    # compiles
    linear_cross_entropy(
        parts["hidden"], parts["weight"], ready, ops=triton_ops(), bias=parts["bias"], low=low
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(
            parts["hidden"],
            parts["weight"],
            ready,
            ops=triton_ops(),
            bias=parts["bias"],
            low=low,
            trained=3100,
        )
        found = grads(loss, parts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_alike(found, expected, 3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_labels_on_a_device_are_counted_on_the_way_and_rows_left_out() -> None:
    model = training("llama-causal", torch.bfloat16).cuda()
    inputs = {key: value.cuda() for key, value in batch("llama-causal", rows=8, length=64).items()}
    inputs["labels"][:, :40] = -100
    expected = model(**inputs).loss
    fuse_head(model, OPS)
    with Made(VOCAB) as made:
        loss = model(**inputs).loss
    torch.testing.assert_close(loss, expected.float(), rtol=1e-2, atol=0)
    assert made.rows == int((inputs["labels"] >= 0).sum())
