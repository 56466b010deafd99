"""Models of the zoo that train with fused blocks and with their own, and the comparison of both."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petune.kernels import fuse as fusing
from petune.kernels.block import attention as attending
from petune.kernels.configs import Rung
from petune.kernels.dispatch import triton_ops
from petune.kernels.fuse import fuse, fused_blocks
from petune.kernels.graphs.replay import ungraph
from petune.kernels.memory.offloaded_adamw import StreamedAdamW
from petune.methods import wrap
from petune.models import attention, family_of
from petune.models.copied import copied
from petune.models.decay import decays
from petune.models.stack import own_stacks
from petune.rng.context import running
from petune.rng.dropout import drawing, step_key
from tests.kernels.exactness import DEVICE
from tests.kernels.fused_pairs import stand_on
from tests.methods.zoo import MOE, assert_same_gradients, batch, gradients, stir, tiny

LEVELS: tuple[Any, ...] = ("all", "input", "projections", "attention")


def tuned(
    name: str, method: str, settings: dict[str, Any], dtype: Any = torch.float64, **config: Any
) -> nn.Module:
    """A model in training that draws dropout by index, nothing in it at identity."""
    model = wrap(tiny(name, **config).to(dtype), method, **settings)
    if name in MOE:
        model.set_experts_implementation("eager")  # transformers' loop over experts, in any dtype
    attention.use(model, family_of(model))
    stir(model, std=0.1)
    return model.train()


def fused(model: nn.Module, keep: Any = "all") -> Any:
    """A copy with fused blocks that keep this."""
    made = copied(model)
    done = fuse(made, family_of(made), "reference")
    assert done.blocks and not done.reasons, done.reasons
    stand_on(made, Rung(keep))
    return made


def packed(name: str) -> dict[str, Any]:
    """Two rows of two samples each, of a model that keeps no cache."""
    ids = batch(name, rows=2)["input_ids"].clamp(3)
    positions = torch.tensor([[*range(4), *range(5)], [*range(7), *range(2)]])
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    """Pictures and sounds in float64."""
    floats = [key for key, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]
    return inputs | {key: inputs[key].double() for key in floats}


def steps(model: nn.Module, inputs: dict[str, Tensor], number: int = 3) -> list[tuple[Tensor, Any]]:
    """The loss and the gradients of steps of AdamW whose dropout is drawn by index."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-3, eps=1e-2)
    found = []
    for step in range(number):
        rows = torch.arange(len(next(iter(inputs.values()))))
        with drawing(replace(running(), key=step_key(3, step), rows=rows)):
            found.append(gradients(model, inputs))
        optimizer.step()
    return found


def assert_trains_alike(
    made: nn.Module, plain: nn.Module, inputs: dict[str, Tensor], number: int = 3
) -> None:
    """Equal losses, gradients and weights in some steps, and no block of `made` that ran unfused."""
    own_stacks(plain, family_of(plain))  # which say where dropout is drawn
    for (loss, found), (expected, wanted) in zip(
        steps(made, inputs, number), steps(plain, inputs, number), strict=True
    ):
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        assert_same_gradients(found, wanted, 2e-6)
    values = dict(plain.named_parameters())
    for name, value in made.named_parameters():
        assert torch.allclose(value, values[name], rtol=0, atol=1e-6), name
    assert not (said := [block.spec.said for block in fused_blocks(made) if block.spec.said]), said


def assert_streams_alike(made: Any, plain: nn.Module, inputs: dict[str, Any], number: int = 2) -> None:
    """The weights of a fused model whose blocks stream after some steps, as torch's AdamW has them."""
    groups: list[dict[str, Any]] = [
        {"params": [own for at, own in plain.named_parameters() if decays(at, own) is kind]}
        for kind in (True, False)
    ]
    groups[1]["weight_decay"] = 0.0
    streamed = StreamedAdamW(
        made, fused_blocks(made), lr=1e-2, eps=1e-4, weight_decay=0.1, states=torch.float32
    )
    for model, optimizer in (
        (made, streamed),
        (plain, torch.optim.AdamW(groups, 1e-2, eps=1e-4, weight_decay=0.1)),
    ):
        for _ in range(number):
            optimizer.zero_grad()
            model(**inputs).loss.backward()
            optimizer.step()
    found, expected = made.state_dict(), plain.state_dict()
    assert all(torch.allclose(found[key], expected[key], atol=2e-5) for key in expected)


def cells_of_methods(methods: Iterable[str]) -> list[Any]:
    """(method, what is kept, rows): all of them, of which the short suite has each method on one rung."""
    return [
        pytest.param(
            method,
            keep,
            rows,
            marks=() if at % 4 == level and (at % 2 == 0) == (rows == "packed") else pytest.mark.long,
        )
        for at, method in enumerate(methods)
        for level, keep in enumerate(LEVELS)
        for rows in ("padded", "packed")
    ]


def cells_of_plans(
    plans: Iterable[str], kept: Sequence[int], short: Collection[tuple[str, str, int]]
) -> list[Any]:
    """(plan, method, number of what is kept): all of them, of which `short` are in the short suite."""
    every = [(plan, method, own) for plan in plans for method in ("full", "lora") for own in kept]
    return [pytest.param(*cell, marks=() if cell in short else pytest.mark.long) for cell in every]


def assert_trains_by_triton(
    plain: nn.Module, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 model whose blocks go by Triton's kernels, attention too, has the loss and gradients of
    `plain`."""
    plain, inputs = plain.to(DEVICE), {name: value.to(DEVICE) for name, value in inputs.items()}
    made = copied(plain)
    monkeypatch.setattr(fusing, "select", lambda own, *_: None if own == "off" else triton_ops())
    monkeypatch.setattr(
        attending, "choose", lambda *args, **more: attending.ChosenForm("triton", "asked for")
    )
    assert fuse(made, family_of(made), "triton").blocks
    ungraph(made)
    (loss, found), (expected, wanted) = (gradients(one, inputs) for one in (made, plain))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert_same_gradients(found, wanted, 1e-5)
    assert not [block.spec.said for block in fused_blocks(made) if block.spec.said]
