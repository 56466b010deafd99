"""Things shared out: they add up, stay in memory, and no other division is done sooner."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from petune.errors import MachineError, UsageError
from petune.estimate.balance import balance, partition, reduced


def divisions(total: int, ranks: int) -> Iterator[tuple[int, ...]]:
    sizes = range(1, total + 1)
    return (one for one in itertools.product(sizes, repeat=ranks) if sum(one) == total)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.2, 8), min_size=2, max_size=4),
    st.integers(4, 10),
    st.lists(st.integers(1, 6), min_size=4, max_size=4),
)
def test_no_other_division_is_done_sooner(speeds: list[float], total: int, most: list[int]) -> None:
    def cost(rank: int, count: int) -> float:
        return count / speeds[rank] if count <= most[rank] else math.inf

    costs = [lambda count, rank=rank: cost(rank, count) for rank in range(len(speeds))]
    if sum(most[: len(speeds)]) < total:
        with pytest.raises(MachineError, match="together"):
            balance(total, costs, "block")
        return
    counts = balance(total, costs, "block")
    best = min(max(map(cost, range(len(one)), one)) for one in divisions(total, len(speeds)))
    assert sum(counts) == total and max(map(cost, range(len(counts)), counts)) == best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.1, 5), min_size=3, max_size=8),
    st.lists(st.floats(0.2, 8), min_size=2, max_size=3),
    st.integers(2, 8),
)
@example([1, 1, 2, 1], [1, 0.5, 1], 2)  # the first leaves a unit that it has time for
def test_no_other_stretches_are_done_sooner(work: list[float], speeds: list[float], most: int) -> None:
    def cost(rank: int, start: int, end: int) -> float:
        return sum(work[start:end]) / speeds[rank] if end - start <= most else math.inf

    def last(counts: tuple[int, ...]) -> float:
        ends = [0, *itertools.accumulate(counts)]
        return max(cost(rank, *ends[rank : rank + 2]) for rank in range(len(counts)))

    best = min(map(last, divisions(len(work), len(speeds))))
    alike = {speed: partial(cost, speeds.index(speed)) for speed in speeds}
    costs = [alike[speed] for speed in speeds]
    if math.isinf(best):
        with pytest.raises(MachineError, match="together"):
            partition(len(work), costs, "block")
        return
    counts = partition(len(work), costs, "block")
    assert sum(counts) == len(work) and min(counts) >= 1
    assert last(counts) <= best * (1 + 1e-5)


def test_units_that_are_alike_are_spread_evenly() -> None:
    assert partition(10, [lambda start, end: end - start] * 4, "block") == (3, 3, 2, 2)
    assert balance(10, [float] * 4, "head") == (3, 3, 2, 2)


def test_fewer_units_than_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="every rank needs a block"):
        partition(2, [lambda start, end: end - start] * 3, "block")
    with pytest.raises(UsageError, match="every rank needs a row"):
        balance(5, [float] * 3, "row", least=2)


def test_a_rank_without_memory_for_a_single_unit_is_named() -> None:
    with pytest.raises(MachineError, match="rank 1 has no memory for a single head"):
        balance(4, [float, lambda _: math.inf], "head")


def test_ratios_are_reduced() -> None:
    assert reduced((6, 2, 4)) == (3, 1, 2)
