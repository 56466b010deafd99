"""How long a step of a plan takes on a cluster: slowest compute, communication that nothing hides, and what a
pipeline stands still.

Ranks that share a block meet after each region, so a region takes as long as its slowest rank. What regions,
stages and replicas send is the table of petune.estimate.comm_cost, over the slowest link among the ranks that
send it; nothing hides it but for the weights that FSDP gathers, which come while blocks compute, and what
`overlap` hides (petune.estimate.halves). The order in a pipeline is its schedule's own (timeline.py). Of
a causal model's cut sequence ranks have more scores the later their tokens are, if not of both ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from petune.estimate.cluster import Cluster
from petune.estimate.comm_cost import (
    SUM,
    Load,
    Transition,
    bubble,
    messages,
    of_experts,
    summed_over,
    transitions,
)
from petune.estimate.durations import Both, RankGroup, StepTime
from petune.estimate.halves import HalfRegion, added, in_turns, takes_halves
from petune.estimate.part_seconds import line
from petune.estimate.rank_shares import Weighed, held_experts, held_of, segments, share_of, spans_of
from petune.estimate.timeline import end_of
from petune.estimate.workload import RegionWork, Workload, WorkPart
from petune.models.spec import StackName
from petune.parallel.fsdp import is_light
from petune.parallel.link_speed import HIDDEN, UNEVEN
from petune.parallel.plan import Cut, ParallelPlan, apportion

GRADIENT = 4  # bytes of a number's gradient
ATTENTION = ("attention", "scores")
INSIDE = ("enter", "leave", "ends", "within")  # a region


class Clock:
    """Times a workload on a cluster. again: blocks compute their forward pass again on the way back."""

    def __init__(self, work: Workload, cluster: Cluster, again: bool = False) -> None:
        self.work, self.cluster, self.again = work, cluster, again
        self.known: dict[object, Any] = {}
        self.groups: dict[range, RankGroup] = {}
        rates = [device.rates for device in cluster.devices]
        self.rates = list(dict.fromkeys(rates))
        self.begins = max(one.begins for one in rates)
        numbers = {one: number for number, one in enumerate(self.rates)}
        self.kinds = [numbers[one] for one in rates]  # of devices, by rank
        ends = (*cluster.hosts, len(rates))
        self.hosts = [end - rank for first, end in pairwise(ends) for rank in range(first, end)]  # left of it

    # ------------------------------------------------------------ blocks

    def group(self, plan: ParallelPlan, dp: int, pp: int) -> RankGroup:
        """Those that share the blocks of a stage of a replica."""
        first = (pp * plan.dp + dp) * plan.tp
        ranks = range(first, first + plan.tp)
        if ranks not in self.groups:
            self.groups[ranks] = RankGroup(
                tuple(self.kinds[first : first + plan.tp]), self.cluster.link(ranks)
            )
        return self.groups[ranks]

    def region(self, region: RegionWork, group: RankGroup, cut: Cut | None, rows: float) -> Both:
        """Of the slowest rank that shares it."""
        return self.segment(tuple((part, 1.0) for part in region), group, cut, rows)

    def segment(self, parts: Weighed, group: RankGroup, cut: Cut | None, rows: float) -> Both:
        """Of the slowest rank that shares such parts, behind which all meet."""
        slowest = Both()
        shares = [tuple(share_of(part, cut, at, rows) for part, _ in parts) for at in range(len(group.kinds))]
        for kind, own in dict.fromkeys(zip(group.kinds, shares, strict=True)):  # ranks that are alike once
            ahead = back = 0.0
            for (part, times), share in zip(parts, own, strict=True):
                one = line(self.rates[kind], part, rows)
                ahead += times * (one.forward[0] + share * one.forward[1])
                back += times * (one.backward[0] + share * one.backward[1])
            slowest = max(slowest, Both(ahead, back), key=lambda one: one.total)
        inside = parts[0][0].place not in ("embedding", "head", "ladder")
        again = slowest.forward if self.again and inside and slowest.backward else 0.0
        return slowest + Both(backward=again)

    def _block(
        self, stack: StackName, kind: int, back: bool, group: RankGroup, cut: Cut | None, rows: float
    ) -> tuple[Both, Both]:
        """The same of a block of some kind, to which gradients go back or not."""
        key = (stack, kind, back, group, cut, rows)
        if key not in self.known:
            if self.halved(cut, rows):
                self.known[key] = in_turns(self.turns(stack, kind, back, group, cut, rows / 2))
            else:
                parts = segments(self.work.kinds[kind], cut)
                computing = sum((self.segment(one, group, cut, rows) for one in parts), Both())
                said = self._said(stack, kind, group, cut, rows)
                self.known[key] = computing, sum((self._sent(one, group, cut, back) for one in said), Both())
        found: tuple[Both, Both] = self.known[key]
        return found

    def halved(self, cut: Cut | None, rows: float) -> bool:
        """Whether so many rows of a pass go through blocks in two halves, and one hides what the other
        says."""
        return cut is not None and cut.overlap and self.work.overlaps and rows > 1 and takes_halves(self.work)

    def turns(
        self, stack: StackName, kind: int, back: bool, group: RankGroup, cut: Cut | None, rows: float
    ) -> list[HalfRegion]:
        """A block of some kind, region by region, of a half of so many rows."""
        said, found = self._said(stack, kind, group, cut, rows), []
        memory = min(self.rates[one].memory for one in group.kinds)
        for parts in segments(self.work.kinds[kind], cut):
            name = "attention" if (place := parts[0][0].place) in ATTENTION else place
            own = [one for one in said if one.where.endswith(f" {name}")]
            saying = sum((self._sent(one, group, cut, back, HIDDEN) for one in own), Both())
            moved = sum((self._added(one, len(group.kinds), back) for one in own), Both())
            found.append(HalfRegion(self.segment(parts, group, cut, rows), saying, moved * (1 / memory)))
        return found

    def each(self, group: RankGroup, cut: Cut | None, rows: float) -> list[tuple[Both, Both]]:
        """Of every block its computing, and what its ranks say to one another, of so many rows."""
        lowest = self.work.lowest
        kinds = [(*kind, number >= lowest) for number, kind in enumerate(self.work.blocks)]
        known = {kind: self._block(*kind, group, cut, rows) for kind in set(kinds)}
        return [known[kind] for kind in kinds]

    def stretch(
        self, group: RankGroup, cut: Cut | None, start: int, end: int, rows: float
    ) -> tuple[Both, Both]:
        """The same of blocks [start, end), with what stands before the first and behind the last."""
        key = ("stretch", group, cut, start, end, rows)
        if key not in self.known:
            self.known[key] = self._stretch(group, cut, start, end, rows)
        found: tuple[Both, Both] = self.known[key]
        return found

    def _stretch(
        self, group: RankGroup, cut: Cut | None, start: int, end: int, rows: float
    ) -> tuple[Both, Both]:
        computing = saying = Both()
        lowest = self.work.lowest
        for low, high in ((start, min(end, lowest)), (max(start, lowest), end)):
            for kind, times in Counter(self.work.blocks[low:high] if low < high else ()).items():
                own = self._block(*kind, low >= lowest, group, cut, rows)
                computing, saying = computing + own[0] * times, saying + own[1] * times
        if self.halved(cut, rows) and start < end:  # behind the last block one half is alone
            last = self.turns(*self.work.blocks[end - 1], end > lowest, group, cut, rows / 2)
            saying += max((one.saying for one in last), key=lambda one: one.total)
        ends = [self.work.embedding] * (start == 0) + [self.work.head] * (end == len(self.work.blocks))
        for one in ends:
            computing += self.region(one, group, cut, rows)
        beside = [one for one in self._spoken(cut, group, rows) if one.when not in INSIDE]
        for sent in beside if ends else ():
            saying += self._sent(sent, group, cut, True)
        return computing, saying

    # ------------------------------------------------------------ what ranks say

    def _spoken(self, cut: Cut | None, group: RankGroup, rows: float) -> tuple[Transition, ...]:
        """What the ranks of a cut say in one block of each stack, which attends, and beside blocks, for so
        many rows."""
        if cut is None:
            return ()
        key = ("spoken", len(group.kinds), cut, rows)  # whatever the devices are
        if key not in self.known:
            load = Load(1, dict(self.work.tokens), self.work.itemsize)
            plan, shape = ParallelPlan(tp=len(group.kinds), cut=cut), replace(self.work.shape, mixers=0)
            self.known[key] = tuple(
                replace(one, forward=int(one.forward * rows), backward=int(one.backward * rows))
                for one in transitions(plan, self.work.family, shape, dict.fromkeys(self.work.depth, 1), load)
            )
        found: tuple[Transition, ...] = self.known[key]
        return found

    def _said(
        self, stack: StackName, kind: int, group: RankGroup, cut: Cut | None, rows: float
    ) -> list[Transition]:
        """What the ranks of a cut say in a block of some kind."""
        mixes = not any(part.place == "attention" for region in self.work.kinds[kind] for part in region)
        every = (one for one in self._spoken(cut, group, rows) if one.when in INSIDE)
        own = (one for one in every if one.where.split()[0] == stack)
        return [one for one in own if not (mixes and one.where.endswith(" attention"))]  # a mixer's turn

    def _sent(self, one: Transition, group: RankGroup, cut: Cut | None, back: bool, how: str = "") -> Both:
        """A transition among a group, as often as it happens. how: HIDDEN, or as it is."""
        ranks, link = len(group.kinds), group.link
        way = how + UNEVEN * (cut is not None and len(set(cut.sequence)) > 1)
        pair = (link.of(way + word).seconds(messages(word, ranks), size) for word, size in _ways(one, back))
        return Both(*pair) * one.times

    def _added(self, one: Transition, ranks: int, back: bool) -> Both:
        """Bytes that adding up moves in a transition, as often as it happens."""
        return Both(*(added(word, ranks, size) for word, size in _ways(one, back))) * one.times

    # ------------------------------------------------------------ a step

    def replicas(self, plan: ParallelPlan) -> dict[int, int]:
        """One of each kind of replica, by its place along dp, and how many there are of its kind."""
        rows = apportion(self.work.rows, plan.shares)
        known: dict[object, int] = {}
        found: Counter[int] = Counter()
        for dp in range(plan.dp):
            ranks = ((pp * plan.dp + dp) * plan.tp for pp in range(plan.pp))
            kinds = tuple((*self.kinds[one : one + plan.tp], self.hosts[one] >= plan.tp) for one in ranks)
            found[known.setdefault((kinds, rows[dp]), dp)] += 1
        return found

    def of(self, plan: ParallelPlan) -> StepTime:
        """A step of `plan`, whose world is the cluster's."""
        rows = apportion(self.work.rows, plan.shares)
        if plan.ep > 1:
            passes = [self._together(plan, first, rows) for first in range(0, plan.dp, plan.ep)]
        else:
            passes = [self._pass(plan, dp, rows[dp]) for dp in self.replicas(plan)]
        slowest = max(passes, key=lambda one: one.total)
        once, times = self._update(plan), self.work.accumulate
        return StepTime(
            slowest.compute * times + once.compute + self.begins,
            slowest.communication * times + once.communication,
            slowest.waiting * times,
        )

    def at_best(self, plan: ParallelPlan) -> float:
        """Seconds in which the ranks of an even plan would all be done if any work could go to any of
        them, with what a pipeline of equal stages waits."""
        rows = apportion(self.work.rows, plan.shares)
        if plan.ep > 1:
            every = [self._together(plan, first, rows, whole=False) for first in range(0, plan.dp, plan.ep)]
            return self.begins + self.work.accumulate * min(one.total for one in every)
        pace = 0.0
        for dp, count in self.replicas(plan).items():
            for pp in range(plan.pp):
                group = self.group(plan, dp, pp)
                for kind, times in Counter(group.kinds).items():
                    alike = replace(group, kinds=(kind,) * plan.tp)
                    pace += count * times / self._busy(plan, alike, pp, rows[dp])
        return self.begins + self.work.accumulate * plan.world / pace / (1 - bubble(plan))

    def busy(self, plan: ParallelPlan, dp: int, rows: float) -> list[float]:
        """Seconds of each rank of a replica's pipeline, computing and talking."""
        return [self._busy(plan, self.group(plan, dp, pp), pp, rows) for pp in range(plan.pp)]

    def _busy(self, plan: ParallelPlan, group: RankGroup, pp: int, rows: float) -> float:
        pieces, cut = plan.microbatches, plan.cut
        own = spans_of(plan, self.work)[pp :: plan.pp]
        stages = (self.stretch(group, cut, *ends, rows / pieces) for ends in own)
        return pieces * sum(computing.total + saying.total for computing, saying in stages)

    def _pass(self, plan: ParallelPlan, dp: int, rows: int) -> StepTime:
        """A forward and a backward pass of a replica."""
        piece = rows / plan.microbatches
        groups = [self.group(plan, dp, pp) for pp in range(plan.pp)]
        spans = enumerate(spans_of(plan, self.work))
        stages = [self.stretch(groups[number % plan.pp], plan.cut, *ends, piece) for number, ends in spans]
        if plan.pp == 1:
            computing, saying = stages[0]
            return StepTime(computing.total, saying.total + self._gathering(plan, computing), 0.0)
        busy = [
            [plan.microbatches * sum(one[which].total for one in stages[rank :: plan.pp]) for which in (0, 1)]
            for rank in range(plan.pp)
        ]
        busiest = max(busy, key=sum)
        lengths, sends = tuple(sum(one, Both()) for one in stages), tuple(self._sends(plan, dp, piece))
        key = ("pipeline", plan.pp, plan.schedule, plan.microbatches, lengths, sends)
        if key not in self.known:
            self.known[key] = end_of(plan, lengths, sends)
        compute, said = busiest
        return StepTime(compute, said, max(0.0, self.known[key] - compute - said))

    # ------------------------------------------------------------ replicas that share experts

    def _together(self, plan: ParallelPlan, first: int, rows: Sequence[int], whole: bool = True) -> StepTime:
        """A pass of the replicas that share experts from `first` on. They meet around every mixture, so the
        slowest counts twice: outside experts, and within them. whole: else as if work went to whoever is
        free."""
        own = rows[first : first + plan.ep]
        kinds, parts = self.kinds[first : first + plan.ep], held_experts(plan)
        outside = [self.outside(kind, count) for kind, count in zip(kinds, own, strict=True)]
        within = [self.within(kind, sum(own), part) for kind, part in zip(kinds, parts, strict=True)]
        if not whole:
            pace = (1 / (one + other) for one, other in zip(outside, within, strict=True))
            return StepTime(plan.ep / sum(pace), 0.0, 0.0)
        return StepTime(max(outside) + max(within), self._scattering(plan, first, own), 0.0)

    def outside(self, kind: int, rows: float) -> float:
        """Seconds of a pass of so many rows, but for those of experts."""
        alone = RankGroup((kind,), self.cluster.link((0,)))
        every = self.stretch(alone, None, 0, len(self.work.blocks), rows)[0]
        return every.total - self.within(kind, rows, 1.0)

    def within(self, kind: int, rows: float, part: float) -> float:
        """Seconds of a part of the experts of all mixtures, if all are chosen as often, for all copies of the
        tokens of so many rows."""
        found = Both()
        for one, times in self.work.parts(0, len(self.work.blocks)).items():
            if one.place == "experts":
                ways = line(self.rates[kind], one, rows)
                ahead, back = (fixed + part * slope for fixed, slope in (ways.forward, ways.backward))
                found += Both(ahead, back + ahead * (self.again and back > 0)) * times
        return found.total

    def _scattering(self, plan: ParallelPlan, first: int, rows: Sequence[int]) -> float:
        """Seconds in which tokens go to the ranks of their experts and back."""
        work = self.work
        mixed = [
            (number, part.copies)
            for number, (_, kind) in enumerate(work.blocks)
            for region in work.kinds[kind]
            for part in region
            if part.place == "experts"
        ]
        returned = sum(number >= work.lowest for number, _ in mixed)
        chosen = max(dict(mixed).values(), default=0)
        load = Load(max(rows), dict(work.tokens), work.itemsize)
        group = replace(plan, dp=plan.ep, shares=plan.shares[first : first + plan.ep])
        link, seconds = self.cluster.link(range(first, first + plan.ep)), 0.0
        for one in of_experts(group, 1, chosen, rows, work.shape, load):
            each = link.seconds(2 * messages("all-to-all", plan.ep), one.forward)  # there, and back
            seconds = each * (len(mixed) + returned * (1 + self.again))
        return seconds

    def _sends(self, plan: ParallelPlan, dp: int, rows: float) -> Iterator[Both]:
        """What travels from each stage to the next, for one micro-batch."""
        work = self.work
        load = Load(1, dict(work.tokens), work.itemsize)
        every = transitions(replace(plan, cut=None, tp=1), work.family, work.shape, work.depth, load)
        spans = spans_of(plan, work)
        for number, one in enumerate(one for one in every if one.when == "stage"):
            here, there = (((stage % plan.pp) * plan.dp + dp) * plan.tp for stage in (number, number + 1))
            link = self.cluster.link(sorted((here, there))).of("send")
            flows = spans[number][1] > work.lowest
            yield Both(link.seconds(1, one.forward * rows), link.seconds(1, one.backward * rows * flows))

    def _gathering(self, plan: ParallelPlan, computing: Both) -> float:
        """Seconds for which FSDP's weights are waited for: what gathering takes beyond the passes."""
        if (sharding := plan.sharding) is None:
            return 0.0
        shards, light = plan.dp // sharding.replicas, is_light(self.work.weighed, plan)
        link = self.cluster.link(range(0, plan.dp * plan.tp, plan.tp))
        sends = sharding.frozen and sharding.reshard  # else frozen weights travel once in a run, or lie whole
        sent = self.work.frozen * sends + self.work.tuned * (not light)
        size = sent * self.work.itemsize / plan.tp * (shards - 1) / shards
        gather = link.seconds(len(self.work.blocks) * (shards - 1), size) if sent else 0.0
        hidden = computing * self.work.overlaps
        return max(0.0, gather - hidden.forward) + max(0.0, gather * sharding.reshard - hidden.backward)

    def _update(self, plan: ParallelPlan) -> StepTime:
        """Once a step: gradients summed over the cut and over replicas, and the optimizer's own work."""
        compute, said, experts = 0.0, 0.0, held_experts(plan)
        sharding = None if is_light(self.work.weighed, plan) else plan.sharding
        shards = 1 if sharding is None else plan.dp // sharding.replicas
        for pp in range(plan.pp):
            spans = spans_of(plan, self.work)[pp :: plan.pp]
            parts = [one for ends in spans for one in self.work.parts(*ends).items() if one[0].tuned]
            groups = {self.group(plan, dp, pp) for dp in range(plan.dp)}
            each = {(self.group(plan, dp, pp).kinds, experts[dp % plan.ep]) for dp in range(plan.dp)}
            have = [tuple(held_of(part, plan.cut, index) for part, _ in parts) for index in range(plan.tp)]
            for kinds, held in each:
                for kind, shares in dict.fromkeys(zip(kinds, have, strict=True)):
                    seconds = sum(
                        line(self.rates[kind], part, 1.0).update
                        * times
                        * share
                        * (held if part.place == "experts" else 1.0)
                        for (part, times), share in zip(parts, shares, strict=True)
                    )
                    compute = max(compute, seconds / shards)
            spread = plan.ep > 1
            tuned = GRADIENT * sum(
                part.tuned * times for part, times in parts if part.place != "experts" or not spread
            )
            first = pp * plan.dp * plan.tp
            over_cut = max(
                (one.link.seconds(messages(SUM, plan.tp), summed_over(plan.tp, tuned) / 2)) for one in groups
            )
            across = self.cluster.link(range(first, first + plan.dp * plan.tp, plan.tp))
            own = summed_over(plan.dp, tuned // plan.tp)
            over_replicas = across.seconds(messages(SUM, plan.dp), own if shards == 1 else own / 2)
            said = max(said, over_cut + over_replicas + self._of_spread(plan, parts))
        return StepTime(compute, said, 0.0)

    def _of_spread(self, plan: ParallelPlan, parts: Sequence[tuple[WorkPart, int]]) -> float:
        """Seconds in which replicas with the same experts sum their gradients."""
        if plan.ep == 1:
            return 0.0
        tuned = sum(part.tuned * times for part, times in parts if part.place == "experts")
        size = summed_over(plan.edp, int(GRADIENT * tuned * max(held_experts(plan))))
        return self.cluster.link(range(0, plan.dp, plan.ep)).seconds(messages(SUM, plan.edp), size)


def _ways(one: Transition, back: bool) -> Iterator[tuple[str, int]]:
    """Forward and backward: what is done, and bytes that a rank sends."""
    return zip(one.operations.split(" / "), (one.forward, one.backward * back), strict=True)
