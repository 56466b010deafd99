"""Mixtures whose experts are quantised: fused and unfused, they compute with the values that are held, and
hold nothing else."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petune
from petune.errors import UsageError
from petune.kernels import grouped
from petune.kernels.configs import Rung
from petune.kernels.fuse import unfuse
from petune.methods import tuned_parameters
from petune.models import family_of
from petune.models.copied import copied
from petune.models.frozen_weight import FORMS, QuantisedWeight, dense_of, quantised_in, restore_dense
from petune.models.quantise import quantise_blocks
from tests.kernels.fused_pairs import blocks, stand_on
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny

QWEN = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
MIXTRAL = {"hidden_size": 64, "intermediate_size": 64}
TUNINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3moe-causal", "lora", {"r": 3}),
    ("qwen3moe-causal", "side", {"reduction": 4}),
    ("qwen2moe-causal", "adapter", {"reduction": 4}),
    ("mixtral-causal", "lora", {"r": 2, "targets": ["q", "down_proj"]}),
    ("qwen2moe-causal", "lora", {"r": 2, "targets": ["q"]}),
    ("gptoss-causal", "lora", {"r": 2}),
]


def held_by(name: str, method: str, base_dtype: Any, **settings: Any) -> Any:
    model = tiny(name, **(QWEN if name.startswith("qwen") else MIXTRAL))
    held = petune.wrap(model, method, kernels="reference", base_dtype=base_dtype, **settings)
    stir(held, std=0.1)
    return held.train()


def plain_of(held: nn.Module) -> Any:
    """The model's own blocks over dense weights of those values."""
    plain = copied(held)
    unfuse(plain)
    restore_dense(plain)
    return plain


def experts_of(model: nn.Module) -> list[QuantisedWeight]:
    return [weight for _, _, weight in quantised_in(model) if weight.dim() == 3]


@pytest.mark.crossed(1)
@pytest.mark.parametrize(("name", "method", "settings"), TUNINGS)
@pytest.mark.parametrize("base_dtype", ["nf4", "int8"])
def test_loss_and_gradients_are_those_of_the_dense_values(
    base_dtype: str, name: str, method: str, settings: dict[str, Any]
) -> None:
    held = held_by(name, method, base_dtype, **settings)
    assert len(experts_of(held)) == (2 if name == "qwen3moe-causal" else 4)
    stand_on(held, Rung("attention"))
    expected, wanted = gradients(plain_of(held), batch(name))
    loose = copied(held)
    unfuse(loose)
    for model in (held, loose):
        loss, found = gradients(model, batch(name))
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
        assert_same_gradients(found, wanted, 2e-6)
    assert not [block.spec.said for block in blocks(held) if block.spec.said]


@pytest.mark.parametrize("base_dtype", ["nf4", "int8"])
def test_three_steps_of_adamw_are_those_of_the_unfused_model(base_dtype: str) -> None:
    fused = held_by("qwen3moe-causal", "lora", base_dtype, r=3)
    loose = copy.deepcopy(fused)
    unfuse(loose)
    own = [tuned_parameters(model) for model in (fused, loose)]
    made = [torch.optim.AdamW(values.values(), lr=1e-3, eps=1e-4) for values in own]
    for step in range(3):
        inputs = batch("qwen3moe-causal", seed=step)
        for model, optimizer in zip((fused, loose), made, strict=True):
            optimizer.zero_grad()
            model(**inputs).loss.backward()
            optimizer.step()
    for key, value in own[0].items():
        torch.testing.assert_close(value, own[1][key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("targets", [["q"], "auto"], ids=["as they are", "tuned"])
def test_no_dense_weight_of_experts_is_kept_for_the_way_back(targets: Any, fused: bool) -> None:
    model, kept = held_by("mixtral-causal", "lora", "nf4", r=2, targets=targets), list[Tensor]()
    if not fused:
        unfuse(model)
    sizes = {weight.numel() for weight in experts_of(model)}
    sizes |= {weight[0].numel() for weight in experts_of(model)}

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        model(**batch("mixtral-causal")).loss.backward()
    assert kept and not [one for one in kept if type(one.data) is Tensor and one.numel() in sizes]


@pytest.mark.parametrize("base_dtype", FORMS)
def test_each_product_makes_one_weight_dense_by_the_kernel_that_can(
    base_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit a block whose experts are dense: also in fp8, whose linears have products of their own."""
    held = held_by("mixtral-causal", "lora", base_dtype, r=2)
    dense, inputs, made = copied(held), batch("mixtral-causal"), list[torch.Size]()
    for module, name, weight in list(quantised_in(dense)):
        if weight.dim() == 3:
            setattr(module, name, nn.Parameter(dense_of(weight), requires_grad=False))
    (expected, wanted), kernel = gradients(dense, inputs), SimpleNamespace()
    kernel.dense_into = lambda form, out: (made.append(form.shape), form.dense_into(out))
    own = grouped._form
    monkeypatch.setattr(
        grouped, "_form", lambda name, *at: kernel if name == "dequantise" else own(name, *at)
    )
    loss, found = gradients(held, inputs)
    assert torch.equal(loss, expected) and all(torch.equal(found[key], wanted[key]) for key in wanted)
    up, down = (torch.Size(sizes) for sizes in ((4, 128, 64), (4, 64, 64)))
    assert made == [up, down] * 2 + [down, up] * 2  # of two blocks, and back


def test_merged_experts_are_dense_and_compute_what_the_adapter_did() -> None:
    held = held_by("mixtral-causal", "lora", "int8", r=2).eval()
    values = {name: dense_of(value) for name, value in held.named_parameters() if value.dim() == 3}
    inputs = {key: value for key, value in batch("mixtral-causal").items() if key != "labels"}
    with torch.no_grad():
        expected = held(**inputs, use_cache=False).logits
        written = held(**inputs, use_cache=True).logits  # by the blocks' own forward
        plain = petune.merge(held)
        found = plain(**inputs, use_cache=False).logits
    assert not list(quantised_in(plain)) and values.keys() >= {
        name for name, value in plain.named_parameters() if value.dim() == 3
    }
    for logits in (written, found):
        real = inputs["attention_mask"].bool()  # of padding fused blocks compute nothing
        torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-4)


def test_experts_that_train_and_those_that_no_form_holds_are_refused() -> None:
    model = petune.wrap(tiny("mixtral-causal", **MIXTRAL), "full", kernels="off")
    with pytest.raises(UsageError, match="nf4 needs weights that do not train"):
        quantise_blocks(model, family_of(model), "nf4")
    narrow = tiny("mixtral-causal", hidden_size=64, intermediate_size=96)
    with pytest.raises(UsageError, match="multiple of 64 inputs") as caught:
        petune.wrap(narrow, kernels="reference", base_dtype="nf4")
    assert "64 x 96" in str(caught.value) and not list(quantised_in(narrow))
