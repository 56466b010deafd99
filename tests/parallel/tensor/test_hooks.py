"""A cut sequence whose fused blocks leave padding out: where fewer real tokens are left than ranks, padding
is computed, as no recipe can make its rows longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels.configs import MemoryConfig
from petune.parallel.plan import ALONE, ParallelPlan
from tests.parallel import harness
from tests.parallel.harness import Case, assert_same
from tests.parallel.plans import BACKENDS
from tests.pool import run


def batch(task: str, real: int) -> dict[str, Tensor]:
    """One row of so many real tokens, of which a decoder beside an encoder writes as many, in room for
    four."""
    mask = torch.arange(4)[None] < real
    ids = torch.tensor([[7, 9, 5, 8]])
    own = {"input_ids": ids.where(mask, 0), "attention_mask": mask.long(), "rows": torch.tensor([0])}
    return own | {"labels": torch.tensor([1]) if task == "classify" else ids.where(mask, -100)}


def gradients(case: Case, plan: ParallelPlan, real: int) -> dict[str, Tensor]:
    placed = harness.place(case, plan)
    placed.model.train()
    loss = placed.backward([batch(case.task, real)], 1.0)
    found = placed.whole({name: harness.gradient(value) for name, value in placed.tuned.items()})
    return found | {"loss": torch.tensor(float(loss))} if placed.mesh.main else {}


@pytest.mark.parametrize(
    ("name", "backend"), [("bert-classify", "sp-ulysses"), ("t5-seq2seq", "galaxy"), ("bert-classify", "cut")]
)
def test_a_row_with_fewer_tokens_than_ranks_trains_with_its_padding(name: str, backend: str) -> None:
    settings: dict[str, Any] = {"dtype": torch.float64, "blocks": MemoryConfig("all", "none")}
    case = Case(name, "lora", BACKENDS[backend](name, 2), **settings)
    for real in (1, 2):
        expected = gradients(case, ALONE, real)
        assert_same(run(2, gradients, case, case.plan, real)[0], expected, 1e-6, name)
