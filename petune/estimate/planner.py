"""The best plan for a recipe on a cluster: every way to lay its ranks along dp, a cut and pp, each with the
shares, stages and micro-batches that balance it, timed by one model (petune.estimate.step_time) and held to
the devices' memory (petune.estimate.room).

Ranks stay where they are: along an axis they are taken in the order of the cluster, a cut's next to one
another. A plan has one list a cut and one list of stages, so replicas of unequal devices share lists that
suit the slowest of them. The even plan of each layout is always among what is compared.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from petune.errors import MachineError, RecipeError, UsageError
from petune.estimate.balance import Stretch, balance, partition, reduced, up_to
from petune.estimate.choice import Findings, PricedPlan
from petune.estimate.cluster import Cluster
from petune.estimate.durations import RankGroup
from petune.estimate.expert_shares import over_experts
from petune.estimate.forecast import Sketch
from petune.estimate.halves import may_pay
from petune.estimate.layouts import kind_of, layouts, overlapped, plain
from petune.estimate.part_seconds import line_of, seconds_at
from petune.estimate.rank_memory import RankMemory
from petune.estimate.rank_shares import (
    beside_regions,
    even_tokens,
    shares_at,
    stacked,
    tokens_by_speed,
)
from petune.estimate.room import RankBytes
from petune.estimate.step_time import Clock
from petune.estimate.workload import Place, WorkPart, workload
from petune.methods.configs import method_of
from petune.parallel import ParallelConfig, ParallelPlan, make_plan
from petune.parallel.configs import CutConfig, size_of
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import ALONE, apportion, columns_together, grain, in_flight
from petune.recipe import load_recipe

NEAR = 0.95  # of what a layout takes at best by a rough rule: one beyond it is not looked at
SHOWN = 2  # plans that are told of


@dataclass(frozen=True)
class StageCost:
    """Seconds of blocks [start, end) on the slowest of some groups of ranks, each with the seconds of all
    blocks before each, and of embedding and head; infinite beyond `ends[start]`, where memory ends."""

    groups: tuple[tuple[tuple[float, ...], float, float], ...]
    ends: tuple[int, ...]

    def __call__(self, start: int, end: int) -> float:
        if end > self.ends[start]:
            return math.inf
        heads = end == len(self.ends)
        return max(
            own[end] - own[start] + first * (start == 0) + last * heads for own, first, last in self.groups
        )


# ---------------------------------------------------------------- the search


class Planner:
    """Looks for the best plan of a sketched recipe on a cluster. again: whether blocks recompute; None: both
    are tried, unless the recipe asks for it. Raises UsageError for a model without a table."""

    def __init__(self, drawn: Sketch, cluster: Cluster, again: bool | None = None) -> None:
        if drawn.family is None:
            what = f"petune has no table for {drawn.config.model_type}, so its work cannot be shared out"
            raise UsageError(what, where="model")
        self.drawn, self.cluster, self.family = drawn, cluster, drawn.family
        self.work, self.room = workload(drawn), RankBytes(drawn)
        self.memory = RankMemory(self.room, self.work, cluster)
        numbers = {one: number for number, one in enumerate(dict.fromkeys(cluster.devices))}
        self.devices = [numbers[one] for one in cluster.devices]  # by what they are
        self.plans: dict[ParallelConfig, ParallelPlan] = {}
        self.refused: dict[str, str] = {}
        self.clocks = {again: Clock(self.work, cluster, again) for again in (False, True)}
        fixed = again if again is not None else drawn.recipe.gradient_checkpointing or None
        keep = drawn.recipe.memory.keep
        if fixed is None and keep in ("all", "input") and self.room.fuses(ALONE):
            fixed = keep == "input"
        self.again = (False, True) if fixed is None else (fixed,)

    def search(self, given: Sequence[ParallelConfig] | None = None) -> Findings:
        """The best plans among these layouts, else among all of the cluster's, each of another layout. Raises
        MachineError where none fits."""
        world, blocks = len(self.cluster.devices), len(self.work.blocks)
        left_out: Counter[str] = Counter()
        even: list[tuple[float, ParallelConfig]] = []
        known: dict[ParallelConfig, float] = {}  # sharding makes no busier
        sizes = world, self.work.rows, blocks, self.work.shape.experts
        for layout in layouts(*sizes) if given is None else given:
            whole = replace(layout, dp=layout.dp and replace(layout.dp, shard=False, replicas=1))
            try:
                if whole not in known:
                    plans = (plan for _, plan in self._hidden_or_not(whole))
                    known[whole] = min(map(self.clocks[False].at_best, plans))
                even.append((known[whole], layout))
            except UsageError as error:
                left_out[error.problems[0].what] += 1
        best: dict[object, PricedPlan] = {}
        compared = 0
        for least, layout in sorted(even, key=lambda one: one[0]):
            times = sorted(choice.time.total for choice in best.values())
            if len(times) >= SHOWN and NEAR * least > times[SHOWN - 1]:
                break
            found, reason = self._of_layout(layout)
            compared += len(found)
            left_out[reason] += not found
            for choice in found:
                key = kind_of(layout), *(size_of(axis) for axis in layout.axes.values())
                best[key] = min(best.get(key, choice), choice, key=lambda one: one.time.total)
        choices = sorted(best.values(), key=lambda choice: choice.time.total)[:SHOWN]
        if not choices:
            remedy = "lower batch_size or data.max_length, use dtype: bf16, or method: lora"
            reasons = "; ".join(reason for reason, _ in left_out.most_common(3))
            raise MachineError("no plan of these devices holds this recipe", found=reasons, remedy=remedy)
        others = tuple((reason, number) for reason, number in left_out.most_common() if number)
        return Findings(tuple(choices), compared, others, self.cluster)

    def _of_layout(self, layout: ParallelConfig) -> tuple[list[PricedPlan], str]:
        """The plans of a layout that fit, recomputing where nothing else does; or none, and why."""
        if reason := self._refusal(layout):
            return [], reason
        even = self.plan(layout)
        try:
            found = next(filter(None, (self._that_fit(layout, even, again) for again in self.again)), [])
        except UsageError as error:  # experts whose form has no columns to cut
            return [], error.problems[0].what
        return found, "" if found else "a device is too small for its share"

    def _that_fit(self, layout: ParallelConfig, even: ParallelPlan, again: bool) -> list[PricedPlan]:
        """The plans of a layout that fit, if blocks are computed `again`."""
        found, clock = [], self.clocks[again]
        for lists in self.shared(layout, again) if self.memory.could_fit(even, again) else ():
            plans = [(one, plan, clock.of(plan)) for one, plan in self._hidden_or_not(lists)]
            for parallel, plan, time in sorted(plans, key=lambda one: one[2].total):
                if not math.isinf(fullest := self.memory.fullest(plan, again)):
                    found.append(PricedPlan(parallel, plan, again, time, fullest, self.room.fuses(plan)))
                    break  # the other one is slower
        return found

    def _hidden_or_not(self, parallel: ParallelConfig) -> Iterator[tuple[ParallelConfig, ParallelPlan]]:
        """The plan of these axes, and that with `overlap: true` where that may pay."""
        plan = self.plan(parallel)
        yield parallel, plan
        tried = self.work.overlaps and may_pay(plan, self.work, self.drawn.recipe)
        if tried and self.room.fuses(plan) and (other := overlapped(parallel)) != parallel:
            yield other, self.plan(other)

    def _refusal(self, parallel: ParallelConfig) -> str:
        """Why a recipe may not have such axes, by its rules; empty where it may."""
        kind = kind_of(parallel)
        if kind not in self.refused:
            self.refused[kind] = ""
            try:
                load_recipe(self.drawn.recipe, {"parallel": plain(parallel)})
            except RecipeError as error:
                self.refused[kind] = error.problems[0].what
        return self.refused[kind]

    def plan(self, parallel: ParallelConfig) -> ParallelPlan:
        """The plan of some axes."""
        if parallel not in self.plans:
            drawn, world = self.drawn, len(self.cluster.devices)
            head, still = drawn.work.vocabulary_head, method_of(drawn.recipe.method).head_alone
            sizes = world, self.work.rows, world
            self.plans[parallel] = make_plan(parallel, self.family, drawn.config, *sizes, head, still)
        return self.plans[parallel]

    # ------------------------------------------------------------ shares

    def shared(self, layout: ParallelConfig, again: bool) -> Iterator[ParallelConfig]:
        """The layout with even lists, and with lists that balance its ranks over all blocks, or over those of
        one stack: ranks meet in every block, so that what suits all of them together may suit none."""
        plan = self.plan(layout)
        seen = {layout}
        yield layout
        for parts in (Counter[WorkPart](),) if plan.cut is None else stacked(self.work):
            with suppress(MachineError, UsageError):  # too little memory, or too few rows or blocks
                found = self._over_experts(layout, plan, again)
                ways = [self._cut(found, plan, again, parts, even) for even in even_tokens(plan.cut)]
                found = min(ways, key=partial(self._pace, again)) if len(ways) > 1 else ways[0]
                for _ in range(2):  # stages suit rows, and rows stages
                    rows = found.dp
                    found = self._staged(found, self.plan(found), again)
                    found = self._rowed(found, self.plan(found), again)
                    if found.pp is None or found.dp == rows:
                        break
                if found not in seen:
                    seen.add(found)
                    yield found

    def _pace(self, again: bool, parallel: ParallelConfig) -> float:
        """Seconds of all blocks in the slowest group of ranks that share them."""
        plan, clock = self.plan(parallel), self.clocks[again]
        piece = self.work.rows / plan.dp / plan.microbatches
        whole = (
            clock.stretch(one, plan.cut, 0, len(self.work.blocks), piece) for _, one in self._groups(plan)
        )
        return max(computing.total + saying.total for computing, saying in whole)

    def _groups(self, plan: ParallelPlan) -> set[tuple[int, RankGroup]]:
        """The different groups of ranks that share blocks, each with its place in the pipeline."""
        clock = self.clocks[False]
        return {(pp, clock.group(plan, dp, pp)) for dp in range(plan.dp) for pp in range(plan.pp)}

    def _over_experts(self, layout: ParallelConfig, plan: ParallelPlan, again: bool) -> ParallelConfig:
        """Rows and experts by how fast replicas are outside experts, and within them."""

        def price(parallel: ParallelConfig) -> float:
            found = self.plan(parallel)
            return self.clocks[again].of(found).total if self.memory.fullest(found, again) <= 1 else math.inf

        return over_experts(layout, plan, self.clocks[again], price)

    def _cut(
        self,
        layout: ParallelConfig,
        plan: ParallelPlan,
        again: bool,
        every: Mapping[WorkPart, int],
        even: bool,
    ) -> ParallelConfig:
        """Heads, columns and tokens by how fast ranks are in each, of `every` part of the blocks; tokens that
        are to stay `even` are left so."""
        cut, clock = plan.cut, self.clocks[False]
        if cut is None:
            return layout
        kinds = {group.kinds for _, group in self._groups(plan)}
        by_rank = [frozenset(clock.rates[own[index]] for own in kinds) for index in range(plan.tp)]
        piece = max(1, self.work.rows // plan.dp / plan.microbatches)
        name, axis = next((name, axis) for name, axis in layout.axes.items() if isinstance(axis, CutConfig))
        shape, filled = self.work.shape, dict[str, Any]()
        room = self.memory.limits(plan, again)
        beside = beside_regions(every, cut)

        def costs(places: Sequence[Place], total: int) -> list[Any]:
            parts = {part: times for part, times in every.items() if part.place in places}
            lines = [
                [(line_of(rates, parts, piece), sum(line_of(rates, beside(places), piece))) for rates in own]
                for own in by_rank
            ]

            def cost(index: int, count: int) -> float:
                share = count / total
                seconds = max(seconds_at(one, share) + more for one, more in lines[index])
                return seconds if share <= room[index] else math.inf

            return [partial(cost, index) for index in range(plan.tp)]

        if cut.heads:
            groups = balance(
                shape.kv_heads, costs(["attention", "scores"], shape.kv_heads), "key and value head"
            )
            filled["heads"] = tuple(count * (shape.heads // shape.kv_heads) for count in groups)
        if cut.columns:
            step = grain(shape.columns, plan.tp, columns_together(shape))
            steps, rest = divmod(shape.columns, step)
            *counts, last = balance(steps, costs(["mlp", "experts"], steps), "MLP column")
            filled["columns"] = (*(count * step for count in counts), last * step + rest)
        if cut.sequence and not even:
            filled["sequence"] = reduced(tokens_by_speed(cut, every, by_rank, piece))
        if len(set(by_rank)) == 1 and "sequence" not in filled:
            return layout
        found: dict[str, Any] = {name: replace(axis, **filled)}
        return replace(layout, **found)

    def _staged(self, layout: ParallelConfig, plan: ParallelPlan, again: bool) -> ParallelConfig:
        """Blocks by how long stages take, with embedding and head in theirs."""
        if plan.pp == 1 or layout.pp is None:
            return layout
        costs = self._of_stages(plan, again) * (len(plan.stages) // plan.pp)
        stages = partition(len(self.work.blocks), costs, "block")
        return replace(layout, pp=replace(layout.pp, stages=stages))

    def _of_stages(self, plan: ParallelPlan, again: bool) -> list[Stretch]:
        """Seconds of blocks [start, end) on each rank of a pipeline, with embedding and head in theirs;
        infinite where a device has no memory for them. Ranks of devices that are alike have the same."""
        rows, costs, each = apportion(self.work.rows, plan.shares), [], plan.dp * plan.tp
        known: dict[object, Stretch] = {}
        for pp in range(plan.pp):
            here = range(pp * each, (pp + 1) * each)
            tightest = self.memory.tightest(plan, here, (max(rows),) * plan.dp)
            groups = frozenset((self.clocks[again].group(plan, dp, pp), rows[dp]) for dp in range(plan.dp))
            memory = frozenset((shares_at(plan.cut, at.tp), size) for at, size in tightest)
            key = in_flight(plan, pp), groups, memory
            if key not in known:
                known[key] = self._of_stage(plan, groups, tightest, again)
            costs.append(known[key])
        return costs

    def _of_stage(
        self,
        plan: ParallelPlan,
        groups: Iterable[tuple[RankGroup, int]],
        tightest: Sequence[tuple[Coordinate, int]],
        again: bool,
    ) -> Stretch:
        """The same of a rank of these groups of devices, with the rows of each, and such memory."""
        clock, blocks, cut = self.clocks[again], len(self.work.blocks), plan.cut
        sums: list[tuple[tuple[float, ...], float, float]] = []
        for group, count in groups:
            piece = count / plan.microbatches
            each = ((one + other).total for one, other in clock.each(group, cut, piece))
            first, last = (
                clock.region(one, group, cut, piece).total for one in (self.work.embedding, self.work.head)
            )
            sums.append((tuple(accumulate(each, initial=0.0)), first, last))
        most = max(apportion(self.work.rows, plan.shares))
        messages, on_each = self.room.messages(plan, most), len(plan.stages) // plan.pp
        alike, known = len(self.work.kinds) == 1, dict[object, bool]()

        def full(start: int, end: int) -> bool:
            key = (start == 0, end == blocks, end - start) if alike else (start, end)
            if key not in known:
                rest = self.memory.rest(plan, tightest[0][0].pp, start, end, most)
                known[key] = any(
                    self.room.bytes(cut, at.tp, rest, again) > (memory - messages) / on_each
                    for at, memory in tightest
                )
            return known[key]

        end = bisect_left(range(1, blocks + 1), True, key=partial(full, 0)) if tightest else blocks
        ends = [end]
        for start in range(1, blocks):  # what begins later ends no sooner
            end = max(start, end)
            while end < blocks and not full(start, end + 1):
                end += 1
            ends.append(end)
        return StageCost(tuple(sums), tuple(ends))

    def _rowed(self, layout: ParallelConfig, plan: ParallelPlan, again: bool) -> ParallelConfig:
        """Rows by how long replicas take for one."""
        if plan.dp == 1 or layout.dp is None or plan.ep > 1:
            return layout
        clock, rows = self.clocks[again], self.work.rows
        known: dict[object, tuple[float, int]] = {}
        costs = []
        for dp in range(plan.dp):
            ranks = [(pp * plan.dp + dp) * plan.tp + tp for pp in range(plan.pp) for tp in range(plan.tp)]
            key = tuple(self.devices[rank] for rank in ranks)
            if key not in known:
                each = max(clock.busy(plan, dp, rows / plan.dp)) / (rows / plan.dp)
                known[key] = each, self.memory.most_rows(plan, ranks, again)
            costs.append(partial(up_to, *known[key]))
        shares = balance(rows, costs, "row", plan.microbatches)
        return replace(layout, dp=replace(layout.dp, shares=reduced(shares) if len(set(shares)) > 1 else ()))
