"""A saved state fills what trains exactly or is refused by the tensor's name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from petune.errors import FileError
from petune.recipe import load_recipe
from petune.run.state import fill, make_optimizer


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.int64, "holds int64, not weights"),
        (torch.bool, "bool"),
        (torch.float8_e5m2, "float8"),
        (None, "rounded"),
    ],
)
def test_a_tensor_of_another_kind_is_refused_and_nothing_is_filled(
    dtype: torch.dtype | None, message: str
) -> None:
    tuned = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    saved = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=dtype or torch.float64)}
    with pytest.raises(FileError, match=message) as caught:
        fill(tuned, saved, "step-3")
    assert "step-3  b" in str(caught.value)
    assert all(bool((value == 1).all()) for value in tuned.values())
    fill(tuned, saved | {"b": torch.zeros(2, dtype=torch.bfloat16)}, "step-3")  # every bfloat16 is a float32
    assert not tuned["b"].any()


def test_a_hundred_small_updates_are_those_of_float64_and_would_be_lost_in_bfloat16():
    recipe = load_recipe({"model": "m", "data": "d", "method": "lora", "lr": 1e-5, "weight_decay": 0.0})
    drawn = torch.Generator().manual_seed(0)
    start, pushes = 0.1 * torch.randn(16, 16, generator=drawn), torch.randn(100, 16, 16, generator=drawn)
    moved = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        weight = nn.Parameter(start.to(torch.bfloat16).to(dtype))
        before, optimizer = weight.detach().double().clone(), make_optimizer(recipe, {"weight": weight})
        for push in pushes:
            weight.grad = push.to(dtype)
            optimizer.step()
        moved[dtype] = weight.detach().double() - before
    exact = moved[torch.float64]
    assert float((moved[torch.float32] - exact).norm() / exact.norm()) < 1e-3
    assert float((moved[torch.bfloat16] - exact).norm() / exact.norm()) > 0.5
