"""Tensors that travel beside FSDP2's message: the numbers of one process, what is sent, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import PetuneError
from petune.kernels.configs import MemoryConfig
from petune.parallel import fsdp, in_place
from petune.parallel.collectives import gather_rows_
from petune.parallel.fsdp import local
from petune.parallel.plan import ParallelPlan, Sharding
from petune.parallel.runner import Runner
from tests.parallel import harness
from tests.parallel.harness import WIDE, Case, check, collate, rows, total
from tests.parallel.plans import COMPOSED
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
        ("llama-causal", "lora", plan_of(4, replicas=2), {"passes": (5, 6), "blocks": LESS, "steps": 1}),
        ("bert-classify", "side", plan_of(3), {"steps": 1}),
        ("t5-seq2seq", "lora", plan_of(reshard=False), {"blocks": LESS}),
        ("gemma3-causal", "full", plan_of(), {"blocks": LESS}),
        ("llama-causal", "lora", plan_of(offload=True), {"blocks": LESS}),
        *(
            pytest.param(*cell, marks=pytest.mark.long)
            for cell in (
                ("llama-causal", "lora", plan_of(), {}),
                ("llama-causal", "full", plan_of(), {"blocks": LESS}),
                ("bart-seq2seq", "adapter", plan_of(4, replicas=2), {"passes": (5, 6)}),
                ("gemma3-causal", "full", plan_of(reshard=False), {"blocks": LESS}),
            )
        ),
    ],
    ids=str,
)
def test_what_is_gathered_in_place_trains_as_one_process_does(
    name: str, method: str, plan: ParallelPlan, changes: dict[str, Any]
) -> None:
    check(Case(name, method, plan, **{"steps": 2, **changes}))


@pytest.mark.parametrize(
    ("name", "form", "plan", "settings"),
    [
        ("llama-causal", "nf4", plan_of(4, replicas=2), WIDE["llama"]),
        ("bert-classify", "int8", plan_of(reshard=False), ()),
        pytest.param("llama-causal", "nf4", plan_of(reshard=False), WIDE["llama"], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_quantised_weights_that_are_gathered_in_place_train_as_in_one_process(
    name: str, form: str, plan: ParallelPlan, settings: tuple[tuple[str, int], ...]
) -> None:
    case = Case(name, "lora", plan, base_dtype=form, settings=settings, passes=(5, 6), blocks=LESS)
    check(replace(case, steps=1))


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
    cases = [Case("llama-causal", "lora", plan_of(reshard=reshard)) for reshard in (True, False)]
    (first, second), (kept, again) = run(2, lambda: [sent(case, monkeypatch) for case in cases])[0]
    assert 0 < second < first
    assert 0 < again < second and kept < first


def written(case: Case, name: str) -> str:
    """What is said to who writes into a frozen shard between two steps."""
    runner = harness.place(case, case.plan)
    pass_of(case, runner, 0)
    with torch.no_grad():
        weight: Any = attrgetter(name)(runner.model)
        local(weight).mul_(2)
    try:
        pass_of(case, runner, 1)
    except PetuneError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_frozen_shard_that_changes_after_the_first_pass_is_refused(name: str) -> None:
    said = run(2, written, Case("llama-causal", "lora", plan_of()), name)
    assert all("frozen shard was written to" in one for one in said)


def losses(case: Case, evaluated: bool) -> list[float]:
    """Of two steps, before each of which the model is evaluated, or not."""
    runner, found = harness.place(case, case.plan), []
    update = harness.Update(runner.tuned.values())
    for step in range(2):
        if evaluated:
            with torch.no_grad():
                runner.logits(collate(rows(case, step)[0], case))
            runner.model.train()
        found.append(pass_of(case, runner, step))
        update.step()
    return found


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("full", {}),
        ("lora", {}),
        *(pytest.param(*one, marks=pytest.mark.long) for one in (("lora", {"frozen": False}), ("side", {}))),
    ],
    ids=str,
)
def test_an_evaluation_between_steps_leaves_no_stale_weights(method: str, changes: dict[str, Any]) -> None:
    """FSDP2 gathers some units for nobody then, and drops what it has gathered."""
    case = Case("llama-causal", method, plan_of(**changes), passes=(4,))
    for plain, between in run(2, lambda: [losses(case, False), losses(case, True)]):
        assert between == pytest.approx(plain, rel=1e-6)


def moved(case: Case) -> list[Tensor]:
    """Logits after the model was moved to where it is, before and after its first pass."""
    runner, found = harness.place(case, case.plan), []
    for _ in range(2):
        runner.model.to("cpu")
        with torch.no_grad():
            found.append(runner.logits(collate(rows(case, 0)[0], case)))
    return found


def test_a_model_that_is_moved_to_where_it_is_computes_the_same() -> None:
    case = Case("llama-causal", "lora", plan_of())
    expected = harness.oracle(case).logits
    for found in run(2, moved, case):
        for logits in found:
            torch.testing.assert_close(logits, expected)


def test_blocks_ask_for_the_next_ones_tensors_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama-causal", "lora", plan_of())

    def order() -> list[str]:
        found: list[str] = []
        gather = in_place._Unit.gather

        def noted(unit: Any, mesh: Any) -> None:
            found.append("gather")
            gather(unit, mesh)

        monkeypatch.setattr(in_place._Unit, "gather", noted)
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


@pytest.mark.parametrize("rank", [*(pytest.param(rank, marks=pytest.mark.long) for rank in (1, 2, 4)), 3])
def test_ranks_with_unequal_parts_agree_on_what_stays_whole(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the one with few columns LoRA weighs more than on the other, beside its part of the base."""
    monkeypatch.setattr(in_place, "LARGE", 1024)
    monkeypatch.setattr(fsdp, "LARGE", 1024)
    plan = COMPOSED["shard x tp"]("llama-causal")
    assert plan.cut is not None
    plan = replace(plan, cut=replace(plan.cut, columns=(80, 16)))
    check(Case("llama-causal", "lora", plan, steps=1, tuning=(("r", rank),)))
