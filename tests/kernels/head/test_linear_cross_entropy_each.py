"""The head's cross-entropy of every row, for losses that weigh rows by what they are, against autograd of the
plain formula, and preferences through it against their logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.dispatch import reference_ops
from petune.kernels.head.hooks import fuse_head, head_loss
from petune.kernels.head.linear_cross_entropy import linear_cross_entropy
from petune.run.evaluate import outputs_of
from petune.run.objective import prefer_objective
from petune.tasks.configs import PreferConfig
from tests.kernels.head.operands import (
    SETTINGS,
    Made,
    V,
    assert_alike,
    grads,
    operands,
)
from tests.methods.zoo import VOCAB, batch, tiny

OPS = reference_ops()


def each(parts: dict[str, Tensor], labels: Tensor, **settings: Any) -> Tensor:
    low = (parts["a"], parts["b"], 2.0) if "a" in parts else None
    ends = parts["hidden"], parts["weight"], labels
    return linear_cross_entropy(*ends, ops=OPS, bias=parts.get("bias"), low=low, each=True, **settings)


def weighed(losses: Tensor) -> Tensor:
    """A loss in which a row's weight depends on the others."""
    return torch.tanh(losses[:11].sum() / 9 - losses[11:].sum() / 13) + losses.square().mean()


@pytest.mark.crossed
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("names", ["hidden weight", "hidden weight bias a b"])
@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("ignored", [slice(4, None, 4), slice(0, 13)], ids=["few", "half"])
def test_losses_of_rows_and_what_follows_from_them_are_the_plain_formulas(
    setting: str, names: str, chunk: int | None, ignored: slice
) -> None:
    parts, labels = operands()
    parts = {name: parts[name] for name in names.split()}
    labels[4::4], labels[ignored] = 3, -100
    logits = F.linear(parts["hidden"], parts["weight"], parts.get("bias"))
    if "a" in parts:
        logits = logits + 2 * parts["hidden"] @ parts["a"].T @ parts["b"].T
    cap, smoothing = SETTINGS[setting].get("softcap", 0.0), SETTINGS[setting].get("smoothing", 0.0)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    expected = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    found = each(parts, labels, chunk=chunk, **SETTINGS[setting])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert_alike(grads(weighed(found), parts), grads(weighed(expected), parts))


def test_logits_of_all_rows_are_never_there_on_either_way() -> None:
    parts, labels = operands()
    with Made() as made:
        grads(weighed(each(parts, labels, chunk=4)), parts)
    assert made.largest < 23 * V
    assert made.rows >= 2 * 17  # of the rows that count, made twice


def test_a_bound_that_is_too_low_is_loud() -> None:
    parts, labels = operands()
    assert bool(each(parts, labels, trained=10).isnan().all())


@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo", "kto"])
@pytest.mark.parametrize("name", ["llama-causal", "gemma3-causal"])
def test_preferences_have_the_loss_and_gradients_of_their_logits(loss: str, name: str) -> None:
    inputs = batch(name)
    rows = 2 * (len(inputs["labels"]) // 2)
    inputs = {key: value[:rows] for key, value in inputs.items()}
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][:, :3] = -100
    inputs |= {"reference": -torch.arange(rows).double(), "rows": torch.arange(rows)}
    inputs |= {"good": torch.arange(rows) < 2} if loss == "kto" else {}
    objective = prefer_objective(PreferConfig(loss, beta=0.3))
    model = tiny(name).train()
    expected = objective.loss(objective.forward(model, inputs), inputs)
    weights = dict(model.named_parameters())
    wanted = grads(expected, weights)
    assert objective.fused_loss(model, inputs, 10**6) is None
    fuse_head(model, OPS)
    with Made(VOCAB) as made:
        found = objective.fused_loss(model, inputs, int((inputs["labels"] >= 0).sum()))
    assert found is not None and made.rows <= rows * (inputs["labels"].shape[1] - 3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_alike(grads(found, weights), wanted, 1e-4)


def test_rows_that_fill_a_batch_weigh_nothing() -> None:
    inputs = batch("llama-causal")
    inputs["rows"] = torch.arange(len(inputs["labels"]))
    inputs["rows"][-1] = -1
    model = tiny("llama-causal").train()
    fuse_head(model, OPS)
    seen: list[Tensor] = []

    def finish(losses: Tensor) -> Tensor:
        seen.append(losses)
        return losses.sum()

    head_loss(model, inputs, outputs_of, shift=True, finish=finish)
    assert seen[0].shape == inputs["labels"].shape
    assert not seen[0][-1].any() and not seen[0][:, -1].any() and bool(seen[0][0].any())
