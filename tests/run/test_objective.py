"""The objective of a task that balances experts, against transformers' own."""

from __future__ import annotations

import pytest
import torch

import petune
from petune.methods import tuned_parameters
from petune.run.objective import balance_of, objective_of
from petune.tasks import TASKS
from petune.tasks.loss import count
from tests.methods.zoo import MOE, batch, stir, tiny


@pytest.mark.parametrize("name", MOE)
def test_the_routers_loss_and_its_gradients_are_those_of_transformers(name: str) -> None:
    model, inputs = (
        petune.wrap(tiny(name, output_router_logits=True, router_aux_loss_coef=0.3), r=2),
        batch(name),
    )
    stir(model, std=0.1)
    labels = inputs["labels"].clone()
    labels[:, 0] = -100  # transformers counts the labels that are left after the shift
    inputs["labels"] = labels
    assert balance_of(model) == 0.3 and balance_of(tiny(name)) == 0
    objective = objective_of(TASKS["causal"], None, balance_of(model))
    outputs = objective.forward(model, inputs)
    loss = objective.loss(outputs, inputs) / count(inputs)
    expected = model(**inputs).loss
    assert torch.allclose(loss, expected, atol=1e-6)
    tuned = list(tuned_parameters(model).values())
    for own, theirs in zip(
        torch.autograd.grad(loss, tuned), torch.autograd.grad(expected, tuned), strict=True
    ):
        assert torch.allclose(own, theirs, atol=1e-6)
