"""The stack in place of a module list: same names, same numbers, one port for each block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from petune.errors import UsageError
from petune.models import family_of
from petune.models.sites import find_sites
from petune.models.spec import stack_paths
from petune.models.stack import Stack, disown_stacks, own_stacks
from tests.methods.zoo import (
    FOUR,
    GENERATE,
    GENERATING,
    ZOO,
    assert_same_gradients,
    batch,
    gradients,
    prompt,
    tiny,
)

SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4}


def owned(name: str, **changes: Any) -> Any:
    model = tiny(name, **changes)
    own_stacks(model, family_of(model))  # type: ignore[arg-type]
    return model


# one model of each family; the others have another head
FAMILIES = {config: name for name, (_, config, _) in ZOO.items()}.values()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.long) for name in ZOO]
)
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


def test_a_stack_iterates_as_its_blocks_and_is_indexed_as_them() -> None:
    base = tiny("llama-causal", num_hidden_layers=3)
    blocks = list(base.model.layers)
    stack = own_stacks(base, family_of(base))["decoder"]  # type: ignore[arg-type]
    assert base.model.layers is stack
    assert stack.blocks == blocks
    assert len(stack) == len(list(stack)) == len(stack[:3]) == 3
    for port, block in zip(stack, blocks, strict=True):
        assert isinstance(port, type(block)) and isinstance(port, nn.Module)
        assert port.self_attn is block.self_attn
        assert list(port.state_dict()) == list(block.state_dict())
        port.seen = True  # type: ignore[assignment]
        assert block.seen
    assert [stack[0], stack[1], stack[-1]] == [blocks[0], blocks[1], blocks[2]]
    with pytest.raises(IndexError):
        stack[3]


def test_a_loop_that_leaves_early_computes_what_the_plain_list_did() -> None:
    base, model = tiny("llama-causal", num_hidden_layers=3), owned("llama-causal", num_hidden_layers=3)
    for one in (base, model):
        one.config.num_hidden_layers = one.model.config.num_hidden_layers = 2
    inputs: dict[str, Any] = batch("llama-causal") | {"use_cache": False}
    assert torch.equal(model(**inputs).logits, base(**inputs).logits)
    assert gradients(model, inputs)[1].keys() == gradients(base, inputs)[1].keys()


class Halves:
    """Edges inside of which hidden states and their masks are of one row only; counts what it was asked."""

    def __init__(self, rows: slice) -> None:
        self.rows, self.asked = rows, []

    def begin(self, stack: Stack, carry: Any, here: Any) -> Any:
        self.whole = carry["hidden_states"]
        return {**carry, "hidden_states": self.whole[self.rows]}, here

    def argument(self, stack: Stack, name: str, value: torch.Tensor, here: Any) -> torch.Tensor:
        self.asked.append(name)
        return value[self.rows] if len(value) == len(self.whole) else value

    def leave(self, hidden: torch.Tensor, here: Any) -> torch.Tensor:
        whole = torch.zeros_like(self.whole)
        whole[self.rows] = hidden
        return whole


def test_edges_lie_one_inside_the_other_and_each_tensor_passes_them_once() -> None:
    mixed = {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2} | SLIDING
    base, model = tiny("qwen2-causal", **mixed), owned("qwen2-causal", **mixed)
    outer, inner = Halves(slice(1, 3)), Halves(slice(1, 2))
    model.model.layers.edges += [outer, inner]
    inputs: dict[str, Any] = {**batch("qwen2-causal"), "use_cache": False}
    inputs.pop("labels")
    found, expected = model.model(**inputs)[0], base.model(**inputs)[0]
    torch.testing.assert_close(found[2], expected[2])
    assert not torch.equal(found[1], expected[1])
    for edges in (outer, inner):
        assert sorted(edges.asked) == ["attention_mask"] * 2 + ["position_embeddings"] * 2 + ["position_ids"]


def loops_otherwise(model: Any, loop: Any) -> None:
    """Let the decoder run its blocks by another loop."""

    def forward(input_ids: torch.Tensor, **others: Any) -> Any:
        hidden = model.model.embed_tokens(input_ids)
        angles = model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        hidden = loop(model.model.layers, hidden, angles)
        return BaseModelOutputWithPast(last_hidden_state=model.model.norm(hidden))

    model.model.forward = forward


def test_a_loop_that_calls_no_port_is_refused() -> None:
    model = owned("llama-causal")
    loops_otherwise(
        model,
        lambda layers, hidden, angles: layers[1](
            layers[0](hidden, position_embeddings=angles), position_embeddings=angles
        ),
    )
    with pytest.raises(UsageError, match="LlamaModel calls no element of its list of blocks"):
        model(**batch("llama-causal"))


def test_a_loop_that_steps_around_calls_is_followed() -> None:
    def loop(layers: Any, hidden: torch.Tensor, angles: Any) -> torch.Tensor:
        for layer in layers:
            hidden = layer.forward(hidden, position_embeddings=angles)
        return hidden

    model = owned("llama-causal")
    expected = model(input_ids=batch("llama-causal")["input_ids"]).logits
    loops_otherwise(model, loop)
    assert torch.equal(model(input_ids=batch("llama-causal")["input_ids"]).logits, expected)


def test_a_loop_that_skips_the_first_or_the_last_block_is_refused_where_that_matters() -> None:
    def skipping(which: int) -> Any:
        def loop(layers: Any, hidden: torch.Tensor, angles: Any) -> torch.Tensor:
            for at, layer in enumerate(layers):
                hidden = hidden if at == which else layer(hidden, position_embeddings=angles)
            return hidden

        return loop

    model = owned("llama-causal")
    loops_otherwise(model, skipping(0))
    with pytest.raises(UsageError, match="block 1 of the decoder was called before the first block"):
        model(**batch("llama-causal"))
    loops_otherwise(model, skipping(1))
    model(**batch("llama-causal"))
    model.model.layers.edges.append(Halves(slice(0, 3)))
    with pytest.raises(UsageError, match="leaves the loop over its blocks before the last one"):
        model(**batch("llama-causal"))


class AtOnce:
    """A way through all blocks, which counts how often it is gone."""

    def __init__(self) -> None:
        self.gone = 0

    def takes(self, stack: Stack, call: Any) -> bool:
        return True

    def __call__(self, stack: Stack, calls: Any, here: Any) -> Any:
        self.gone += 1
        hidden = calls[0]["hidden_states"]
        for block, call in zip(stack.blocks, calls, strict=True):
            hidden = block(**{**call, "hidden_states": hidden})
        return {**calls[0], "hidden_states": hidden}


@pytest.mark.parametrize("types", [["full_attention"] * 2, ["full_attention", "sliding_attention"]])
def test_all_blocks_are_run_at_once_only_where_their_masks_are_the_same(types: list[str]) -> None:
    changes = {"layer_types": types, **SLIDING}
    base, model = tiny("qwen2-causal", **changes), owned("qwen2-causal", **changes)
    way = model.model.layers.whole = AtOnce()
    inputs = {**batch("qwen2-causal"), "use_cache": False}
    loss, expected = gradients(base, inputs)
    again, found = gradients(model, inputs)
    assert torch.equal(again, loss)
    assert_same_gradients(found, expected, 0)
    assert way.gone == (len(set(types)) == 1)


@pytest.mark.parametrize("change", [lambda x: 2 * x, torch.Tensor.detach], ids=["twice", "detached"])
def test_a_loop_that_changes_hidden_states_is_refused_where_blocks_run_at_once(change: Any) -> None:
    def loop(layers: Any, hidden: torch.Tensor, angles: Any) -> torch.Tensor:
        for layer in layers:
            hidden = change(layer(hidden, position_embeddings=angles))
        return hidden

    model = owned("llama-causal")
    model.model.layers.whole = AtOnce()
    loops_otherwise(model, loop)
    with pytest.raises(UsageError, match="hidden states are changed between blocks 0 and 1 of the decoder"):
        model(**batch("llama-causal"))


def test_a_pass_after_one_that_failed_begins_anew() -> None:
    model = owned("llama-causal")
    expected = model(**batch("llama-causal")).logits
    handle = model.model.layers[1].register_forward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        model(**batch("llama-causal"))
    handle.remove()
    assert torch.equal(model(**batch("llama-causal")).logits, expected)
    assert model.model.layers.now is None


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


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
    assert [(key, type(module)) for key, module in model.named_modules()] == [
        (key, type(module)) for key, module in base.named_modules()
    ]
    assert not any(isinstance(module, Stack) for module in model.modules())
    assert torch.equal(model(**batch(name)).logits, base(**batch(name)).logits)
    assert all(
        type(model.get_submodule(path)) is nn.ModuleList
        for path in stack_paths(model, family_of(model)).values()
    )  # type: ignore[arg-type]


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
            assert all(
                torch.equal(one, other)
                for one, other in zip(getattr(model, field), getattr(base, field), strict=True)
            )


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
    # Hugging Face's checkpointing leaves the cache out, whose tensors have other strides, and gives T5's
    # cross-attention a bias with a gradient, for which scaled_dot_product_attention takes another kernel. So
    # no cache here, and T5 with eager attention.
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


@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-seq2seq", "llama-causal"])
def test_reentrant_checkpointing_gives_the_gradients_of_the_plain_list(name: str) -> None:
    """It sees positional arguments alone, among them the encoder's states."""
    found: list[Any] = []
    for model in (tiny(name), owned(name)):
        model.train().enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        found.append(gradients(model, {**batch(name), "use_cache": False}))
    assert torch.equal(found[1][0], found[0][0])
    assert_same_gradients(found[1][1], found[0][1], 0)


@pytest.mark.parametrize("name", [*GENERATING, "gemma3-causal"])
def test_generation_is_that_of_the_plain_list(name: str) -> None:
    for beams in (1, 3):
        settings = {**GENERATE, "num_beams": beams}
        assert torch.equal(
            owned(name).generate(**prompt(name), **settings), tiny(name).generate(**prompt(name), **settings)
        )


@pytest.mark.parametrize("setting", ["encoder_layerdrop", "decoder_layerdrop"])
def test_layer_drop_is_refused_with_the_remedy(setting: str) -> None:
    """Hugging Face draws once for each element of the list, and would drop the whole stack."""
    model = tiny("bart-seq2seq", **{setting: 0.1})
    with pytest.raises(UsageError, match=rf"config\.{setting} = 0\.1(.|\n)*set config\.{setting} = 0"):
        own_stacks(model, family_of(model))  # type: ignore[arg-type]
    assert not any(isinstance(module, Stack) for module in model.modules())


@pytest.mark.parametrize("length", [9, 3])
def test_mixed_attention_types_each_get_their_own_mask(length: int) -> None:
    mixed = {"layer_types": ["full_attention", "sliding_attention"], **SLIDING}
    base, model, inputs = (
        tiny("qwen2-causal", **mixed),
        owned("qwen2-causal", **mixed),
        batch("qwen2-causal", rows=1, length=length),
    )
    loss, expected = gradients(base, inputs)
    again, found = gradients(model, inputs)
    assert torch.equal(again, loss)
    assert_same_gradients(found, expected, 0)
    assert torch.equal(loss, gradients(tiny("qwen2-causal"), inputs)[0]) == (length == 3)  # the window acts


def test_blocks_that_all_slide_get_their_mask() -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, **SLIDING}
    base = tiny("qwen2-causal", **sliding)
    expected = base(**batch("qwen2-causal")).logits
    assert not torch.allclose(expected, tiny("qwen2-causal")(**batch("qwen2-causal")).logits)
    assert torch.equal(owned("qwen2-causal", **sliding)(**batch("qwen2-causal")).logits, expected)


def test_the_mistral_window_reaches_the_blocks() -> None:
    base = tiny("mistral-causal", sliding_window=4)
    expected = base(**batch("mistral-causal")).logits
    assert torch.equal(owned("mistral-causal", sliding_window=4)(**batch("mistral-causal")).logits, expected)
