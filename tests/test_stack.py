"""The stack in place of a module list: same names, same numbers, one call for all blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from petune.errors import UsageError
from petune.models import family_of
from petune.models.spec import find_sites, stack_paths
from petune.models.stack import Stack, disown_stacks, own_stacks
from tests.methods.zoo import FOUR, GENERATE, GENERATING, ZOO, assert_same_gradients, batch, gradients, prompt, tiny


def owned(name: str, **changes: Any) -> Any:
    model = tiny(name, **changes)
    own_stacks(model, family_of(model))  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("name", ZOO)
def test_loss_logits_and_gradients_are_those_of_the_plain_list(name: str) -> None:
    base, model = tiny(name), owned(name)
    assert torch.equal(model(**batch(name)).logits, base(**batch(name)).logits)
    loss, found = gradients(model, batch(name))
    expected_loss, expected = gradients(base, batch(name))
    assert torch.equal(loss, expected_loss)
    assert_same_gradients(found, expected, 0)


@pytest.mark.parametrize("name", FOUR)
def test_names_and_state_dict_do_not_change(name: str) -> None:
    base, model = tiny(name), owned(name)
    assert [key for key, _ in model.named_modules()] == [key for key, _ in base.named_modules()]
    assert list(model.state_dict()) == list(base.state_dict())
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in base.named_parameters()]
    model.load_state_dict(tiny(name, seed=3).state_dict(), strict=True)
    assert torch.equal(model(**batch(name)).logits, tiny(name, seed=3)(**batch(name)).logits)
    assert find_sites(model, family_of(model))  # type: ignore[arg-type]


def test_a_stack_iterates_as_one_block_and_is_indexed_as_its_blocks() -> None:
    base = tiny("llama-causal", num_hidden_layers=3)
    blocks = list(base.model.layers)
    stack = own_stacks(base, family_of(base))["decoder"]  # type: ignore[arg-type]
    assert base.model.layers is stack
    assert list(stack) == [stack]
    assert list(stack[:3]) == [stack]
    assert stack.blocks == blocks
    assert len(stack) == 3
    assert [stack[0], stack[1], stack[-1]] == [blocks[0], blocks[1], blocks[2]]
    with pytest.raises(IndexError):
        stack[3]


def test_repr_shows_the_blocks_once() -> None:
    text = repr(owned("llama-causal").model.layers)
    assert text.startswith("Stack(")
    assert text.count("LlamaDecoderLayer(") == 2


def test_owning_twice_is_owning_once() -> None:
    model = tiny("bart-seq2seq")
    first = own_stacks(model, family_of(model))  # type: ignore[arg-type]
    again = own_stacks(model, family_of(model))  # type: ignore[arg-type]
    assert set(first) == {"encoder", "decoder"}
    assert all(again[name] is stack for name, stack in first.items())


@pytest.mark.parametrize("name", FOUR)
def test_disowning_puts_plain_lists_back(name: str) -> None:
    base, model = tiny(name), owned(name)
    disown_stacks(model)
    assert [(key, type(module)) for key, module in model.named_modules()] == [(key, type(module)) for key, module in base.named_modules()]
    assert not any(isinstance(module, Stack) for module in model.modules())
    assert torch.equal(model(**batch(name)).logits, base(**batch(name)).logits)
    assert all(type(model.get_submodule(path)) is nn.ModuleList for path in stack_paths(model, family_of(model)).values())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FOUR)
def test_a_deep_copy_stands_alone(name: str) -> None:
    model = owned(name)
    twin, expected = copy.deepcopy(model), model(**batch(name)).logits
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    assert torch.equal(twin(**batch(name)).logits, expected)


@pytest.mark.parametrize("name", FOUR)
def test_hidden_states_and_attentions_are_recorded_as_before(name: str) -> None:
    asked = {**batch(name), "output_hidden_states": True}
    base, model = tiny(name)(**asked), owned(name)(**asked)
    for field in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        if getattr(base, field, None) is not None:
            assert len(getattr(model, field)) == len(getattr(base, field)) == 3
            assert all(torch.equal(one, other) for one, other in zip(getattr(model, field), getattr(base, field), strict=True))


@pytest.mark.parametrize("name", FOUR)
def test_a_stack_that_recomputes_changes_no_bit(name: str) -> None:
    model = owned(name).train()
    inputs: dict[str, Any] = batch(name) | ({} if name.startswith("bert") else {"use_cache": False})
    loss, expected = gradients(model, inputs)
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        stack.recompute = True
    again, found = gradients(model, inputs)
    assert torch.equal(again, loss)
    assert_same_gradients(found, expected, 0)


@pytest.mark.parametrize("name", FOUR)
def test_gradient_checkpointing_changes_no_bit_where_blocks_compute_the_same_way(name: str) -> None:
    # Hugging Face's checkpointing leaves the cache out, whose tensors have other strides, and gives T5's cross-attention a bias with a
    # gradient, for which scaled_dot_product_attention takes another kernel. So no cache here, and T5 with eager attention.
    inputs: dict[str, Any] = batch(name) | ({} if name.startswith("bert") else {"use_cache": False})
    model = owned(name, attn_implementation="eager" if name.startswith("t5") else "sdpa").train()
    loss, expected = gradients(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, found = gradients(model, inputs)
    assert torch.equal(again, loss)
    assert_same_gradients(found, expected, 0)


def test_gradient_checkpointing_of_t5_changes_only_the_rounding_of_its_attention() -> None:
    model = owned("t5-seq2seq").double().train()
    loss, expected = gradients(model, batch("t5-seq2seq"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, found = gradients(model, batch("t5-seq2seq"))
    torch.testing.assert_close(again, loss, rtol=1e-12, atol=0)
    assert_same_gradients(found, expected, 1e-12)


@pytest.mark.parametrize("name", [name for name in FOUR if name.startswith(("t5", "bart"))])
def test_reentrant_checkpointing_beside_an_encoder_is_refused_with_the_remedy(name: str) -> None:
    model = owned(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UsageError, match=r"reentrant.*\n?.*use_reentrant"):
        model(**batch(name), use_cache=False)


@pytest.mark.parametrize("name", GENERATING)
def test_generation_is_that_of_the_plain_list(name: str) -> None:
    for beams in (1, 3):
        settings = {**GENERATE, "num_beams": beams}
        assert torch.equal(owned(name).generate(**prompt(name), **settings), tiny(name).generate(**prompt(name), **settings))


@pytest.mark.parametrize("setting", ["encoder_layerdrop", "decoder_layerdrop"])
def test_layer_drop_is_refused_with_the_remedy(setting: str) -> None:
    """Hugging Face draws once for each element of the list, and would drop the whole stack."""
    model = tiny("bart-seq2seq", **{setting: 0.1})
    with pytest.raises(UsageError, match=rf"config\.{setting} = 0\.1(.|\n)*set config\.{setting} = 0"):
        own_stacks(model, family_of(model))  # type: ignore[arg-type]
    assert not any(isinstance(module, Stack) for module in model.modules())


def test_mixed_attention_types_are_refused() -> None:
    """A stack is handed one mask; full and sliding attention need two."""
    mixed = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 4}
    model = tiny("qwen2-causal", **mixed)
    with pytest.raises(UsageError, match="full_attention, sliding_attention"):
        own_stacks(model, family_of(model))  # type: ignore[arg-type]
    assert not any(isinstance(module, Stack) for module in model.modules())


def test_blocks_that_all_slide_get_their_mask() -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 4}
    base = tiny("qwen2-causal", **sliding)
    expected = base(**batch("qwen2-causal")).logits
    assert not torch.allclose(expected, tiny("qwen2-causal")(**batch("qwen2-causal")).logits)
    assert torch.equal(owned("qwen2-causal", **sliding)(**batch("qwen2-causal")).logits, expected)


def test_the_mistral_window_reaches_the_blocks() -> None:
    base = tiny("mistral-causal", sliding_window=4)
    expected = base(**batch("mistral-causal")).logits
    assert torch.equal(owned("mistral-causal", sliding_window=4)(**batch("mistral-causal")).logits, expected)
