"""Which tensors decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from petune.models.decay import decays
from petune.recipe import load_recipe
from petune.run.state import make_optimizer
from tests.methods.zoo import tiny


@pytest.mark.parametrize("name", ["llama-causal", "cohere-causal", "bert-classify"])
def test_matrices_and_tables_decay_and_norms_and_biases_do_not(name: str) -> None:
    model = tiny(name)
    norms = {
        f"{path}.{key}"
        for path, module in model.named_modules()
        if type(module).__name__.endswith("Norm")
        for key, _ in module.named_parameters(recurse=False)
    }
    assert any(value.dim() > 1 for key, value in model.named_parameters() if key in norms) == (
        "cohere" in name
    )
    for key, value in model.named_parameters():
        assert decays(key, value) == (key not in norms and not key.endswith("bias")), key


def test_an_optimizer_has_them_in_groups() -> None:
    recipe = load_recipe({"model": "m", "data": "d", "method": "full", "weight_decay": 0.1})
    tuned = {name: nn.Parameter(torch.ones(2, 3)) for name in ("q_norm.weight", "q_proj.weight")}
    found = {group["weight_decay"]: group["params"] for group in make_optimizer(recipe, tuned).param_groups}
    assert found[0.0] == [tuned["q_norm.weight"]] and found[0.1] == [tuned["q_proj.weight"]]
