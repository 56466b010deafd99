"""Stages whose messages are copied between linked ranks train as one process does, and nothing is sent
otherwise; a message waits for its place and for its reader."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from petune.errors import PetuneError
from petune.parallel.pipeline.linked_stage import SLOTS, Transfers, message_bytes
from petune.parallel.pipeline.order import order_of
from petune.parallel.plan import ParallelPlan, Stage
from tests.parallel import harness
from tests.parallel.cells import case
from tests.parallel.harness import Case, Trace, compare, oracle
from tests.parallel.linked_processes import link_all
from tests.parallel.plans import looped, pp
from tests.pool import run

PLANS = {
    "gpipe": pp("gpipe", 3),
    "1f1b": pp("1f1b", 5),
    "interleaved": looped("interleaved"),
    "zero-bubble": looped("zero-bubble"),
}


def _steps(one: Case, limit: float, folder: Path) -> dict[str, Any]:
    link_all(folder)
    sent, send = [0], Transfers.send

    def counted(*given: Any) -> None:
        sent[0] += 1
        send(*given)

    Transfers.send = counted  # type: ignore[method-assign]  # in this very process, which ends soon
    return {"trace": harness._steps(one, limit), "sent": sent[0]}


@pytest.mark.crossed(1)
@pytest.mark.parametrize("schedule", PLANS)
@pytest.mark.parametrize(
    ("name", "method"), [("llama-causal", "lora"), ("t5-seq2seq", "full"), ("bart-seq2seq", "side")], ids=str
)
def test_linked_stages_train_as_one_process(schedule: str, name: str, method: str, tmp_path: Path) -> None:
    one = case(name, method, PLANS[schedule](name, 2), passes=(8, 4), steps=1, dropout=0.1)
    expected = oracle(one)
    found = run(2, _steps, one, expected.norms[0] / 2, tmp_path, timeout=90)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    assert all(rank["sent"] for rank in found)


def _talk(folder: Path, late: int) -> bool:
    """Whether every message of a channel and of the one back came whole, where rank `late` is late."""
    link_all(folder)
    group = dist.group.WORLD
    assert group is not None
    rank, draw = group.rank(), random.Random(group.rank())
    transfers = Transfers(group, torch.device("cpu"), 2)
    right = True
    for size in (5, 50):  # the room grows

        def message(number: int, back: bool, size: int = size) -> list[torch.Tensor]:
            return [torch.full((size,), 2.0 * number + back), torch.full((3,), number, dtype=torch.int64)]

        transfers.reserve(message_bytes(message(0, False)))
        for start in range(0, 6 * SLOTS, SLOTS):
            # no more go ahead than there are places for
            for number in range(start, start + SLOTS):
                if rank == late and draw.random() < 0.5:
                    time.sleep(1e-3)
                transfers.send(rank, bool(rank), message(number, bool(rank)))
            for number in range(start, start + SLOTS):
                expected = message(number, not rank)
                found = [torch.zeros_like(value) for value in expected]
                transfers.receive(1 - rank, not rank, found)
                right &= all(map(torch.equal, found, expected))
    return right


@pytest.mark.parametrize("late", [0, 1])
def test_messages_come_whole_and_in_order_though_one_rank_is_late(late: int, tmp_path: Path) -> None:
    assert run(2, _talk, tmp_path, late) == [True, True]


def _overrun(folder: Path) -> bool:
    """Whether what was sent first is still there once twice as many were sent as have places."""
    link_all(folder)
    group = dist.group.WORLD
    assert group is not None
    transfers = Transfers(group, torch.device("cpu"), 2)
    transfers.reserve(1024)
    if group.rank() == 0:
        for number in range(2 * SLOTS):
            transfers.send(0, False, [torch.full((4,), float(number))])
        return True
    time.sleep(0.2)  # the sender would be through by now
    found = torch.zeros(4)
    right = True
    for number in range(2 * SLOTS):
        transfers.receive(0, False, [found])
        right &= bool((found == number).all())
    return right


def test_a_message_that_nobody_has_taken_is_not_written_over(tmp_path: Path) -> None:
    assert run(2, _overrun, tmp_path) == [True, True]


def stalls(plan: ParallelPlan, slots: int) -> bool:
    """Whether ranks that leave at most `slots` messages of a channel wait for one another for ever."""
    order, last = order_of(plan), len(plan.stages) - 1
    sent, taken, at = Counter[tuple[int, bool]](), Counter[tuple[int, bool]](), [0] * plan.pp

    def acts(rank: int) -> bool:
        """Whether a rank gets through its next pass: reading before it, sending behind it."""
        step = order[rank][at[rank]]
        back = step.kind in "BI"
        if step.kind == "W":
            return True
        source, channel = (step.stage + 1 if back else step.stage - 1, back), (step.stage, back)
        if 0 <= source[0] <= last and sent[source] <= step.piece:
            return False
        there = 0 <= step.stage + (-1 if back else 1) <= last
        if 0 <= source[0] <= last:
            taken[source] = max(taken[source], step.piece + 1)
        if there and sent[channel] >= slots + taken[channel]:
            return False
        sent[channel] += there
        return True

    while any(place < len(steps) for place, steps in zip(at, order, strict=True)):
        moved = [rank for rank in range(plan.pp) if at[rank] < len(order[rank]) and acts(rank)]
        for rank in moved:
            at[rank] += 1
        if not moved:
            return True
    return False


@pytest.mark.crossed(1)
@pytest.mark.parametrize("several", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_no_schedule_runs_further_ahead_than_messages_have_places(ranks: int, several: int) -> None:
    for schedule in ("gpipe", "1f1b") if several == 1 else ("interleaved", "zero-bubble"):
        for pieces in {ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 2 * ranks + 2, 3 * ranks, 30}:
            if several > 1 and pieces % max(1, pieces // ranks):
                continue
            plan = ParallelPlan(
                pp=ranks, stages=(Stage({}),) * (ranks * several), schedule=schedule, microbatches=pieces
            )
            assert not stalls(plan, max(SLOTS, ranks)), (schedule, pieces)


def test_with_four_places_zero_bubble_over_six_ranks_would_wait_for_ever() -> None:
    plan = ParallelPlan(pp=6, stages=(Stage({}),) * 12, schedule="zero-bubble", microbatches=11)
    assert stalls(plan, 4) and not stalls(plan, 6)


def test_a_message_that_torch_does_not_ask_for_is_an_error() -> None:
    transfers: Any = Transfers.__new__(Transfers)
    transfers.due = {}
    transfers.settle()
    transfers.due = {(1, True, 3): []}
    with pytest.raises(PetuneError, match="stage 1 of the pipeline sent micro-batch 3 back"):
        transfers.settle()
