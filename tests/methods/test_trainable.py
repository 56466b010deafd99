"""What trains, under which names, and passing a method by."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

from petune.errors import UsageError
from petune.methods import (
    describe,
    frozen_tensors,
    mark_only_trainable,
    tuned_parameters,
    tuned_state,
    without_tuning,
    wrap,
)
from tests.methods.zoo import FOUR, SETTINGS, batch, gradients, stir, tiny

METHODS = tuple(SETTINGS)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FOUR)
def test_exactly_the_tuned_parameters_train_and_every_one_gets_a_gradient(name: str, method: str) -> None:
    model = wrap(tiny(name), method, **SETTINGS[method])
    tuned = tuned_parameters(model)
    assert {key for key, value in model.named_parameters() if value.requires_grad} == set(tuned)
    assert set(tuned_state(model)) == set(tuned)
    stir(model, std=0.05)
    _, found = gradients(model, batch(name))
    assert found.keys() == tuned.keys()


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", ["lora", "adapter", "side"])
@pytest.mark.parametrize("name", FOUR)
def test_frozen_and_tuned_tensors_are_the_whole_state_and_frozen_ones_are_the_base(
    name: str, method: str
) -> None:
    base, model = tiny(name).state_dict(), wrap(tiny(name), method, **SETTINGS[method])
    frozen, tuned = frozen_tensors(model), tuned_state(model)
    assert not frozen.keys() & tuned.keys()
    assert frozen.keys() | tuned.keys() == model.state_dict().keys()
    assert base.keys() <= model.state_dict().keys()
    assert all(torch.equal(value, base[key]) for key, value in frozen.items())


def test_a_tied_tensor_is_not_frozen_under_its_other_name() -> None:
    model = wrap(tiny("bart-seq2seq"), "full")
    assert not {key for key in frozen_tensors(model) if key.endswith("weight")}


@pytest.mark.parametrize("method", METHODS)
def test_marking_undoes_what_others_did_to_the_flags(method: str) -> None:
    model = wrap(tiny("bert-classify"), method, **SETTINGS[method])
    wanted = set(tuned_parameters(model))
    for flag in (True, False):
        model.requires_grad_(flag)
        mark_only_trainable(model)
        assert {key for key, value in model.named_parameters() if value.requires_grad} == wanted


def test_marking_has_its_aliases() -> None:
    petune = importlib.import_module("petune")
    for alias in (
        "mark_only_lora_as_trainable",
        "mark_only_adapter_as_trainable",
        "mark_only_side_as_trainable",
    ):
        assert getattr(petune, alias) is petune.mark_only_trainable


def test_marking_needs_a_wrapped_model() -> None:
    with pytest.raises(UsageError, match="not wrapped"):
        mark_only_trainable(tiny("bert-classify"))


def test_tuned_state_is_detached_and_shares_memory() -> None:
    model = wrap(tiny("bert-classify"), "lora", r=4)
    for name, value in tuned_state(model).items():
        assert not value.requires_grad
        assert value.data_ptr() == model.get_parameter(name).data_ptr()


def test_counts_are_those_of_the_formula() -> None:
    base = sum(value.numel() for value in tiny("llama-causal").parameters())
    model = wrap(tiny("llama-causal"), "lora", r=4)
    # r x (in + out) of q and o; k and v; gate, up and down
    per_block = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96))
    assert sum(value.numel() for value in tuned_state(model).values()) == 2 * per_block
    assert f"trainable {2 * per_block:,} / {base + 2 * per_block:,}" in describe(model)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", ["lora", "adapter", "side"])
@pytest.mark.parametrize("name", FOUR)
def test_without_tuning_is_the_base_and_comes_back_on_an_exception(name: str, method: str) -> None:
    inputs = batch(name)
    base = tiny(name).requires_grad_(False)
    model = wrap(copy.deepcopy(base), method, **SETTINGS[method], also_train=())
    stir(model)
    tuned = model(**inputs).logits
    assert not torch.equal(tuned, base(**inputs).logits)
    with pytest.raises(KeyError), without_tuning(model):
        assert torch.equal(model(**inputs).logits, base(**inputs).logits)
        raise KeyError
    assert torch.equal(model(**inputs).logits, tuned)


def test_full_has_no_base_to_go_back_to() -> None:
    with (
        pytest.raises(UsageError, match="no untouched base"),
        without_tuning(wrap(tiny("bert-classify"), "full")),
    ):
        pass


def test_a_tied_pair_trained_whole_is_one_parameter_under_two_names() -> None:
    """Both names are saved, as a file must have them; the optimizer, the norm and the clipping see the tensor
    once."""
    model = wrap(
        tiny("llama-causal", tie_word_embeddings=True), "lora", r=4, also_train=("lm_head", "embed_tokens")
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    parameters = tuned_parameters(model)
    assert len({id(value) for value in parameters.values()}) == len(parameters)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(tuned_state(model))
    assert {"lm_head.weight", "model.embed_tokens.weight"} & set(parameters)


def test_a_head_that_is_tied_to_a_frozen_table_is_refused_before_it_trains() -> None:
    model = tiny("llama-causal", tie_word_embeddings=True)
    for method in ("lora", "ia3"):  # whose files are peft's
        with pytest.raises(UsageError, match=r"(?s)lm_head is trained whole and tied to .*name both"):
            wrap(model, method, also_train=("lm_head",))
    wrap(model, "adapter", also_train=("lm_head",))
