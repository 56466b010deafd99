"""What ranks ask one another in a step, beside gradients, is two small exchanges: one before the passes, one
after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from petune.run.step import OptimizerStep
from tests.group_pool import ranks
from tests.planned_runs import PLANS, small
from tests.small_runs import run

pytestmark = pytest.mark.usefixtures("no_picture")
SMALL = 8  # numbers; sums of gradients and activations are of more


def small_exchanges(recipe: dict[str, Any]) -> list[list[tuple[int, bool]]]:
    """(numbers, over all ranks) of every small all-reduce, by step."""
    patch, found = pytest.MonkeyPatch(), list[list[tuple[int, bool]]]()
    reduce, take = dist.all_reduce, OptimizerStep.take
    inside: list[bool] = []

    def counted(value: torch.Tensor, *args: Any, **named: Any) -> Any:
        if inside and value.numel() <= SMALL:
            found[-1].append((value.numel(), named.get("group") is None))
        return reduce(value, *args, **named)

    def taken(self: OptimizerStep, *args: Any) -> Any:
        inside.append(True)
        found.append([])
        record = take(self, *args)
        inside.clear()
        return record

    with patch.context() as patched:
        patched.setattr(dist, "all_reduce", counted)
        patched.setattr(OptimizerStep, "take", taken)
        run(recipe)
    return found


@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_a_step_has_two_small_exchanges(plan: str, tmp_path: Path) -> None:
    recipe = small(tmp_path, "llama", "lora", parallel=PLANS[plan], on_spike="off", max_steps=5)
    for steps in ranks(2, small_exchanges, recipe, timeout=60):
        assert len(steps) == 5  # in the first, ranks also compare what an update has moved
        # trained tokens and whether anyone stops; gradient norm and loss
        assert [step for step in steps[-2:] if step != [(2, True), (2, True)]] == []
