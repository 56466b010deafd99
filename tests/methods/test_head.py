"""A head alone on a frozen model: it trains as Hugging Face's own does behind a base without gradients, with
a cache and without, over fused blocks and over the model's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import petune
from petune.errors import UsageError
from petune.methods import merge, tuned_parameters, tuned_state, wrap
from petune.methods.activation_cache import ActivationCache
from petune.models.stack import stacks_in
from tests.methods.references import (
    DROPS,
    adamw_steps,
    blocks_below_a_head_make_no_node,
    head_trains_behind_a_base_without_gradients,
    probed,
)
from tests.methods.zoo import batch, stir, tiny

long = pytest.mark.long
HEADED = [
    *("bert-classify", "t5-classify", "llama-classify"),
    *(pytest.param(name, marks=long) for name in ("bert-tokens", "bart-classify", "gemma3-classify")),
]


@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize("name", HEADED)
def test_three_steps_are_hugging_faces_on_a_base_without_gradients(name: str, kernels: Any) -> None:
    head_trains_behind_a_base_without_gradients(name, kernels)


def test_a_block_that_declines_below_a_head_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.block.module.say", said.append)
    model = wrap(tiny("bert-classify"), "head", kernels="reference").train()
    for _ in range(2):
        model(**batch("bert-classify"), output_attentions=True)
    assert len(said) == 1 and said[0].endswith("runs unfused: attention probabilities are asked for")


def test_fused_blocks_have_a_forward_pass_alone_and_fill_no_cache_of_keys() -> None:
    blocks_below_a_head_make_no_node()


@pytest.mark.crossed(1)
@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize("base_dtype", [None, "int8"])
@pytest.mark.parametrize("name", ["bert-classify", "bart-classify", "t5-classify", "llama-classify"])
def test_a_cached_head_trains_bit_by_bit_as_without_and_runs_each_row_once(
    name: str, base_dtype: Any, kernels: Any, tmp_path: Path
) -> None:
    model, twin = (probed(name, kernels=kernels, base_dtype=base_dtype) for _ in range(2))
    with ActivationCache(model, tmp_path) as cache:
        found = adamw_steps(model, name, 6)
    assert all(map(torch.equal, found, adamw_steps(twin, name, 6)))
    assert all(map(torch.equal, tuned_state(model).values(), tuned_state(twin).values()))
    assert cache.counts.read == 2 * cache.counts.computed > 0 == cache.counts.passed_by


def test_the_base_stands_still_while_its_head_drops_out() -> None:
    model = wrap(tiny("bert-classify", hidden_dropout_prob=0.5), "head", also_train=("pooler", "classifier"))
    seen: dict[str, bool] = {}
    for part in ("bert.encoder.layer.0", "bert.embeddings", "bert.pooler", "dropout"):
        model.get_submodule(part).register_forward_hook(
            lambda module, args, output, part=part: seen.update({part: module.training})
        )
    model.train()
    model(**batch("bert-classify")).loss.backward()
    assert seen == {
        "bert.embeddings": False,
        "bert.encoder.layer.0": False,
        "bert.pooler": True,
        "dropout": True,
    }
    assert all(value.grad is not None for value in tuned_parameters(model).values())


@pytest.mark.parametrize(
    ("name", "also_train", "trains"),
    [
        ("bert-classify", ("pooler", "classifier"), "bert.pooler.dense.weight"),
        ("llama-causal", ("lm_head",), "lm_head.weight"),
        ("t5-classify", ("decoder.final_layer_norm",), "transformer.decoder.final_layer_norm.weight"),
    ],
)
def test_what_works_behind_the_last_block_trains_when_it_is_named(
    name: str, also_train: tuple[str, ...], trains: str, tmp_path: Path
) -> None:
    model, twin = (wrap(tiny(name), "head", also_train=also_train).train() for _ in range(2))
    assert trains in tuned_parameters(model)
    with ActivationCache(model, tmp_path) as cache:
        torch.testing.assert_close(
            adamw_steps(model, name, 4), adamw_steps(twin, name, 4), rtol=1e-6, atol=1e-6
        )
    assert cache.counts.read == cache.counts.computed > 0


@pytest.mark.parametrize(
    ("name", "also_train", "where"),
    [
        ("bert-classify", ("embeddings",), "bert.embeddings.word_embeddings.weight"),
        ("bert-classify", ("layer.1.output",), "bert.encoder.layer.1.output.dense.weight"),
        ("t5-classify", ("encoder.final_layer_norm",), "transformer.encoder.final_layer_norm.weight"),
        ("bert-mlm", ("decoder",), "cls.predictions.decoder.weight"),
        ("bart-classify", ("layernorm_embedding",), "model.encoder.layernorm_embedding.weight"),
    ],
)
def test_what_is_read_before_the_last_block_ends_is_refused(
    name: str, also_train: tuple[str, ...], where: str
) -> None:
    model = tiny(name)
    with pytest.raises(UsageError, match="works behind the last block alone") as caught:
        wrap(model, "head", also_train=also_train)
    assert where in [problem.where for problem in caught.value.problems]
    assert not stacks_in(model), "the model is as it was"


@pytest.mark.parametrize("name", ["llama-causal", "bert-mlm", "t5-seq2seq"])
def test_a_language_model_has_no_head_of_a_task(name: str) -> None:
    with pytest.raises(UsageError, match=f"{type(tiny(name)).__name__} has nothing"):
        wrap(tiny(name), "head")


def test_a_model_of_no_family_and_memory_of_no_backward_pass_are_refused() -> None:
    with pytest.raises(UsageError, match="head needs a model family"):
        wrap(nn.Linear(2, 2), "head")
    with pytest.raises(UsageError, match="under head they have none"):
        wrap(tiny("bert-classify"), "head", memory="input")


@pytest.mark.parametrize("kernels", ["off", "reference"])
def test_a_merged_head_is_a_plain_model_that_trains_whole(kernels: Any) -> None:
    name = "bert-classify"
    model, plain = probed(name, kernels=kernels), tiny(name, **DROPS["bert"])
    stir(model, std=0.1)
    for own, value in tuned_state(model).items():
        plain.get_parameter(own).data.copy_(value)
    merged = merge(model)
    assert type(merged) is type(plain) and not stacks_in(merged) and not merged.base_model._forward_pre_hooks
    assert all(value.requires_grad for value in merged.parameters())
    assert torch.equal(merged.eval()(**batch(name)).logits, plain.eval()(**batch(name)).logits)
    losses = []
    for one in (merged, plain):
        torch.manual_seed(5)
        losses.append(one.train()(**batch(name)).loss)
        losses[-1].backward()
    assert torch.equal(*losses), "dropout of the base is on again"
    assert merged.bert.encoder.layer[0].output.dense.weight.grad is not None


def test_a_head_is_saved_alone_and_read_on_its_base_but_by_no_peft(tmp_path: Path) -> None:
    name = "llama-classify"
    model = probed(name)
    stir(model, std=0.1)
    petune.save(model, tmp_path / "tuned")
    again = petune.load(tiny(name), tmp_path / "tuned")
    assert list(tuned_state(again)) == ["score.weight"]
    assert torch.equal(model.eval()(**batch(name)).logits, again.eval()(**batch(name)).logits)
    assert all(stack.still for stack in stacks_in(again).values())
    with pytest.raises(UsageError, match="peft has no file for head"):
        petune.saving.export.write_peft(model, tmp_path / "peft")


def test_a_copy_of_a_model_with_a_head_stands_still_by_itself() -> None:
    model = wrap(tiny("bert-classify", hidden_dropout_prob=0.5), "head", also_train=("pooler",)).train()
    copied = copy.deepcopy(model)
    inputs = batch("bert-classify")
    copied(**inputs)
    assert not copied.bert.encoder.training and copied.bert.pooler.training
    assert model.bert.encoder.training, "the original was asked nothing"
