"""What no file holds is drawn from (seed, name): whole or in parts, alone or among others, it is the same,
and it begins as it always has."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import petune
from petune.methods import tune
from petune.methods.configs import make_config
from petune.models import fresh
from petune.models.contents import NO_PLAN, Contents, TensorPart, allocate
from petune.models.fresh import draw, draw_tuned
from petune.models.tuned_linear import tuned_modules
from tests.methods.zoo import FOUR, SETTINGS, ZOO, tiny

METHODS = {name: settings for name, settings in SETTINGS.items() if name != "full"} | {"dora": {"r": 4}}


def on_meta(name: str, method: str | None = None, **settings: Any) -> Any:
    """The model `name` of the zoo without memory, tuned where a method is named."""
    kind, config, fields = ZOO[name]
    with torch.device("meta"):
        model = kind(config(**fields)).eval()
    if method is not None:
        tune(model, make_config(method, settings or METHODS[method]))
    return model


def drawn(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of a model on the meta device that a method has added."""
    contents = Contents(model, {}, NO_PLAN, seed, "nowhere")
    names = [f"{path}.{own}" for path, module in tuned_modules(model) for own in module.tuned()]
    return {name: contents.whole(name) for name in names}


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", ["lora", "adapter", "side"])
@pytest.mark.parametrize("name", [*FOUR, "gemma3-causal"])
def test_a_model_without_memory_and_one_in_memory_draw_the_same(name: str, method: str) -> None:
    found = drawn(on_meta(name, method))
    model = tiny(name)
    tune(model, make_config(method, METHODS[method]))
    for value in model.parameters():
        if value.requires_grad:
            value.data.fill_(float("nan"))
    draw_tuned(model, 0)
    there = dict(model.named_parameters())
    assert found.keys() == {key for key, value in there.items() if value.requires_grad} - {
        key for key in there if key.startswith(("classifier", "score"))
    }
    assert all(torch.equal(value, there[key]) for key, value in found.items())
    assert {key for key, value in drawn(on_meta(name, method), seed=1).items() if value.any()} == {
        key for key, value in found.items() if value.any()
    }


@pytest.mark.parametrize("name", [*FOUR, "gemma3-causal", "gpt2-causal"])
def test_a_ladder_begins_as_its_modules_begin(name: str) -> None:
    model = tiny(name)
    tune(model, make_config("side", METHODS["side"]))
    before = {key: value.detach().clone() for key, value in model.named_parameters() if ".side." in key}
    draw_tuned(model, 3)
    for key, first in before.items():
        value = model.get_parameter(key).detach()
        if first.numel() == 1 or float(first.std()) == 0:
            assert torch.equal(value, first), key
        elif first.numel() > 64:  # the same law, other numbers
            assert not torch.equal(value, first)
            assert float(value.std()) == pytest.approx(float(first.std()), rel=0.3), key


@pytest.mark.parametrize("block", [7, 4 << 20])
def test_parts_of_a_drawn_tensor_are_parts_of_the_whole(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "BLOCK", block * 64)
    model, random_ = on_meta("llama-causal", "lora"), random.Random(0)
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_proj.lora_A", "model.norm.weight"):
        shape = model.get_parameter(name).shape
        whole = torch.empty(shape)
        draw(model, name, 5, whole, (0,) * len(shape))
        for _ in range(5):
            start = [random_.randrange(length) for length in shape]
            size = [random_.randint(1, length - at) for length, at in zip(shape, start, strict=True)]
            part = torch.empty(size, dtype=torch.float64)
            draw(model, name, 5, part, start)
            wanted = whole
            for dim, (first, count) in enumerate(zip(start, size, strict=True)):
                wanted = wanted.narrow(dim, first, count)
            assert torch.equal(part, wanted.double())


def test_blocks_of_a_large_weight_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "BLOCK", 64 * 10)
    out = torch.empty(97, 64)
    draw(on_meta("llama-causal"), "lm_head.weight", 0, out, (0, 0))
    assert not torch.equal(out[:10], out[10:20])
    assert float(out.std()) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("name", ["bert-classify", "t5-seq2seq", "bart-classify", "llama-classify"])
def test_tensors_of_the_base_are_drawn_by_the_law_of_transformers(name: str) -> None:
    model, other = on_meta(name), tiny(name)
    contents = Contents(model, {}, NO_PLAN, 0, "nowhere")
    for key, value in other.named_parameters():
        found = contents.whole(key)
        if value.numel() > 500 and value.std() > 0:
            assert float(found.std()) == pytest.approx(float(value.detach().std()), rel=0.2), key
        elif value.numel() > 1 and value.std() == 0:
            assert torch.equal(found, value), key


def test_a_tensor_with_several_names_is_drawn_under_the_first_of_them() -> None:
    model = on_meta("t5-seq2seq")
    contents = Contents(model, {}, NO_PLAN, 0, "nowhere")
    contents.remember(model)
    found = [contents.whole(name) for name in ("shared.weight", "lm_head.weight")]
    assert torch.equal(*found) and bool(found[0].any())


def test_what_is_drawn_leaves_torchs_generator_as_it_was() -> None:
    model = on_meta("llama-causal", "side")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    drawn(model)
    assert torch.equal(torch.rand(3), expected)


def test_the_rows_of_doras_vector_are_the_norms_of_what_the_files_hold(tmp_path: Any) -> None:
    from petune.models.loading import load_model
    from petune.models.source import resolve_model

    tiny("llama-causal").save_pretrained(tmp_path)
    found = load_model(resolve_model(str(tmp_path), tmp_path), "causal", None, torch.float32)
    tune(found.model, make_config("dora", {"r": 4}))
    assert found.contents is not None
    found.contents.remember(found.model)
    name = "model.layers.1.self_attn.q_proj."
    part = torch.empty(5)
    found.contents.fill([TensorPart(name + "lora_magnitude_vector", part, (11,))])
    weight = AutoModelForCausalLM.from_pretrained(tmp_path).get_submodule(name[:-1]).weight
    torch.testing.assert_close(part, weight[11:16].norm(dim=1))


def test_a_wrapped_model_draws_from_torchs_generator_as_before() -> None:
    models = [tiny("llama-causal") for _ in range(2)]
    for model in models:
        torch.manual_seed(11)
        petune.wrap(model, "lora", r=4, kernels="off")
    torch.manual_seed(12)
    other = petune.wrap(tiny("llama-causal"), "lora", r=4, kernels="off")
    name = "model.layers.0.self_attn.q_proj.lora_A"
    assert torch.equal(models[0].get_parameter(name), models[1].get_parameter(name))
    assert not torch.equal(models[0].get_parameter(name), other.get_parameter(name))


def test_a_parameter_that_several_modules_share_is_allocated_once() -> None:
    model = on_meta("t5-seq2seq")
    clone = copy.copy(model)
    made = allocate([model, clone], lambda value: nn.Parameter(torch.zeros_like(value, device="cpu")))
    assert len(made) == len(dict(model.named_parameters()))
    assert model.shared.weight is model.lm_head.weight is model.encoder.embed_tokens.weight
