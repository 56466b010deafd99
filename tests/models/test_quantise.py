"""Models whose frozen weights are quantised and whose blocks are their own: they compute what the same model
computes with the values that its weights then have."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

import petune
from petune.errors import UsageError
from petune.kernels.fuse import fused_blocks
from petune.models import family_of
from petune.models.frozen_weight import FORMS, quantised, quantised_in, restore_dense
from petune.models.quantise import quantise_blocks
from petune.models.sites import find_sites
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny

SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4},
    "dora": {"r": 4},
    "ia3": {},
    "miss": {"r": 8},
    "adapter": {"reduction": 4},
    "side": {"reduction": 4},
}


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("base_dtype", FORMS)
def test_blocks_that_are_not_fused_hold_and_use_quantised_weights(base_dtype: str, method: str) -> None:
    torch.manual_seed(0)
    name = {"nf4": "llama-causal", "int8": "bert-classify", "fp8": "t5-gated"}[base_dtype]
    if base_dtype == "int8" and method == "lora":  # alone in tuning Conv1D
        name = "gpt2-causal"
    keys = ("intermediate_size", "d_ff", "n_inner")
    held = tiny(name, **dict.fromkeys(keys, 128))
    petune.wrap(held, method, kernels="off", base_dtype=base_dtype, **SETTINGS[method])
    stir(held, std=0.1)
    plain = copy.deepcopy(held)
    restore_dense(plain)
    sites = find_sites(held, family_of(held))  # type: ignore[arg-type]
    assert len({id(weight) for _, _, weight in quantised_in(held)}) == len(sites) > 0
    assert not fused_blocks(held)
    inputs = batch(name)
    (loss, found), (expected, wanted) = gradients(held.train(), inputs), gradients(plain.train(), inputs)
    near = 0.05 if base_dtype == "fp8" else 2e-6  # whose products are rounded to eight bits
    assert float(loss) == pytest.approx(float(expected), rel=near)
    if base_dtype != "fp8":
        assert_same_gradients(found, wanted, near)


def test_a_dense_weight_is_freed_before_the_next_one_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama-causal", intermediate_size=128)
    before: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def counted(weight: Any, name: str) -> Any:
        alive.append(sum(one() is not None for one in before))
        before.append(weakref.ref(weight))
        return quantised(weight, name)

    monkeypatch.setattr("petune.models.quantise.quantised", counted)
    quantise_blocks(model.requires_grad_(False), family_of(model), "int8")
    assert len(alive) == 14 and max(alive) <= 1, "the one just done may wait for the loop's next turn"


def test_a_model_of_no_family_and_an_unknown_form_are_refused() -> None:
    model = tiny("llama-causal")
    with pytest.raises(UsageError, match="blocks of a family that petune knows"):
        quantise_blocks(model, None, "int8")
    with pytest.raises(UsageError, match="base_dtype 'int9' is unknown"):
        petune.wrap(model, base_dtype="int9")  # type: ignore[arg-type]
    assert not list(quantised_in(model))
