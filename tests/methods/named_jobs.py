"""LoRA jobs with names, trained and answered together on one base and each alone: what tests of several
adapters share."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import petune
from petune.methods import tuned_parameters, tuned_state
from tests.methods.zoo import batch, stir, tiny

NAME = "llama-causal"
JOBS: Mapping[str, dict[str, Any]] = {
    "a": {"r": 4},
    "b": {"r": 2, "alpha": 7, "targets": ["q", "v"]},
    "c": {"r": 3, "rslora": True, "targets": ["q", "down"]},
}
ROWS = ("b", "a", None, "c", "a")


def job(name: str, model: str = NAME, dtype: torch.dtype = torch.float32) -> Any:
    """One of the jobs as the only one on its base."""
    alone = petune.wrap(tiny(model).to(dtype), "lora", kernels="off", **JOBS[name])
    stir(alone, seed=ord(name), std=0.1)
    return alone


def together(model: str = NAME, dtype: torch.dtype = torch.float32) -> Any:
    """All of them on one base, with the same values."""
    found = tiny(model).to(dtype)
    for name, settings in JOBS.items():
        petune.add(found, name, **settings)
    with torch.no_grad():
        for name in JOBS:
            with petune.alone(found, name):
                for own, value in tuned_state(job(name, model, dtype)).items():
                    tuned_parameters(found)[own].copy_(value)
    return found


def inputs(model: str = NAME) -> dict[str, Tensor]:
    return batch(model, rows=len(ROWS), length=12)


def rows_of(name: str | None, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    where = [at for at, own in enumerate(ROWS) if own == name]
    return {key: value[where] for key, value in given.items()}


def logits(model: Any, given: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = model(**given).logits
    return found


def assert_rows_meet_their_own(model: str) -> None:
    """The logits of each row of a mixed batch are those of its own adapter, or of the base."""
    found, given = together(model), inputs(model)
    base = logits(tiny(model), given)
    with petune.per_row(found, ROWS):
        mixed = logits(found, given)
    for name in JOBS:
        own = logits(job(name, model), rows_of(name, given))
        where = [at for at, row in enumerate(ROWS) if row == name]
        torch.testing.assert_close(mixed[where], own, rtol=1e-5, atol=1e-6)
        assert float((mixed[where] - base[where]).detach().abs().max()) > 1e-2
    torch.testing.assert_close(mixed[2], base[2], rtol=1e-5, atol=1e-6)


def mean_loss(found: Tensor, labels: Tensor) -> Tensor:
    """Of next tokens, in the dtype of the logits."""
    return nn.functional.cross_entropy(
        found[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def losses(model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean loss of the rows of each job, from one forward pass."""
    with petune.per_row(model, ROWS):
        found = {"logits": logits(model, given), "labels": given["labels"]}
    own = {name: rows_of(name, found) for name in JOBS}
    return {name: mean_loss(one["logits"], one["labels"]) for name, one in own.items()}


def assert_trained_as_alone() -> None:
    """Losses, gradients and three steps of AdamW are those of each job alone, in float64."""
    model, given = together(dtype=torch.float64).train(), inputs()
    single = {name: job(name, dtype=torch.float64).train() for name in JOBS}
    close = {"rtol": 0.0, "atol": 1e-9}
    start = deepcopy(tuned_state(model))
    optimizers = [
        torch.optim.AdamW(tuned_parameters(one).values(), lr=1e-2, eps=1e-4)
        for one in (model, *single.values())
    ]
    for _ in range(3):
        found = losses(model, given)
        sum(found.values()).backward()  # type: ignore[union-attr]
        for name, alone in single.items():
            rows = rows_of(name, given)
            loss = mean_loss(logits(alone, rows), rows["labels"])
            loss.backward()
            torch.testing.assert_close(found[name], loss, **close)
            with petune.alone(model, name):
                mine, own = tuned_parameters(model), tuned_parameters(alone)
            assert mine.keys() == own.keys()
            for key, value in own.items():
                torch.testing.assert_close(mine[key].grad, value.grad, **close)
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    for name, alone in single.items():
        with petune.alone(model, name):
            for key, value in tuned_state(alone).items():
                torch.testing.assert_close(tuned_state(model)[key], value, **close)
    assert all(not torch.equal(value, start[key]) for key, value in tuned_state(model).items())
