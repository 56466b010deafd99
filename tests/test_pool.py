"""The fork pool itself: results by rank, failures with their rank, hung ranks ended."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pool import RankError, Standing, run


def _sum(start: torch.Tensor) -> dict[str, Any]:
    value = start + dist.get_rank()
    dist.all_reduce(value)
    return {
        "rank": dist.get_rank(),
        "value": value,
        "half": value.bfloat16(),
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.0),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_computes_in_one_group_and_returns_its_own(world: int) -> None:
    found = run(world, _sum, torch.ones(3, dtype=torch.float64))
    assert [part["rank"] for part in found] == list(range(world))
    expected = torch.full((3,), world + world * (world - 1) / 2, dtype=torch.float64)
    for part in found:
        assert torch.equal(part["value"], expected) and part["value"].dtype == torch.float64
        assert torch.equal(part["half"], expected.bfloat16())
        assert part["none"].shape == (0, 3) and float(part["one"]) == 2


def test_a_function_defined_inside_a_test_and_a_patch_are_seen_by_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sep", "patched")
    here = 5
    assert run(2, lambda: (here, os.sep)) == [(5, "patched")] * 2


def test_gradients_can_be_computed_here_before_and_there_after() -> None:
    layer = nn.Linear(64, 64)
    layer(torch.ones(2, 64)).sum().backward()
    assert layer.weight.grad is not None

    def again() -> torch.Tensor:
        layer.zero_grad()
        layer(torch.ones(2, 64)).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    for found in run(2, again, timeout=20):
        assert torch.equal(found, layer.weight.grad)


def test_ranks_draw_different_random_numbers() -> None:
    first, second = run(2, lambda: torch.rand(4))
    assert not torch.equal(first, second)


def _fail_on_one(kind: type[BaseException]) -> None:
    if dist.get_rank() == 1:
        raise kind("this is the reason")
    dist.barrier()


def test_an_assertion_of_one_rank_fails_the_test_though_its_peer_waits_for_it() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1: this is the reason"):
        run(2, _fail_on_one, AssertionError)
    assert time.monotonic() - began < 10


def test_another_exception_is_reported_with_its_rank_and_traceback() -> None:
    with pytest.raises(
        RankError, match=r"rank 1 failed: Traceback(.|\n)*_fail_on_one(.|\n)*KeyError: 'this is the reason'"
    ):
        run(2, _fail_on_one, KeyError)


def test_ranks_that_do_not_finish_are_named_and_ended() -> None:
    def hang() -> None:
        if dist.get_rank() == 0:
            time.sleep(100)

    began = time.monotonic()
    with pytest.raises(RankError, match=r"after 1 s these ranks had not finished: 0 of 2(.|\n)*in hang"):
        run(2, hang, timeout=1)
    assert time.monotonic() - began < 10


def test_no_rank_outlives_its_call() -> None:
    run(2, _sum, torch.ones(1))
    with pytest.raises(AssertionError):
        run(3, _fail_on_one, AssertionError)
    assert not multiprocessing.active_children()


def _who() -> tuple[int, float]:
    value = torch.ones(())
    dist.all_reduce(value)
    return os.getpid(), float(value)


def test_ranks_that_stay_are_the_same_for_every_call_until_one_fails() -> None:
    standing = Standing()
    first, again, others = (standing.run(world, _who) for world in (2, 2, 3))
    assert first == again and [value for _, value in others] == [3, 3, 3]
    with pytest.raises(AssertionError, match="rank 1: "):
        standing.run(2, _fail_on_one, AssertionError)
    anew = standing.run(2, _who)
    assert not {*anew} & {*first} and standing.run(3, _who) == others
    standing.end()
    assert not multiprocessing.active_children()


def test_a_rank_that_dies_is_reported() -> None:
    def die() -> None:
        if dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 died: exit code 3"):
        run(2, die)
