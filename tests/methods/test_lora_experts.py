"""LoRA on routed experts: against peft, against the model's own loop over experts, merged, and in files."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import petune
from petune.errors import FileError, UsageError
from petune.methods import tuned_parameters, tuned_state
from petune.methods.lora_experts import LoraExperts
from petune.models.tuned_linear import tuned_layers
from petune.saving.export import save_merged
from petune.saving.peft import PREFIX
from petune.saving.peft_experts import places
from tests.methods.family_cells import ALONE
from tests.methods.peft_twins import assert_close, parameters_of, read_by_peft
from tests.methods.zoo import MOE, batch, stir, tiny


@pytest.mark.parametrize("name", MOE)
def test_logits_gradients_steps_and_files_are_those_of_peft(name: str, tmp_path: Path) -> None:
    changes = ALONE.get(name, {})
    settings: dict[str, Any] = {"targets": ["q", "v", "experts"], "r": 3, "rank_pattern": {"down_proj": 2}}
    ours = stirred(tiny(name, **changes), **settings)
    petune.save(ours, tmp_path / "ours")
    theirs, inputs = read_by_peft(name, tmp_path / "ours", **changes), batch(name)
    own, twins = tuned_parameters(ours), parameters_of(theirs)
    places = where_in_files(ours)
    assert twins.keys() == {PREFIX + place.key for place in places.values()}
    same = {
        key: (lambda value, place=place: place.from_file(value), twins[PREFIX + place.key])
        for key, place in places.items()
    }
    assert_close(ours.eval()(**inputs).logits, theirs.eval()(**inputs).logits)
    optimizers = [torch.optim.AdamW(list(side.values()), lr=1e-3, eps=1e-4) for side in (own, twins)]
    ours.train(), theirs.train()
    for _ in range(3):
        losses = [model(**inputs).loss for model in (ours, theirs)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert_close(*losses)
        for key, value in own.items():
            turn, twin = same[key]
            assert value.grad is not None and twin.grad is not None
            assert_close(value.grad, turn(twin.grad), key)
        for optimizer in optimizers:
            optimizer.step()
    for key, value in own.items():
        turn, twin = same[key]
        assert_close(value, turn(twin.detach()), key)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = petune.load(tiny(name, **changes), tmp_path / "theirs")
    assert_close(again.eval()(**inputs).logits, theirs.eval()(**inputs).logits)


def where_in_files(model: nn.Module) -> dict[str, Any]:
    """{name of a tuned tensor: its place in a file of peft's}."""
    found: dict[str, Any] = {}
    for name, layer in tuned_layers(model):
        if isinstance(layer, LoraExperts):
            found |= places(
                layer, name, {weight: layer.factors(weight)[0].shape[1] for weight in layer.weights}
            )
        else:
            found |= {f"{name}.{own}": _AsIs(f"{name}.{own}.weight") for own in layer.tuned()}
    return found


@dataclass
class _AsIs:
    key: str

    def from_file(self, value: Tensor) -> Tensor:
        return value


def test_what_peft_makes_of_older_names_is_read(tmp_path: Path) -> None:
    changes, inputs = {"mlp_only_layers": []}, batch("qwen3moe-causal")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    theirs = peft.get_peft_model(tiny("qwen3moe-causal", **changes), config)
    stir(theirs, std=0.1)
    theirs.save_pretrained(str(tmp_path))
    ours = petune.load(tiny("qwen3moe-causal", **changes), tmp_path)
    ranks = {
        one.factors("gate_up_proj")[0].shape[1]
        for _, one in tuned_layers(ours)
        if isinstance(one, LoraExperts)
    }
    assert ranks == {4}  # two of 2 made one
    assert_close(ours.eval()(**inputs).logits, theirs.eval()(**inputs).logits)


@pytest.mark.parametrize("settings", [{}, {"layers": [0]}], ids=["all", "dense"])
def test_a_folder_that_peft_would_misread_is_said_and_read_by_petune(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = stirred(tiny("qwen3moe-causal"), r=2, **settings), batch("qwen3moe-causal")
    petune.save(model, tmp_path / "tuned")
    assert "takes model.layers.0.mlp.gate_proj for an expert's" in caplog.text
    again = petune.load(tiny("qwen3moe-causal"), tmp_path / "tuned")
    assert torch.equal(again.eval()(**inputs).logits, model.eval()(**inputs).logits)


def test_biases_beside_experts_come_back_from_a_file(tmp_path: Path) -> None:
    model, inputs = stirred(tiny("gptoss-causal"), r=2, bias="lora"), batch("gptoss-causal")
    petune.save(model, tmp_path / "tuned")
    again = petune.load(tiny("gptoss-causal"), tmp_path / "tuned")
    assert torch.equal(again.eval()(**inputs).logits, model.eval()(**inputs).logits)


def stirred(model: Any, **settings: Any) -> Any:
    """`model` with LoRA that computes something."""
    stir(petune.wrap(model, **settings), std=0.1)
    return model


def _in_double(name: str) -> Any:
    model = tiny(name).double()
    model.set_experts_implementation("eager")  # transformers' loop over experts
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("proj_bias"):
                value.normal_(std=0.3)
    return model


@pytest.mark.parametrize("name", MOE)
def test_every_gradient_is_that_of_the_loop_over_merged_experts_in_float64(name: str) -> None:
    model = stirred(_in_double(name), r=3)
    inputs, experts = batch(name), [one for _, one in tuned_layers(model) if isinstance(one, LoraExperts)]
    loss = model(**inputs).loss
    loss.backward()
    found = {key: value.grad for key, value in tuned_parameters(model).items()}
    model.zero_grad()
    for one in experts:  # the same model, but for experts that the loop computes with B A in their weights
        one.active = False
        merged = {weight: own + delta for weight, (own, delta, _) in one.weight_changes().items()}
        for weight, value in merged.items():
            del one._parameters[weight]
            setattr(one, weight, value)
    expected = model(**inputs).loss
    expected.backward()
    assert torch.allclose(loss, expected, atol=1e-12)
    for key, value in tuned_parameters(model).items():
        assert value.grad is not None and found[key] is not None
        assert torch.allclose(found[key], value.grad, atol=1e-10), key


@pytest.mark.parametrize("name", MOE)
def test_merged_logits_are_those_of_the_adapted_model_and_of_what_lies_on_disk(
    name: str, tmp_path: Path
) -> None:
    model, inputs = stirred(tiny(name), r=3), batch(name)
    with torch.no_grad():
        adapted = model.eval()(**inputs).logits
        assert float((adapted - tiny(name)(**inputs).logits).abs().max()) > 1e-2
        save_merged(model, tmp_path / "merged")
        on_disk = type(tiny(name)).from_pretrained(tmp_path / "merged")(**inputs).logits
        merged = petune.merge(model)(**inputs).logits
    assert torch.allclose(merged, adapted, atol=1e-5) and torch.allclose(on_disk, adapted, atol=1e-5)


def test_experts_without_tokens_have_gradients_of_zero_and_the_others_have_some() -> None:
    model = stirred(tiny("mixtral-causal"), r=2)
    model(input_ids=torch.tensor([[5]])).logits.sum().backward()  # one token goes to two experts of four
    for layer in (one for _, one in tuned_layers(model) if isinstance(one, LoraExperts)):
        for factor in layer.tuned().values():
            assert factor.grad is not None
            assert sorted(bool(one.any()) for one in factor.grad) == [False, False, True, True]


def test_a_copy_of_a_wrapped_model_of_experts_computes_the_same() -> None:
    model, inputs = stirred(tiny("gptoss-causal"), r=2), batch("gptoss-causal")
    assert torch.equal(copy.deepcopy(model)(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dropout": 0.1}, "lora on experts has no dropout"),
        ({"init": "pissa"}, "lora on experts has no init: pissa"),
        ({"targets": ["q", "gate"]}, "gate and up are one weight in experts"),
        ({"exclude": ["up"]}, "exclude: name both, gate and up, or neither"),
        ({"method": "dora"}, "not MixtralExperts"),
        ({"method": "ia3"}, "not MixtralExperts"),
        ({"method": "side"}, "no form without experts"),
    ],
)
def test_what_experts_cannot_do_is_refused_in_words(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        petune.wrap(tiny("mixtral-causal"), **settings)


@pytest.mark.parametrize(
    ("targets", "weights"),
    [
        (["experts"], {"gate_up_proj", "down_proj"}),
        (["gate", "up"], {"gate_up_proj"}),
        (["down"], {"down_proj"}),
        (["down_proj"], {"down_proj"}),
        ("all-linear", {"gate_up_proj", "down_proj"}),
    ],
)
def test_experts_are_named_by_their_role_and_by_their_weights(targets: Any, weights: set[str]) -> None:
    model = petune.wrap(tiny("mixtral-causal"), targets=targets, r=2)
    experts = [one for _, one in tuned_layers(model) if isinstance(one, LoraExperts)]
    assert len(experts) == 2 and all(set(one.weights) == weights for one in experts)


def test_a_parameter_of_peft_that_is_no_weight_of_experts_is_refused(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.gate.weight"])
    peft.get_peft_model(tiny("mixtral-causal"), config).save_pretrained(str(tmp_path))
    with pytest.raises(FileError, match="tunes a MixtralTopKRouter"):
        petune.load(tiny("mixtral-causal"), tmp_path)


def test_a_ladder_beside_experts_has_dense_blocks() -> None:
    model, inputs = petune.wrap(tiny("qwen3moe-causal"), "side", reduction=4), batch("qwen3moe-causal")
    with torch.no_grad():
        assert torch.allclose(model(**inputs).logits, tiny("qwen3moe-causal")(**inputs).logits, atol=1e-6)
    stir(model, std=0.1)
    model(**inputs).loss.backward()
    assert all(value.grad is not None for value in tuned_parameters(model).values())
    assert not any("experts" in name for name in tuned_state(model))


@pytest.mark.parametrize("name", MOE)
def test_every_tensor_trains_in_full_fine_tuning_of_experts_and_comes_back(name: str, tmp_path: Path) -> None:
    model, inputs = petune.wrap(tiny(name), "full"), batch(name)
    model(**inputs).loss.backward()
    assert all(isinstance(value.grad, Tensor) for value in model.parameters())
    stir(model, std=0.1)
    petune.save(model, tmp_path / "tuned")
    again = petune.load(tiny(name), tmp_path / "tuned")
    assert torch.equal(again.eval()(**inputs).logits, model.eval()(**inputs).logits)


def test_linears_and_norms_beside_experts_of_unfused_blocks_are_fused_one_by_one() -> None:
    found = []
    for kernels in ("off", "reference"):
        plain = tiny("gptoss-causal", swiglu_limit=5.0)  # whose gate has no steps
        model, inputs = stirred(plain, r=2, kernels=kernels), batch("gptoss-causal")
        loss = model.train()(**inputs).loss
        loss.backward()
        found.append([loss, *(value.grad for value in tuned_parameters(model).values())])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found, strict=True))
