"""Stages of a pipeline whose blocks are replayed from recordings train as one process does, with several
passes on the way at once."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from torch import nn

from petune.kernels.configs import MemoryConfig
from petune.kernels.graphs.replay import Graphs
from petune.kernels.graphs.ways import Lanes
from petune.parallel.plan import ParallelPlan, in_flight
from tests.kernels.replays import Again, stacks
from tests.parallel import harness
from tests.parallel.cells import case, in_part
from tests.parallel.harness import Case, Trace, compare, oracle
from tests.parallel.plans import BACKENDS, LOOPED
from tests.pool import run

KEEPS_ALL = MemoryConfig("all", offload="none")


def _replayed(one: Case, limit: float, most: int) -> dict[str, Any]:
    """The trace of steps by stages with at most so many lanes, replays and passes that found none idle."""
    recorders: list[Again] = []
    plain, placed = harness.place, []
    missed: list[int] = []
    takes = Lanes.takes

    def asked(self: Lanes, *given: Any) -> bool:
        missed.extend([1] * (self._free() is None))
        return takes(self, *given)

    Lanes.takes = asked  # type: ignore[method-assign]  # in this very process, which ends soon

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
    return {"trace": trace, "lanes": lanes, "counts": counts, "missed": missed}


def lanes_of(plan: ParallelPlan, rank: int) -> int:
    """How many lanes `fuse_stages` gives each stage of a rank."""
    return math.ceil(in_flight(plan, rank) * (len(plan.stages) // plan.pp))


# every model and every schedule; four stages of T5 cost as much as all others
SHORT = [("llama-causal", "pp-interleaved"), ("bert-classify", "pp-gpipe"), ("t5-seq2seq", "pp-1f1b")]


@pytest.mark.parametrize(
    ("model", "schedule"),
    in_part(
        list(
            product(
                ("llama-causal", "bert-classify", "t5-seq2seq"), ("pp-1f1b", "pp-gpipe", "pp-interleaved")
            )
        ),
        SHORT,
    ),
)
def test_stages_that_are_replayed_train_as_one_process(model: str, schedule: str) -> None:
    plan = (BACKENDS | LOOPED)[schedule](model, 2)
    one = replace(case(model, "lora", plan, blocks=KEEPS_ALL), steps=3)
    expected = oracle(one)
    most = max(lanes_of(plan, rank) for rank in range(2))
    found = run(2, _replayed, one, expected.norms[0] / 2, most)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    for rank in found:
        forwards, backwards = (sum(lane[kind] for lane in rank["counts"]) for kind in (1, 2))
        assert backwards > 0, "nothing was replayed"
        assert 0 <= forwards - backwards <= len(rank["lanes"]), "only a row that is sent ahead"
        assert not rank["missed"], "a pass found no lane among as many as fuse makes"


def test_a_pass_that_finds_no_lane_runs_block_by_block() -> None:
    plan = BACKENDS["pp-gpipe"]("llama-causal", 2)
    one = replace(case("llama-causal", "lora", plan, blocks=KEEPS_ALL), steps=2)
    expected = oracle(one)
    found = run(2, _replayed, one, expected.norms[0] / 2, 1)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    assert all(set(rank["lanes"]) == {1} and rank["missed"] for rank in found)


def test_a_copy_of_lanes_has_as_many_and_no_recordings() -> None:
    lanes = Lanes(3)
    lanes.lanes.append(Graphs())
    made = copy.deepcopy(lanes)
    assert made.most == 3 and len(made.lanes) == 1
