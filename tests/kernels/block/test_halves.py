"""Halves of a batch that go through cut blocks in turns train as one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from petune.kernels.block import halves
from petune.kernels.block.halves import Halves
from petune.kernels.block.turns import Turns, alone, together
from petune.kernels.configs import MemoryConfig
from petune.kernels.memory.policy_hook import Governor
from tests.parallel import harness
from tests.parallel.cells import KEPT, case
from tests.parallel.harness import Case, Trace, compare, oracle
from tests.parallel.plans import BACKENDS
from tests.pool import run

# how often a block that keeps all talks to other ranks on its way ahead and back, where all of it trains
TALKS = {"tp": 4, "galaxy": 8, "galaxy2": 4, "sp-gather": 2, "sp-ulysses": 4, "cut": 6}
CUT = list(TALKS)
ALL = MemoryConfig("all", offload="none")


def _in_halves(one: Case, limit: float, pays: bool = True) -> dict[str, Any]:
    """The trace of steps whose halves pay or not, and the sizes of those that went in turns."""
    seen: list[tuple[int, ...]] = []
    made = Halves.forward

    def forward(ctx: Any, calls: Any, hidden: torch.Tensor, *tensors: Any) -> torch.Tensor:
        seen.append(tuple(rows.stop - rows.start for rows in halves.halves(len(hidden))))
        return made(ctx, calls, hidden, *tensors)

    Halves.forward = staticmethod(forward)  # type: ignore[method-assign]  # in this very process, which ends soon
    Governor._pays = lambda *_: pays  # type: ignore[method-assign]
    talk, talks = Turns.talk, []

    def counted(self: Turns, say: Any) -> Any:
        talks.append(say)
        return talk(self, say)

    Turns.talk = counted  # type: ignore[method-assign]
    return {"trace": harness._steps(one, limit), "seen": seen, "talks": len(talks)}


def _check(one: Case, sizes: tuple[int, int] | None) -> list[float]:
    """Compare with one process; how often each rank lets the other half have its turn, a block and half."""
    expected = oracle(one)
    found = run(one.plan.world, _in_halves, one, expected.norms[0] / 2, timeout=90)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    for rank in found:
        assert set(rank["seen"]) == (set() if sizes is None else {sizes})
    return [rank["talks"] / max(1, 2 * len(rank["seen"])) for rank in found]


@pytest.mark.parametrize("backend", CUT)
@pytest.mark.parametrize("method", ["lora", "full", "adapter"])
def test_halves_train_as_one_process(backend: str, method: str) -> None:
    plan = BACKENDS[backend]("llama-causal", 2)
    talks = _check(case("llama-causal", method, plan, passes=(4,), blocks=ALL), (2, 2))
    assert method != "full" or talks == [TALKS[backend]] * 2
    assert min(talks) >= TALKS[backend] / 2


@pytest.mark.parametrize("backend", CUT)
def test_halves_of_an_odd_number_of_rows_draw_the_same_and_compute_again(backend: str) -> None:
    plan = BACKENDS[backend]("llama-causal", 2)
    for kept in KEPT:
        one = case("llama-causal", "lora", plan, passes=(3,), dropout=0.1, steps=1, blocks=kept)
        _check(one, (2, 1))


def test_encoders_go_in_halves_and_what_reads_an_encoder_does_not() -> None:
    one = case("bert-classify", "lora", BACKENDS["galaxy"]("bert-classify", 2), passes=(4,), blocks=ALL)
    _check(one, (2, 2))
    two = case("t5-seq2seq", "lora", BACKENDS["tp"]("t5-seq2seq", 2), passes=(4,), blocks=ALL)
    _check(replace(two, steps=1), None)


def test_padded_rows_and_a_single_row_go_whole() -> None:
    plan = BACKENDS["tp"]("llama-causal", 2)
    _check(case("llama-causal", "lora", plan, passes=(1,), steps=1, blocks=ALL), None)


def test_all_ranks_go_whole_where_halves_do_not_pay_on_one() -> None:
    plan = BACKENDS["tp"]("llama-causal", 2)
    one = case("llama-causal", "lora", plan, passes=(4,), steps=1, blocks=ALL)
    expected = oracle(one)
    found = run(2, _pays_on_the_first, one, expected.norms[0] / 2)
    assert [rank["seen"] for rank in found] == [[], []]


def _pays_on_the_first(one: Case, limit: float) -> dict[str, Any]:
    return _in_halves(one, limit, torch.distributed.get_rank() == 0)


def test_two_passes_take_turns_where_they_talk() -> None:
    said: list[str] = []

    def steps(name: str, talks: int) -> Any:
        turns = Turns(torch.device("cpu"))
        for at in range(talks):
            said.append(f"{name}{at}")
            yield from turns.talk(lambda at=at: said.append(f"{name}{at} talks"))
        said.append(f"{name} ends")
        return name

    assert together(steps("a", 2), steps("b", 1)) == ["a", "b"]
    assert said == ["a0", "a0 talks", "b0", "b0 talks", "a1", "a1 talks", "b ends", "a ends"]
    assert alone(steps("c", 1)) == "c"
