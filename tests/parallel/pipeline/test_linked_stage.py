"""Stages whose messages are copied between linked ranks train as one process does, and nothing is sent
otherwise; a message waits for its place and for its reader."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from petune.parallel.pipeline.linked_stage import SLOTS, Transfers, message_bytes
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


@pytest.mark.parametrize("schedule", PLANS)
@pytest.mark.parametrize(
    ("name", "method"), [("llama-causal", "lora"), ("t5-seq2seq", "full"), ("bart-seq2seq", "side")], ids=str
)
def test_linked_stages_train_as_one_process(schedule: str, name: str, method: str, tmp_path: Path) -> None:
    one = case(name, method, PLANS[schedule](name, 2), passes=(8, 4), steps=2, dropout=0.1)
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
