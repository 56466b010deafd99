"""Things shared out so that the last to finish finishes first.

The idea is Galaxy's (Ye et al. 2024, arXiv:2405.17245): each rank gets work by how fast it is, and what a
rank has no memory for goes to the ranks that have some to spare. Where anybody may have any unit (heads,
columns, rows) a greedy rule is exact: units are handed out one by one to whoever would be done first. Where
units come in an order (blocks over stages, tokens over ranks) the time is bisected. A cost of infinity says
that there is no memory for so much.
"""

from __future__ import annotations

import heapq
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate, pairwise

from petune.errors import MachineError, UsageError


def balance(
    total: int, costs: Sequence[Callable[[int], float]], what: str, least: int = 1
) -> tuple[int, ...]:
    """`total` units over ranks, at least `least` each, of which rank i needs costs[i](n) for n, never less
    for more.

    Raises UsageError for too few units, MachineError where a rank has no room for its least, or all ranks
    together not for all.
    """
    if total < least * len(costs):
        raise UsageError(
            f"every rank needs a {what}", expected=f"at most {total // least} ranks", found=str(len(costs))
        )
    counts = [least] * len(costs)
    _refuse_full([cost(least) for cost in costs], what)
    waiting = [(cost(least + 1), rank) for rank, cost in enumerate(costs)]
    heapq.heapify(waiting)
    for _ in range(total - sum(counts)):
        seconds, rank = heapq.heappop(waiting)
        if math.isinf(seconds):
            remedy = "add devices, or choose a smaller model, batch_size or data.max_length"
            raise MachineError(f"the devices together have no memory for every {what}", remedy=remedy)
        counts[rank] += 1
        heapq.heappush(waiting, (costs[rank](counts[rank] + 1), rank))
    return tuple(counts)


def _refuse_full(least: Sequence[float], what: str) -> None:
    if math.isinf(max(least)):
        raise MachineError(
            f"rank {least.index(max(least))} has no memory for a single {what}",
            remedy="leave that device out",
        )


LARGEST = sys.float_info.max  # seconds, as infinity says that there is no memory
NEAREST = 1e-6  # of the longest: what is shorter by less is not looked for
Stretch = Callable[[int, int], float]  # the cost of units [a, b)


def partition(total: int, costs: Sequence[Stretch], what: str) -> tuple[int, ...]:
    """`total` units in their order over ranks, at least one each, of which rank i needs costs[i](a, b) for
    units [a, b), never less for more. Ranks that are alike have the same cost, which is asked once for each
    stretch. Raises as `balance`."""
    return _partitioned(total, tuple(costs), what)


@lru_cache(maxsize=512)  # many layouts ask for the same
def _partitioned(total: int, costs: tuple[Stretch, ...], what: str) -> tuple[int, ...]:
    ranks = len(costs)
    if total < ranks:
        raise UsageError(f"every rank needs a {what}", expected=f"at most {total} ranks", found=str(ranks))
    known = {one: cache(one) for one in costs}
    costs = tuple(known[one] for one in costs)
    best = _filled(total, costs, math.inf)
    if best is None:
        remedy = "add devices, or choose a smaller model, batch_size or data.max_length"
        raise MachineError(f"the devices together have no memory for every {what}", remedy=remedy)
    low, high, last = 0.0, _longest(best, costs), False
    while high - low > NEAREST * high:
        limit = high * (1 - NEAREST) if last else (low + high) / 2
        found = _filled(total, costs, limit)
        if found is not None:
            best, high = found, min(limit, _longest(found, costs))
        elif last:
            break
        else:
            low = limit
        # when both are near, what was found is most often the best
        last = found is not None and not last and high < 1.1 * low
    return _smoothed(best, costs)


def _filled(total: int, costs: Sequence[Stretch], limit: float) -> list[int] | None:
    """Units in order, each rank with what it does within the limit, the first ones with the most; None where
    some are left.

    As many as a rank can is not always best: the next has to begin with a unit that is small enough for it.
    So every place is followed where a rank can begin.
    """

    limit = min(limit, LARGEST)

    def furthest(cost: Stretch, start: int) -> int:
        return start + bisect_right(range(start + 1, total + 1), limit, key=partial(cost, start))

    known: dict[Stretch, dict[int, int]] = {cost: {} for cost in costs}
    starts = [[range(1)]]
    for rank, cost in enumerate(costs):
        starts.append(
            _ends(starts[-1], total - (len(costs) - 1 - rank), known[cost], partial(furthest, cost))
        )
    end, counts = total, []
    if not any(total in one for one in starts[-1]):
        return None
    for places in reversed(starts[:-1]):
        start = max(min(one[-1], end - 1) for one in places if one[0] < end)
        counts.append(end - start)
        end = start
    return counts[::-1]


def _ends(
    starts: list[range], most: int, known: dict[int, int], furthest: Callable[[int], int]
) -> list[range]:
    """Where a rank can end, at `most` at the latest, that begins at one of the starts; ranges in order.
    known: what `furthest` has said before."""

    def reach(start: int) -> int:
        if start not in known:
            known[start] = furthest(start)
        return known[start]

    ends: list[range] = []
    for places in starts:
        start = places[0]
        while start <= places[-1]:
            # Every unit up to the furthest end fits alone, so the rank can begin at each of them.
            last = max(start, min(reach(start) - 1, most - 1, places[-1]))
            first, stop = start + 1, min(reach(last), most) + 1
            if ends and first <= ends[-1].stop:  # which is never beyond this one
                first = ends.pop().start
            if first < stop:
                ends.append(range(first, stop))
            start = last + 1
    return ends


def _longest(counts: Sequence[int], costs: Sequence[Stretch]) -> float:
    bounds = pairwise(accumulate(counts, initial=0))
    return max(cost(*ends) for cost, ends in zip(costs, bounds, strict=True))


def _smoothed(counts: list[int], costs: Sequence[Stretch]) -> tuple[int, ...]:
    """The same with no neighbours of which one could take from the other and both be done sooner."""
    ends = [0, *accumulate(counts)]
    for _ in counts:
        before = list(ends)
        for left in range(len(counts) - 1):
            start, middle, end = ends[left : left + 3]
            near = [one for one in (middle, middle - 1, middle + 1) if start < one < end]
            before_it, behind_it = costs[left : left + 2]
            ends[left + 1] = min(near, key=lambda at: max(before_it(start, at), behind_it(at, end)))
        if ends == before:
            break
    return tuple(end - start for start, end in pairwise(ends))


def reduced(values: Sequence[int]) -> tuple[int, ...]:
    """The same ratio in the smallest whole numbers."""
    divisor = math.gcd(*values)
    return tuple(value // divisor for value in values)


def up_to(each: float, most: int, count: int) -> float:
    """A cost: of so many units, of which there is room for `most`."""
    return each * count if count <= most else math.inf
