"""Below a head of classes an activation cache keeps what the head reads, a vector or two of a row, and losses
and gradients are to the bit those of a run without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    OPTConfig,
    OPTForSequenceClassification,
)

from petune.methods import held_levels, tuned_parameters, wrap
from petune.methods.activation_cache import ActivationCache
from petune.methods.head_rows import Picked, head_rows
from petune.methods.stack_levels import stack_bytes
from petune.models import FAMILIES
from petune.models.stack import Stack, stacks_in
from tests.methods.more_models import GPT2, OPT
from tests.methods.references import adamw_steps
from tests.methods.zoo import batch, tiny

long = pytest.mark.long
OWN: dict[str, Any] = {
    "gpt2-classify": (GPT2ForSequenceClassification, GPT2Config, GPT2),
    "opt-classify": (OPTForSequenceClassification, OPTConfig, OPT),
}
READS: list[tuple[str, dict[str, Any], str]] = [
    ("modernbert-classify", {"classifier_pooling": "mean"}, "mean"),
    ("dinov2-classify", {}, "first and mean"),
    ("t5-classify", {}, "end"),
    ("llama-classify", {}, "last"),
    ("bert-classify", {}, "first"),
]
MORE_READS: list[tuple[str, dict[str, Any], str]] = [
    ("modernbert-classify", {"classifier_pooling": "cls"}, "first"),
    ("eurobert-classify", {"classifier_pooling": "bos"}, "first"),
    ("eurobert-classify", {"classifier_pooling": "mean"}, "mean"),
    *((f"{name}-classify", {}, "first") for name in ("vit", "distilbert", "deberta", "xlm_roberta")),
    *((f"{name}-classify", {}, "last") for name in ("gemma3", "qwen3", "mistral", "gpt2", "opt")),
    ("bart-classify", {}, "end"),
]


def headed(name: str, *, also_train: tuple[str, ...] | None = None, **changes: Any) -> Any:
    """A model of the zoo in training mode, of which the head alone trains."""
    if name in OWN:
        kind, config, sizes = OWN[name]
        torch.manual_seed(0)
        model = kind(config(**{**sizes, "num_labels": 3, "pad_token_id": 0, **changes}))
    else:
        model = tiny(name, **changes)
    return wrap(model, "head", **({} if also_train is None else {"also_train": also_train})).train()


def learned(model: nn.Module, inputs: list[dict[str, Tensor]], epochs: int = 2) -> list[Tensor]:
    """The losses of AdamW's steps on these batches in turns, and what came of the head."""
    optimizer = torch.optim.AdamW(tuned_parameters(model).values(), lr=1e-2)
    losses = []
    for one in inputs * epochs:
        optimizer.zero_grad()
        loss = model(**one).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(value.detach() for value in tuned_parameters(model).values())]


@pytest.mark.parametrize(
    ("name", "changes", "kind"), [*READS, *(pytest.param(*one, marks=long) for one in MORE_READS)]
)
def test_a_row_is_what_the_head_reads_and_trains_it_bit_by_bit_as_without(
    name: str, changes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    model, twin = headed(name, **changes), headed(name, **changes)
    inputs = [batch("llama-classify" if name in OWN else name, seed=seed) for seed in (1, 9)]
    with ActivationCache(model, tmp_path) as cache:
        found = learned(model, inputs)
        *_, level = (one for one in cache.levels[model].values() if one.kept)
        assert level.picks is not None and level.picks.kind == kind
        expected = 6 * level.picks.count * level.width * 4
        stacks = stacks_in(model).values()
        own = cache.own_bytes({stack.name: (99, 6) for stack in stacks}, torch.float32)
        assert cache.nbytes == expected == own
        assert expected == sum(stack_bytes(model, one, "auto", torch.float32, 99, 6) for one in stacks)
    assert all(map(torch.equal, found, learned(twin, inputs)))
    assert cache.counts.read == cache.counts.computed > 0 == cache.counts.passed_by


@pytest.mark.parametrize("name", ["llama-classify", "t5-classify", "bert-classify"])
def test_a_head_reads_no_other_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last token that is no padding is none by the mask, and a text has several ends."""
    model, inputs = headed(name), batch(name)
    inputs["input_ids"][0, [0, 2]] = 2
    if name == "llama-classify":
        inputs["input_ids"][0, 7:] = 0
        inputs["attention_mask"][0, 5:] = 0
    else:
        inputs["input_ids"][1:, 0] = inputs["input_ids"][1:, 2] = 2
    expected = model(**inputs).logits
    spread = Picked.spread

    def poisoned(self: Picked, kept: Tensor) -> Tensor:
        whole = spread(self, kept)
        return torch.where(whole == 0, torch.nan, whole)

    monkeypatch.setattr(Picked, "spread", poisoned)
    with ActivationCache(model, tmp_path) as cache:
        for _ in range(2):
            assert torch.equal(model(**inputs).logits, expected)
    assert cache.counts.read > 0


@pytest.mark.parametrize("dtype", ["fp8", pytest.param("bf16", marks=long)])
@pytest.mark.parametrize(
    "name", ["bert-classify", "dinov2-classify", pytest.param("llama-classify", marks=long)]
)
def test_the_pass_that_rounds_what_a_head_reads_computes_as_those_that_read_it(
    name: str, dtype: Any, tmp_path: Path
) -> None:
    model, inputs = headed(name), batch(name)
    exact = model(**inputs).logits
    with ActivationCache(model, tmp_path, dtype) as cache:
        first, second = (model(**inputs).logits for _ in range(2))
        width, rows = model.config.hidden_size, 6 if name == "dinov2-classify" else 3
        assert cache.nbytes == rows * {"fp8": width + 4, "bf16": 2 * width}[dtype]
    assert torch.equal(first, second) and not torch.equal(first, exact)
    torch.testing.assert_close(first, exact, rtol=0.15, atol=0.05)


def test_rows_in_other_batches_padded_on_either_side_are_met_again(tmp_path: Path) -> None:
    name = "modernbert-classify"
    model, wide = headed(name, classifier_pooling="mean"), batch(name)
    narrow = {key: value[1:2] if key == "labels" else value[1:2, :7] for key, value in wide.items()}
    expected = model(**narrow).logits
    with ActivationCache(model, tmp_path) as cache:
        model(**wide)
        torch.testing.assert_close(model(**narrow).logits, expected, rtol=1e-5, atol=1e-6)
        assert cache.counts.read == 1
    with ActivationCache(headed(name, classifier_pooling="cls"), tmp_path) as cache:
        cache.models[0](**wide)
        assert cache.counts.read == 0, "what another head reads is another row"


def test_the_first_place_of_a_row_padded_in_front_is_read_as_it_was_computed(tmp_path: Path) -> None:
    model, inputs = headed("bert-classify"), batch("bert-classify")
    inputs |= {key: inputs[key].flip(1) for key in ("input_ids", "attention_mask")}
    expected = model(**inputs).logits
    with ActivationCache(model, tmp_path) as cache:
        assert all(torch.equal(model(**inputs).logits, expected) for _ in range(2))
        assert cache.counts.read == 3


def test_stages_keep_what_they_hand_on_and_the_last_one_what_the_head_reads() -> None:
    model = headed("t5-classify")
    encoder, decoder = stacks_in(model).values()

    def size(stack: Stack, lasts: set[int]) -> int:
        return stack_bytes(model, stack, "bf16", torch.float32, 10, 3, lasts)

    assert (size(encoder, set()), size(decoder, set())) == (0, 3 * 128)
    assert (size(encoder, {0, 1}), size(decoder, {0, 1})) == (2 * 10 * 128, 10 * 128 + 3 * 128)


@pytest.mark.parametrize(
    ("name", "also_train", "changes"),
    [
        ("bert-tokens", None, {}),
        ("modernbert-classify", ("final_norm", "head", "classifier"), {"classifier_pooling": "mean"}),
        ("llama-causal", ("lm_head",), {}),
        pytest.param("eurobert-classify", None, {"classifier_pooling": "late"}, marks=long),
    ],
)
def test_every_token_is_kept_where_the_head_or_what_trains_before_it_reads_all(
    name: str, also_train: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    model, twin = (headed(name, also_train=also_train, **changes) for _ in range(2))
    with ActivationCache(model, tmp_path) as cache:
        found = adamw_steps(model, name, 4)
        tokens = sum(int(batch(name, seed=seed)["attention_mask"].sum()) for seed in (0, 1))
        (stack,) = stacks_in(model).values()
        assert cache.nbytes == tokens * 64 * 4 == cache.own_bytes({stack.name: (tokens, 6)}, torch.float32)
    assert head_rows(model, FAMILIES[model.config.model_type]) is None
    assert all(map(torch.equal, found, adamw_steps(twin, name, 4)))
    assert stack_bytes(model, stack, "auto", torch.float32, tokens, 6) == tokens * 64 * 4


def test_a_head_or_a_pooler_of_ones_own_reads_what_nobody_knows() -> None:
    class Mean(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.mean(1)

    class Own(BertForSequenceClassification):  # type: ignore[misc]  # transformers has no types
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    pooled, own = tiny("bert-classify"), tiny("bert-classify")
    pooled.bert.pooler = Mean()
    own.__class__ = Own
    for model in (pooled, own):
        assert head_rows(wrap(model, "head"), FAMILIES["bert"]) is None


def test_no_row_of_an_encoder_is_kept_that_is_not_read_below_a_head(tmp_path: Path) -> None:
    name = "t5-seq2seq"
    norm = ("decoder.final_layer_norm",)
    model, twin = (wrap(tiny(name), "head", also_train=norm).train() for _ in range(2))
    with ActivationCache(model, tmp_path) as cache:
        found = adamw_steps(model, name, 4)
        assert [len(level.kept) for level in cache.levels[model].values()] == [1, 0]
        assert not list(tmp_path.glob("*/encoder*"))
    assert all(map(torch.equal, found, adamw_steps(twin, name, 4)))
    assert cache.counts.read == cache.counts.computed > 0


@pytest.mark.parametrize("name", ["bert-classify", "dinov2-classify"])
def test_rows_that_stay_on_a_device_are_those_of_the_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_levels, "free_bytes", lambda device: 2**30)
    model, inputs = headed(name), batch(name)
    expected = model(**inputs).logits
    with ActivationCache(model, tmp_path) as cache:
        for _ in range(2):
            assert torch.equal(model(**inputs).logits, expected)
        assert cache.held_bytes == cache.nbytes > 0
        assert cache.counts.read == cache.counts.computed == 3
