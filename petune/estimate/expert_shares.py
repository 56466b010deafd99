"""Rows and experts shared out over replicas that share experts.

Outside experts a replica takes as long as its rows do, within them as long as its part of all experts: two
sums, each balanced by itself (petune.estimate.balance). What is sent ties them together, as tokens stay
where rows and experts are on one rank. So from both sums, and from even lists, single rows and experts
are moved for as long as a step becomes shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product

from petune.errors import MachineError
from petune.estimate.balance import balance, reduced
from petune.estimate.step_time import Clock
from petune.parallel import ParallelConfig, ParallelPlan
from petune.parallel.plan import apportion

WIDEST = 4  # ranks among which single rows and experts are moved

CostOf = Callable[[int], float]


@dataclass(frozen=True)
class Lists:
    """Rows and experts of each rank."""

    rows: tuple[int, ...]
    experts: tuple[int, ...]


def over_experts(
    layout: ParallelConfig, plan: ParallelPlan, clock: Clock, price: Callable[[ParallelConfig], float]
) -> ParallelConfig:
    """The layout with lists that balance replicas that share experts; as it is where none do, or where even
    lists are best."""
    if plan.ep == 1 or layout.ep is None:
        return layout
    axis, experts, rows = layout.ep, clock.work.shape.experts, clock.work.rows // plan.edp
    kinds = [set(clock.kinds[index :: plan.ep]) for index in range(plan.ep)]  # of each place in a group

    def outside(index: int, count: int) -> float:
        return max(clock.outside(kind, count) for kind in kinds[index])

    def within(index: int, count: int) -> float:
        return max(clock.within(kind, rows, count / experts) for kind in kinds[index])

    def with_lists(lists: Lists) -> ParallelConfig:
        return replace(layout, ep=replace(axis, shares=reduced(lists.rows), experts=lists.experts))

    ranks = range(plan.ep)
    outsides, withins = ([partial(way, index) for index in ranks] for way in (outside, within))
    found = share_out(rows, experts, outsides, withins, lambda lists: price(with_lists(lists)))
    even = apportion(rows, (1,) * plan.ep), plan.experts
    return layout if (found.rows, found.experts) == even else with_lists(found)


def share_out(
    rows: int,
    experts: int,
    outside: Sequence[CostOf],
    within: Sequence[CostOf],
    price: Callable[[Lists], float],
) -> Lists:
    """The lists of the least price, infinite where memory is short, that are found. outside, within: seconds
    of each rank for so many rows, and for so many experts. Raises MachineError where nothing fits."""
    ranks = (1,) * len(outside)
    starts = [Lists(apportion(rows, ranks), apportion(experts, ranks))]
    with suppress(MachineError):
        starts.append(Lists(balance(rows, outside, "row"), balance(experts, within, "expert")))
    found = [_climbed(one, price) for one in starts]
    best, seconds = min(found, key=lambda one: one[1])
    if seconds == float("inf"):
        remedy = "add devices, or choose a smaller model, batch_size or data.max_length"
        raise MachineError("the devices together have no memory for every expert", remedy=remedy)
    return best


def _climbed(lists: Lists, price: Callable[[Lists], float]) -> tuple[Lists, float]:
    """From `lists` on, the nearest that have no better beside them, with their price."""
    best = price(lists)
    while len(lists.rows) <= WIDEST:
        near = {one: price(one) for one in _beside(lists)}
        found = min(near, key=lambda one: near[one], default=lists)
        if near.get(found, best) >= best:
            break
        lists, best = found, near[found]
    return lists, best


def _beside(lists: Lists) -> Iterator[Lists]:
    """Those in which a row, an expert, or one of each has another rank."""
    for rows, experts in product(_moved(lists.rows), _moved(lists.experts)):
        if (rows, experts) != (lists.rows, lists.experts):
            yield Lists(rows, experts)


def _moved(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The counts, and those with one less here and one more there."""
    yield counts
    for source, target in permutations(range(len(counts)), 2):
        if counts[source] > 1:
            yield tuple(count - (rank == source) + (rank == target) for rank, count in enumerate(counts))
