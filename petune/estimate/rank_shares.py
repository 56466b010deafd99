"""What part of the work, and of the tensors, a rank of a plan has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from petune.estimate.balance import partition
from petune.estimate.footprint import routed
from petune.estimate.part_seconds import Straight, line_of, seconds_at
from petune.estimate.workload import Block, Place, Workload, WorkPart
from petune.kernels.memory.block_cost import Rates
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import Cut, ParallelPlan

FINEST = 64  # of a ratio of tokens
TALKING = ("attention", "scores", "mlp", "experts")  # places of regions behind which ranks meet


def share_of(part: WorkPart, cut: Cut | None, index: int, rows: float = 1.0) -> float:
    """The part of a part, of so many rows, that rank `index` of a cut computes."""
    if cut is None or part.place == "embedding":
        return 1.0
    if part.place == "head":
        own = part.own_tokens and cut.connection == "sequence" and not cut.vocabulary
        return fraction(cut.sequence if own else cut.vocabulary, index)
    if part.place in ("connection", "ladder"):
        return fraction(cut.sequence, index) if cut.connection == "sequence" else 1.0
    kind = kind_of(part)
    if cut.layout(kind) == "sequence":
        if part.place == "scores" and cut.exchange == "ulysses":
            return 1 / len(cut.sequence)
        if behind := _behind(part, cut, rows):
            start, whole = sum(cut.sequence[:index]), sum(cut.sequence)
            end = start + cut.sequence[index]
            return pairs_before(end / whole, behind) - pairs_before(start / whole, behind)
        return fraction(cut.sequence, index)
    return fraction(cut.columns if kind == "mlp" else cut.heads, index)


def kind_of(part: WorkPart) -> str:
    """The kind of the region that a part of one belongs to."""
    return "mlp" if part.place in ("mlp", "experts") else "attention"


def _behind(part: WorkPart, cut: Cut, rows: float) -> int:
    """How many samples lie behind one another in what ranks have a piece of, so that a later token of each
    costs more: causal attention's; 0 where tokens cost alike, as ranks have pieces from both ends."""
    if part.place != "scores" or not part.causal or cut.exchange == "ulysses":
        return 0
    samples = part.samples * math.ceil(rows) if cut.exchange == "gather" else 0
    return samples if samples > 1 else 0 if cut.folds and part.folds else 1


def pairs_before(share: float, samples: int) -> float:
    """The part of all pairs of causal attention within so many samples of one length, one behind the other,
    of which the query is in the first `share` of their tokens."""
    whole = math.floor(share * samples)
    return (whole + (share * samples - whole) ** 2) / samples


Weighed = tuple[tuple[WorkPart, float], ...]


def segments(block: Block, cut: Cut | None) -> list[Weighed]:
    """What the ranks of a cut compute between two meetings, with how much of each part. Where hidden states
    are whole, ranks meet behind attention and MLP alone, and norms and adapters count to these alike: a slow
    rank that computes them in full has the less of a region."""
    alone = [tuple((part, 1.0) for part in region) for region in block]
    talking = [one for one in alone if one[0][0].place in TALKING]
    if cut is None or cut.connection == "sequence" or not talking:
        return alone
    quiet = [pair for one in alone if one[0][0].place == "connection" for pair in one]
    beside = tuple((part, times / len(talking)) for part, times in quiet)
    others = [one for one in alone if one[0][0].place == "ladder"]
    return [one + beside for one in talking] + others


def beside_regions(
    every: Mapping[WorkPart, int], cut: Cut
) -> Callable[[Sequence[Place]], dict[WorkPart, float]]:
    """Of `every` part of blocks, those that count to regions of some places, as in `segments`, with how many
    there are of each."""
    talking = {part: times for part, times in every.items() if part.place in ("attention", "mlp", "experts")}
    quiet = {part: times for part, times in every.items() if part.place == "connection"}

    def beside(places: Sequence[Place]) -> dict[WorkPart, float]:
        own = sum(times for part, times in talking.items() if part.place in places)
        part_of = own / sum(talking.values()) if cut.connection == "whole" else 0.0
        return {part: times * part_of for part, times in quiet.items()}

    return beside


def held_of(part: WorkPart, cut: Cut | None, index: int) -> float:
    """The part of a part's tensors that the rank holds."""
    if cut is None or part.place in ("connection", "ladder"):
        return 1.0
    if part.place == "head":
        return fraction(cut.vocabulary, index)
    by_sequence = part.place in ("attention", "mlp", "experts") and cut.layout(kind_of(part)) == "sequence"
    return 1.0 if by_sequence else share_of(part, cut, index)


def held_experts(plan: ParallelPlan) -> list[float]:
    """The part of all experts that each rank holds of those that share them."""
    return [held / sum(plan.experts) for held in plan.experts] or [1.0]


def fraction(shares: Sequence[int], index: int) -> float:
    """A rank's part by a list of shares; all of it where there is no list."""
    return shares[index] / sum(shares) if shares else 1.0


def by_tokens(part: WorkPart, cut: Cut) -> bool:
    """Whether ranks of a cut have a part for tokens of their own."""
    return part.place in ("connection", "ladder") or cut.layout(kind_of(part)) == "sequence"


def stacked(work: Workload) -> list[Counter[WorkPart]]:
    """The parts of all blocks, and where there are several stacks those of each."""
    ends = accumulate(work.depth.values(), initial=0)
    ranges = dict.fromkeys([(0, len(work.blocks)), *pairwise(ends)])
    return [work.of_blocks(*one) for one in ranges]


def even_tokens(cut: Cut | None) -> tuple[bool, ...]:
    """Whether tokens may stay even beside unlike heads or columns: not, or that too, as what is gathered is
    on its way as long as its longest part."""
    return (False, True) if cut is not None and cut.sequence and (cut.heads or cut.columns) else (False,)


def tokens_by_speed(
    cut: Cut, parts: Mapping[WorkPart, int], by_rank: Sequence[frozenset[Rates]], rows: float
) -> tuple[int, ...]:
    """Tokens of the ranks, of which later ones may cost more where attention is causal. by_rank: of each, the
    rates of all devices at its place."""
    own = {part: times for part, times in parts.items() if by_tokens(part, cut)}
    behind = {part: _behind(part, cut, rows) for part in own}
    late = {part: own[part] for part in own if behind[part]}
    same = {part: own[part] for part in own if part not in late}
    samples = max((1, *behind.values()))
    total = max(FINEST, 4 * len(by_rank))
    costs = {
        rates: TokenCost(
            total, tuple((line_of(one, same, rows), line_of(one, late, rows)) for one in rates), samples
        )
        for rates in set(by_rank)
    }
    return partition(total, [costs[rates] for rates in by_rank], "token")


@dataclass(frozen=True)
class TokenCost:
    """Seconds of tokens [start, end) of `total` on a rank with such lines: of its share, and of the pairs
    that these see, within so many samples."""

    total: int
    lines: tuple[tuple[Straight, Straight], ...]
    samples: int

    def __call__(self, start: int, end: int) -> float:
        share, (before, past) = (end - start) / self.total, (start / self.total, end / self.total)
        seen = pairs_before(past, self.samples) - pairs_before(before, self.samples)
        return max(seconds_at(one, share) + seconds_at(other, seen) for one, other in self.lines)


def spans_of(plan: ParallelPlan, work: Workload) -> tuple[tuple[int, int], ...]:
    """The blocks [start, end) of every stage, counted over all stacks; of one that has all where there is no
    pipeline. Those of its rank pp are every plan.pp-th from pp on."""
    return plan.spans or ((0, len(work.blocks)),)


def shares_at(cut: Cut | None, index: int) -> tuple[int, ...]:
    """What a rank has by every list of a cut."""
    lists = (cut.heads, cut.columns, cut.sequence, cut.vocabulary) if cut else ()
    return tuple(one[index] for one in lists if one)


def spread_of(plan: ParallelPlan, dp: int, rows: int) -> tuple[float, float]:
    """The part of all experts that a replica holds, and copies of tokens that they see for each of its own,
    in a pass of so many rows of all replicas."""
    at = Coordinate(dp=dp, ep=dp % plan.ep)
    return held_experts(plan)[at.ep], routed(plan, at, rows)
