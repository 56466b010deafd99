"""What the ranks of a plan need of the memory of their devices (petune.estimate.room has the bytes)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from petune.estimate.cluster import Cluster
from petune.estimate.rank_shares import shares_at, spans_of, spread_of
from petune.estimate.room import RankBytes
from petune.estimate.slices import Rest
from petune.estimate.workload import Workload
from petune.parallel import ParallelPlan
from petune.parallel.mesh import Coordinate, coordinate
from petune.parallel.plan import apportion, in_flight


@dataclass(frozen=True)
class RankMemory:
    """The memory of a cluster's devices beside what a workload's ranks need. again: blocks recompute."""

    room: RankBytes
    work: Workload
    cluster: Cluster

    def fullest(self, plan: ParallelPlan, again: bool) -> float:
        """The largest part of its memory that a rank fills; infinite where one does not fit, 0 where no
        memory is known."""
        rows = apportion(self.work.rows, plan.shares)
        tightest = self.tightest(plan, range(plan.world), rows)
        parts = (self.bytes_of(plan, at.pp, at.tp, rows[at.dp], again, at.dp) / size for at, size in tightest)
        most = max(parts, default=0.0)
        return most if most <= 1 else math.inf

    def tightest(
        self, plan: ParallelPlan, ranks: Iterable[int], rows: Sequence[int]
    ) -> list[tuple[Coordinate, int]]:
        """Of those ranks that need the same, one with the smallest memory, and that; none where it is not
        known. rows: of each replica."""
        found: dict[object, tuple[int, int]] = {}
        lists = [shares_at(plan.cut, tp) for tp in range(plan.tp)]
        spread = [spread_of(plan, dp, self.work.rows) if plan.ep > 1 else () for dp in range(plan.dp)]
        for rank in ranks:
            memory, (replica, tp) = self.cluster.devices[rank].memory, divmod(rank, plan.tp)
            pp, dp = divmod(replica, plan.dp)
            key = pp, lists[tp], spread[dp], rows[dp]
            if memory is not None and (key not in found or memory < found[key][1]):
                found[key] = rank, memory
        return [(coordinate(plan, rank), memory) for rank, memory in found.values()]

    def could_fit(self, plan: ParallelPlan, again: bool) -> bool:
        """Whether all devices together have what the ranks of an even plan need, and a tenth beside."""
        memory = [device.memory for device in self.cluster.devices if device.memory is not None]
        if len(memory) < plan.world:
            return True
        rows = max(apportion(self.work.rows, plan.shares))
        needed = sum(self.bytes_of(plan, pp, 0, rows, again) for pp in range(plan.pp))
        return needed * plan.dp * plan.tp <= 1.1 * sum(memory)

    def bytes_of(self, plan: ParallelPlan, pp: int, tp: int, rows: int, again: bool, dp: int = 0) -> float:
        """What a rank of so many rows needs. dp: its replica, where replicas share experts."""
        if plan.ep > 1:
            rest = self.rest(plan, 0, 0, len(self.work.blocks), rows)
            return self.room.of_experts(*spread_of(plan, dp, self.work.rows), rest, again)
        spans = spans_of(plan, self.work)[pp :: plan.pp]  # of which one computes at a time
        stages = [self.rest(plan, pp, *ends, rows) for ends in spans]
        needs = [self.room.need(plan.cut, tp, rest, again) for rest in stages]
        own = sum(one.stays for one in needs) + max(one.beside for one in needs)
        return own + self.room.process + self.room.messages(plan, rows)

    def rest(self, plan: ParallelPlan, pp: int, start: int, end: int, rows: float) -> Rest:
        shards = 1 if plan.sharding is None else plan.dp // plan.sharding.replicas
        piece, fused = -(-int(rows) // plan.microbatches), self.room.fuses(plan)
        reckoned = self.room.in_steps(piece) if fused else piece
        return Rest(start, end, reckoned, in_flight(plan, pp), plan.sharding, shards, fused)

    def limits(self, plan: ParallelPlan, again: bool) -> list[float]:
        """The largest share of a block that each rank of a cut has memory for, in even stages."""
        assert plan.cut is not None
        rows = max(apportion(self.work.rows, plan.shares))
        found, messages = [1.0] * plan.tp, self.room.messages(plan, rows)
        known: dict[tuple[int, int], float] = {}
        for rank, device in enumerate(self.cluster.devices):
            pp, tp = rank // (plan.dp * plan.tp), rank % plan.tp
            if device.memory is None:
                continue
            key = pp, device.memory
            if key not in known:
                rest = self.rest(plan, pp, *spans_of(plan, self.work)[pp], rows)
                known[key] = self.room.most(plan.cut, rest, again, device.memory - messages)
            found[tp] = min(found[tp], known[key])
        return found

    def most_rows(self, plan: ParallelPlan, ranks: Sequence[int], again: bool) -> int:
        """Rows for which all ranks of a replica have memory."""
        tightest = self.tightest(plan, ranks, (0,) * plan.dp)

        def overflows(rows: int) -> bool:
            needed = (self.bytes_of(plan, at.pp, at.tp, rows, again) > memory for at, memory in tightest)
            return any(needed)

        return bisect_left(range(1, self.work.rows + 1), True, key=overflows)
