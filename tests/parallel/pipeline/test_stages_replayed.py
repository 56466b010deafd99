"""Stages of a pipeline whose blocks are replayed from recordings train as one process does, with several
passes on the way at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from petune.kernels.configs import MemoryConfig
from petune.kernels.graphs.lanes import Lanes
from petune.kernels.graphs.replay import Graphs
from petune.parallel.plan import in_flight
from tests.kernels.replays import Again, stacks
from tests.parallel import harness
from tests.parallel.cells import case
from tests.parallel.harness import Case, Trace, compare, oracle
from tests.parallel.plans import BACKENDS, LOOPED
from tests.pool import run

KEEPS_ALL = MemoryConfig("all", offload="none")


def _replayed(one: Case, limit: float, most: int) -> dict[str, Any]:
    """The trace of steps by stages with at most so many lanes, replays and passes that found none idle."""
    recorders: list[Again] = []
    plain, placed = harness.place, []

    def made() -> Graphs:
        recorders.append(Again())
        return Graphs(lambda device, own=recorders[-1]: own)

    def place(own: Case, plan: Any, model: nn.Module | None = None) -> Any:
        runner = plain(own, plan, model)
        for module in runner.modules:
            for stack in stacks(module):
                stack.whole = Lanes(most, made)
        placed.append(runner)
        return runner

    harness.place = place
    trace = harness._steps(one, limit)
    lanes = [
        len(stack.whole.lanes) for runner in placed for module in runner.modules for stack in stacks(module)
    ]
    counts = [(own.recorded, own.forwards, own.backwards) for own in recorders]
    return {"trace": trace, "lanes": lanes, "counts": counts}


@pytest.mark.parametrize("model", ["llama-causal", "bert-classify", "t5-seq2seq"])
@pytest.mark.parametrize("schedule", ["pp-1f1b", "pp-gpipe", "pp-interleaved"])
def test_stages_that_are_replayed_train_as_one_process(model: str, schedule: str) -> None:
    plan = (BACKENDS | LOOPED)[schedule](model, 2)
    one = replace(case(model, "lora", plan, blocks=KEEPS_ALL), steps=4)
    expected = oracle(one)
    found = run(2, _replayed, one, expected.norms[0] / 2, 8)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    for at, rank in enumerate(found):
        forwards, backwards = (sum(lane[kind] for lane in rank["counts"]) for kind in (1, 2))
        assert backwards > 0, "nothing was replayed"
        assert 0 <= forwards - backwards <= len(rank["lanes"]), "only a row that is sent ahead"
        passes = in_flight(plan, at)
        assert max(rank["lanes"]) <= max(2, 2 * passes), "a lane beyond what is on the way"


def test_a_pass_that_finds_no_lane_runs_block_by_block() -> None:
    plan = BACKENDS["pp-gpipe"]("llama-causal", 2)
    one = replace(case("llama-causal", "lora", plan, blocks=KEEPS_ALL), steps=4)
    expected = oracle(one)
    found = run(2, _replayed, one, expected.norms[0] / 2, 1)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    assert all(set(rank["lanes"]) == {1} for rank in found)
