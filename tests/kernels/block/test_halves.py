"""Halves of a batch that go through cut blocks in turns train as one process does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from petune.kernels.block import halves
from petune.kernels.block.halves import Halves
from petune.kernels.block.turns import Turns
from petune.kernels.configs import MemoryConfig
from petune.kernels.memory import policy_hook
from tests.parallel import harness
from tests.parallel.cells import KEPT, case, in_part
from tests.parallel.harness import Case, Trace, compare, on_ranks, oracle
from tests.parallel.plans import overlapping

pytestmark = pytest.mark.usefixtures("standing")
# how often a block that keeps all talks to other ranks on its way ahead and back, where all of it trains
TALKS = {"tp": 4, "galaxy": 8, "galaxy2": 4, "cut": 6, "sp-gather": 2, "sp-ulysses": 4}
CUT = list(TALKS)
PLANS = {backend: overlapping(backend) for backend in CUT}
ALL = MemoryConfig("all", offload="none")


def _in_halves(one: Case, limit: float) -> dict[str, Any]:
    """The trace of steps, the sizes of halves that went in turns, how often they talked, what was said."""
    seen: list[tuple[int, ...]] = []
    said: list[str] = []
    made = Halves.forward

    def forward(ctx: Any, blocks: Any, hidden: torch.Tensor, *tensors: Any) -> torch.Tensor:
        seen.extend([tuple(rows.stop - rows.start for rows in halves.halves(len(hidden)))] * len(blocks))
        return made(ctx, blocks, hidden, *tensors)

    talk, talks = Turns.talk, []

    def counted(self: Turns, say: Any) -> Any:
        talks.append(say)
        return talk(self, say)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(policy_hook, "say", said.append)
        patched.setattr(Halves, "forward", staticmethod(forward))
        patched.setattr(Turns, "talk", counted)
        trace = harness._steps(one, limit)
    return {"trace": trace, "seen": seen, "talks": len(talks), "said": said}


def _check(one: Case, sizes: tuple[int, int] | None, why: str = "") -> list[float]:
    """Compare with one process, and what was said of those that went whole; how often each rank lets the
    other half have its turn, a block and half."""
    expected = oracle(one)
    found = on_ranks(one.plan.world, _in_halves, one, expected.norms[0] / 2, timeout=90)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    for rank in found:
        assert set(rank["seen"]) == (set() if sizes is None else {sizes})
        told = [line.rpartition(": ")[2] for line in rank["said"] if line.startswith("overlap:")]
        assert set(told) == ({why} if why else set())
    return [rank["talks"] / max(1, 2 * len(rank["seen"])) for rank in found]


@pytest.mark.crossed(1)
@pytest.mark.parametrize("backend", CUT)
@pytest.mark.parametrize("method", ["lora", "full", "adapter"])
def test_halves_train_as_one_process(backend: str, method: str) -> None:
    plan = PLANS[backend]("llama-causal", 2)
    talks = _check(case("llama-causal", method, plan, passes=(4,), steps=1, blocks=ALL), (2, 2))
    assert method != "full" or talks == [TALKS[backend]] * 2
    assert min(talks) >= TALKS[backend] / 2


ODD = [("cut", 0), ("sp-ulysses", 1), ("sp-ulysses", 2), ("cut", 3)]


@pytest.mark.parametrize(
    ("backend", "kept"),
    in_part(list(product(CUT, range(len(KEPT)))), ODD),
)
def test_halves_of_an_odd_number_of_rows_draw_the_same_and_compute_again(backend: str, kept: int) -> None:
    plan = PLANS[backend]("llama-causal", 2)
    one = case("llama-causal", "lora", plan, passes=(3,), dropout=0.1, steps=1, blocks=KEPT[kept])
    _check(one, (2, 1))


def test_encoders_go_in_halves_and_what_reads_an_encoder_does_not() -> None:
    one = case("bert-classify", "lora", PLANS["galaxy"]("bert-classify", 2), passes=(4,), steps=1, blocks=ALL)
    _check(one, (2, 2))
    _check(replace(one, method="adapter", tuning=(("kind", "pfeiffer"),)), (2, 2))
    two = case("t5-seq2seq", "lora", PLANS["tp"]("t5-seq2seq", 2), passes=(4,), blocks=ALL)
    _check(replace(two, steps=1), None, "its blocks read more than hidden states, or lend their keys")


@pytest.mark.parametrize(
    ("passes", "why"), [((1,), "one row has no halves"), ((3, 1), "there is padding in them")], ids=str
)
def test_what_has_no_halves_goes_whole_and_is_said_once(passes: tuple[int, ...], why: str) -> None:
    one = case("llama-causal", "lora", PLANS["tp"]("llama-causal", 2), passes=passes, steps=1, blocks=ALL)
    expected = oracle(one)
    found = on_ranks(2, _in_halves, one, expected.norms[0] / 2)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    for rank in found:
        assert not rank["seen"]
        said = [line for line in rank["said"] if line.startswith("overlap:")]
        assert why in said[0] and len(set(said)) == len(said)
