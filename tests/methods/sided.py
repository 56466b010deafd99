"""Ladders beside the models of the zoo, for tests of what is cached of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from petune.methods import wrap
from tests.methods.zoo import stir, tiny


def sided(name: str, **settings: Any) -> Any:
    """A side-tuned model of the zoo away from its start."""
    model = wrap(tiny(name), "side", **{"reduction": 4, "also_train": (), **settings})
    stir(model, std=0.2)
    return model


def assert_equal(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Loss and gradients to the bit."""
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
