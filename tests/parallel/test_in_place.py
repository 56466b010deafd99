"""Tensors that travel beside FSDP2's message: the numbers of one process, what is sent, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import PetuneError
from petune.kernels.configs import MemoryConfig
from petune.parallel import in_place
from petune.parallel.collectives import gather_rows_
from petune.parallel.fsdp import local
from petune.parallel.plan import ParallelPlan, Sharding
from petune.parallel.runner import Runner
from tests.parallel import harness
from tests.parallel.harness import Case, check, collate, rows, total
from tests.pool import run

PLAIN = Sharding(replicas=1, reshard=True, offload=False, frozen=True)
LESS = MemoryConfig("attention", "input", tile=5)


def plan_of(world: int = 2, **changes: Any) -> ParallelPlan:
    """Shares are uneven."""
    return ParallelPlan(dp=world, shares=(2, *(1,) * (world - 1)), sharding=replace(PLAIN, **changes))


@pytest.fixture(autouse=True)
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that all ranks hold equally many rows of."""
    monkeypatch.setattr(in_place, "LARGE", 1)


@pytest.mark.parametrize(
    ("name", "method", "plan", "changes"),
    [
        ("llama-causal", "lora", plan_of(), {}),
        ("llama-causal", "full", plan_of(), {"blocks": LESS}),
        ("t5-seq2seq", "lora", plan_of(reshard=False), {"blocks": LESS}),
        ("bart-seq2seq", "adapter", plan_of(4, replicas=2), {"passes": (5, 6)}),
        ("bert-classify", "side", plan_of(3), {}),
        ("gemma3-causal", "full", plan_of(reshard=False), {"blocks": LESS}),
        ("llama-causal", "lora", plan_of(offload=True), {"blocks": LESS}),
    ],
    ids=str,
)
def test_what_is_gathered_in_place_trains_as_one_process_does(
    name: str, method: str, plan: ParallelPlan, changes: dict[str, Any]
) -> None:
    check(Case(name, method, plan, steps=3, **changes))


def pass_of(case: Case, runner: Runner, step: int) -> float:
    """The loss of one step, whose gradients are summed."""
    batches = [collate(runner.share(chosen), case) for chosen in rows(case, step)]
    return runner.backward(batches, total(case, step))


def sent(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors travel in place, step by step."""
    found: list[int] = []

    def counted(wholes: list[Tensor], parts: list[Tensor], group: Any) -> None:
        found[-1] += len(wholes)
        gather_rows_(wholes, parts, group)

    monkeypatch.setattr(in_place, "gather_rows_", counted)
    runner = harness.place(case, case.plan)
    for step in range(2):
        found.append(0)
        pass_of(case, runner, step)
    return found


def test_frozen_tensors_that_are_not_freed_travel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tuned, and what a block frees after its forward pass, travels in every step."""
    first, second = run(2, sent, Case("llama-causal", "lora", plan_of()), monkeypatch)[0]
    assert 0 < second < first
    kept, again = run(2, sent, Case("llama-causal", "lora", plan_of(reshard=False)), monkeypatch)[0]
    assert 0 < again < second and kept < first


def written(case: Case) -> str:
    """What is said to who writes into a frozen shard between two steps."""
    runner = harness.place(case, case.plan)
    pass_of(case, runner, 0)
    with torch.no_grad():
        local(runner.model.model.norm.weight).mul_(2)  # type: ignore[union-attr, arg-type]
    try:
        pass_of(case, runner, 1)
    except PetuneError as error:
        return str(error)
    return ""


def test_a_frozen_shard_that_changes_after_it_was_kept_is_refused() -> None:
    said = run(2, written, Case("llama-causal", "lora", plan_of()))
    assert all("frozen shard was written to" in one for one in said)


def test_blocks_ask_for_the_next_ones_tensors_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama-causal", "lora", plan_of())

    def order() -> list[str]:
        found: list[str] = []
        begin = in_place._Unit.begin

        def noted(unit: Any, mesh: Any) -> None:
            if not unit.begun:
                found.append("gather")
            begin(unit, mesh)

        monkeypatch.setattr(in_place._Unit, "begin", noted)
        runner = harness.place(case, case.plan)
        for number, block in enumerate(runner.model.model.layers):  # type: ignore[union-attr, arg-type]
            block.register_forward_hook(lambda *_, number=number: found.append(str(number)))
        with torch.no_grad():
            runner.logits(collate(rows(case, 0)[0], case))
        return found

    blocks = len(harness.build(case).model.layers)  # type: ignore[union-attr, arg-type]
    first = run(2, order)[0]
    assert first == ["gather"] * 3 + [step for at in range(blocks - 2) for step in (str(at), "gather")] + [
        str(blocks - 2),
        str(blocks - 1),
    ]
