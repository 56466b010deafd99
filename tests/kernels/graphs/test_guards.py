"""What blocks read of their modules is guarded: nothing of it changes unseen, and looking does not ask the
layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import petune
from petune.kernels.block.module import FusedBlock
from petune.kernels.fuse import fuse
from petune.kernels.graphs.guards import Guards
from petune.models import family_of
from tests.kernels.fused_pairs import METHODS, MODELS
from tests.methods.zoo import tiny

Change = Callable[[Any], object]  # of the second block of a model


def blocks_of(name: str, method: str) -> list[FusedBlock]:
    model = MODELS[name]()
    petune.wrap(model, **METHODS[method], kernels="off")
    assert fuse(model, family_of(model), "reference")
    return [module for module in model.train().modules() if isinstance(module, FusedBlock)]


def exchanged(block: Any) -> None:
    block.mlp.up_proj = nn.Linear(1, 1)


def of_another_class(block: Any) -> None:
    layer = block.mlp.up_proj
    layer.__class__ = type("Other", (type(layer),), {})


LLAMA: dict[str, Change] = {
    "a factor": lambda block: setattr(
        block.self_attn.q_proj, "lora_A", nn.Parameter(block.self_attn.q_proj.lora_A.detach())
    ),
    "a weight": lambda block: setattr(
        block.mlp.down_proj, "weight", nn.Parameter(block.mlp.down_proj.weight.detach())
    ),
    "a bias": lambda block: setattr(block.mlp.down_proj, "bias", nn.Parameter(torch.zeros(1))),
    "a norm's weight": lambda block: setattr(block.input_layernorm, "weight", nn.Parameter(torch.ones(1))),
    "a scale": lambda block: setattr(block.mlp.up_proj, "scale", 0.125),
    "a dropout of LoRA": lambda block: setattr(block.mlp.up_proj, "dropout", 0.25),
    "a tuning that is passed by": lambda block: setattr(block.mlp.up_proj, "active", False),
    "a merged tuning": lambda block: setattr(block.mlp.up_proj, "merged", True),
    "an attribute that is new": lambda block: setattr(block.mlp.up_proj, "another", 1),
    "an attribute that is gone": lambda block: delattr(block.mlp.up_proj, "scale"),
    "attention's dropout": lambda block: setattr(block.self_attn, "attention_dropout", 0.5),
    "the mode": lambda block: block.eval(),
    "a layer": exchanged,
    "a layer's class": of_another_class,
    "what it computes": lambda block: setattr(block, "spec", object()),
}
BERT: dict[str, Change] = {
    "the probability of a dropout": lambda block: setattr(block.output.dropout, "p", 0.5),
    "a dropout": lambda block: setattr(block.output, "dropout", nn.Dropout(0.5)),
    "a norm's bias": lambda block: setattr(block.output.LayerNorm, "bias", nn.Parameter(torch.ones(1))),
}
ADAPTER: dict[str, Change] = {
    "a linear of a bottleneck": lambda block: setattr(block.mlp.down_proj, "adapter_up", nn.Linear(1, 1)),
    "a weight of a bottleneck": lambda block: setattr(
        block.mlp.down_proj.adapter_up, "weight", nn.Parameter(torch.ones(1))
    ),
}
CHANGES = [
    pytest.param(name, method, change, id=f"{method} on {name}: {what}")
    for name, method, changes in (
        ("llama", "lora", LLAMA),
        ("bert", "lora", BERT),
        ("llama", "adapter", ADAPTER),
    )
    for what, change in changes.items()
]


@pytest.mark.parametrize(("name", "method", "change"), CHANGES)
def test_a_change_in_any_block_is_seen(name: str, method: str, change: Change) -> None:
    blocks = blocks_of(name, method)
    guards = Guards(blocks)
    assert guards.hold(blocks)
    change(blocks[1])
    assert not guards.hold(blocks)
    assert not guards.hold(blocks[:1])


def test_a_vector_that_is_exchanged_is_seen() -> None:
    model = tiny("dinov2-classify")
    assert fuse(model, family_of(model), "reference")
    blocks = [module for module in model.modules() if isinstance(module, FusedBlock)]
    guards = Guards(blocks)
    assert guards.hold(blocks)
    cast("Any", blocks[1]).layer_scale2.lambda1 = nn.Parameter(torch.ones(96))
    assert not guards.hold(blocks)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_step_of_training_changes_nothing_and_no_layer_is_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(name, "lora")
    guards = Guards(blocks)
    monkeypatch.setattr(FusedBlock, "linears", lambda block: pytest.fail("a layer is asked"))
    trained = [value for block in blocks for value in block.parameters() if value.requires_grad]
    for value in trained:
        value.grad = torch.ones_like(value)
    torch.optim.AdamW(trained).step()
    assert guards.hold(blocks)
