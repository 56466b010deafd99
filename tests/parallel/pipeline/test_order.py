"""The order that is foretold against the passes that a run's stages make."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed.pipelining import PipelineStage

from petune.parallel.pipeline.order import StageStep, order_of, recorded
from petune.parallel.plan import ParallelPlan, Stage
from tests.parallel.cells import case
from tests.parallel.harness import Case, collate, place, rows, total
from tests.parallel.plans import looped, pp
from tests.pool import run

NAMES = {
    "forward_one_chunk": lambda given: "F",
    "backward_one_chunk": lambda given: "B" if given.get("full_backward", True) else "I",
    "backward_weight_one_chunk": lambda given: "W",
}


def passes(case: Case) -> list[tuple[str, int, int]]:
    """What the stages of this rank do in one training step."""
    runner = place(case, case.plan)
    found: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in NAMES.items():
            plain = getattr(PipelineStage, name)

            def noted(stage, piece, *args, plain=plain, kind=kind, **more):  # type: ignore[no-untyped-def]
                found.append((kind(more), stage.stage_index, piece))
                return plain(stage, piece, *args, **more)

            patch.setattr(PipelineStage, name, noted)
        chosen = rows(case, 0)[0]
        runner.backward([collate(chosen, case)], total(case, 0))
    return found


@pytest.mark.parametrize(
    ("schedule", "pieces"), [("gpipe", 3), ("1f1b", 5), ("interleaved", 4), ("zero-bubble", 4)]
)
def test_what_is_foretold_is_what_stages_do(schedule: str, pieces: int) -> None:
    plan = (looped if schedule in ("interleaved", "zero-bubble") else pp)(schedule)("llama-causal", 2)
    one = case("llama-causal", "full", replace(plan, microbatches=pieces))
    told = [[(step.kind, step.stage, step.piece) for step in steps] for steps in order_of(one.plan)]
    assert run(2, passes, one) == told


def test_each_rank_of_1f1b_keeps_as_many_micro_batches_as_stages_are_left() -> None:
    order = order_of(ParallelPlan(pp=3, stages=(Stage({}),) * 3, microbatches=4))
    assert [[step.kind for step in steps].index("B") for steps in order] == [3, 2, 1]
    assert order[2][:4] == (
        StageStep("F", 2, 0),
        StageStep("B", 2, 0),
        StageStep("F", 2, 1),
        StageStep("B", 2, 1),
    )


@pytest.mark.parametrize(("ranks", "pieces"), [(2, 2), (3, 4), (4, 9)])
def test_1f1b_as_it_is_written_is_that_of_torch(ranks: int, pieces: int) -> None:
    plan = ParallelPlan(pp=ranks, stages=(Stage({}),) * ranks, microbatches=pieces)
    assert order_of(plan) == tuple(recorded(plan, rank) for rank in range(ranks))


def test_no_micro_batch_is_forgotten() -> None:
    plan = ParallelPlan(pp=2, stages=(Stage({}),) * 4, schedule="zero-bubble", microbatches=4)
    every = [step for steps in order_of(plan) for step in steps]
    assert len(every) == len(set(every)) == 4 * 4 * 3
