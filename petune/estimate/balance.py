"""Shares for devices of unequal speed and memory, and what they should gain.

The idea is Galaxy's (Ye et al. 2024, arXiv:2405.17245): each rank gets work in proportion to its measured
speed, and what a rank has no memory for goes to the ranks that have some to spare. Here it is one greedy
rule: units (key and value heads, MLP columns, blocks, rows) are handed out one by one to the rank that would
be done first among those with memory left. As all units cost the same, no other division has an earlier last
finisher.

Time is compute alone, in units of what a device of speed 1 needs for the whole: communication, and
attention's cost of long sequences, are not in it. Ranks that share a block meet after each region, so a
region takes as long as its slowest rank; replicas meet once a step; a pipeline of p stages with times t and m
micro-batches takes (sum of t + (m - 1) max t) / m.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from petune.errors import MachineError, UsageError
from petune.models.spec import Family, Shape, StackName
from petune.parallel.configs import LOOPED, CutConfig, DpConfig, ParallelConfig, PpConfig, layouts
from petune.parallel.plan import ParallelPlan, apportion

STEP = 8  # columns move in steps of this many where the model's allow it: tensor cores want such sizes
FINEST = 100  # of a ratio made from speeds that are no whole numbers


@dataclass(frozen=True)
class Parameters:
    """Parameters of the linears of all blocks, by kind of region: how much work each kind is, and how much
    memory."""

    attention: int
    mlp: int

    @property
    def total(self) -> int:
        """Both kinds."""
        return self.attention + self.mlp


@dataclass(frozen=True)
class Room:
    """What the ranks can hold, in bytes. memory: of each rank. fixed: what each rank needs whatever its
    share.

    parameter: what a parameter of a block costs where it lies (2 for a frozen one in bf16, 16 for one that
    trains in float32 with AdamW). row: what a row of a forward pass costs in activations.
    """

    memory: tuple[float, ...]
    fixed: tuple[float, ...]
    parameter: float
    row: float = 0.0

    def left(self) -> list[float]:
        """Bytes of each rank for its share."""
        return [memory - fixed for memory, fixed in zip(self.memory, self.fixed, strict=True)]


def parameters_of(family: Family, shape: Shape, depth: Mapping[StackName, int]) -> Parameters:
    """The parameters of a family's blocks, cross-attention included, biases and norms not.

    Of a T5 without gates the MLP is counted as if it had them, of a mixture every block as if it had experts,
    without a shared one.
    """
    attention = shape.width * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    found = {"attention": 0, "mlp": 0}
    for name, count in depth.items():
        crossed = family.kind == "encoder-decoder" and name == "decoder"
        for region in family.stacks[name].regions:
            if region.kind == "mlp":
                matrices = 3 * shape.experts if "experts" in region.sites else len(region.sites)
                found["mlp"] += count * matrices * shape.width * shape.columns
            elif crossed or not region.cross:
                found["attention"] += count * attention
    return Parameters(**found)


# ---------------------------------------------------------------- shares


def plan_for(
    config: ParallelConfig,
    speeds: Sequence[float],
    room: Room | None,
    family: Family,
    shape: Shape,
    depth: Mapping[StackName, int],
    batch_size: int,
) -> ParallelConfig:
    """`config`, which has one axis, with the lists of that axis filled for ranks of these speeds, and what
    the user gave of them dropped.

    Raises UsageError for more or fewer axes than one, MachineError when the model does not fit all ranks
    together.
    """
    if len(config.axes) != 1:
        found = str(config)
        raise UsageError(
            "speeds are for a plan along one axis",
            where="parallel",
            expected="dp, a cut or pp alone",
            found=found,
        )
    if any(speed <= 0 or not math.isfinite(speed) for speed in speeds):
        raise UsageError("speeds are positive numbers", where="--speeds", found=", ".join(map(str, speeds)))
    ((name, axis),) = config.axes.items()
    parameters = parameters_of(family, shape, depth)
    if isinstance(axis, DpConfig):
        rows = balance(batch_size, speeds, _most(room, room.row if room else 0.0), "row")
        return replace(config, dp=replace(axis, size=len(speeds), shares=_reduced(rows)))
    if isinstance(axis, PpConfig):
        return replace(config, pp=_stages(axis, speeds, room, parameters, sum(depth.values())))
    filled: dict[str, Any] = {name: _cut(name, axis, speeds, room, parameters, shape)}
    return replace(config, **filled)


def _cut(
    name: str,
    axis: CutConfig,
    speeds: Sequence[float],
    room: Room | None,
    parameters: Parameters,
    shape: Shape,
) -> CutConfig:
    """Heads first, as they are the coarser; columns then fill what memory heads have left."""
    found, group = layouts(name, axis), shape.heads // shape.kv_heads
    left = room.left() if room else [math.inf] * len(speeds)
    cost = room.parameter if room else 0.0
    step = STEP if shape.columns % STEP == 0 and shape.columns // STEP >= 4 * len(speeds) else 1
    unit = cost * step * parameters.mlp / shape.columns if found["mlp"] == "heads" else 0.0
    heads: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    if found["attention"] == "heads":
        each = cost * parameters.attention / shape.kv_heads
        groups = balance(
            shape.kv_heads, speeds, _counts([bytes_ - unit for bytes_ in left], each), "key and value head"
        )
        left = [bytes_ - count * each for bytes_, count in zip(left, groups, strict=True)]
        heads = tuple(count * group for count in groups)
    if found["mlp"] == "heads":
        steps = balance(shape.columns // step, speeds, _counts(left, unit), "MLP column")
        columns = tuple(count * step for count in steps)
    sequence = ratio(speeds) if "sequence" in found.values() else ()
    return replace(axis, size=len(speeds), shares=(), heads=heads, columns=columns, sequence=sequence)


def _stages(
    axis: PpConfig, speeds: Sequence[float], room: Room | None, parameters: Parameters, blocks: int
) -> PpConfig:
    """Blocks per stage; of several stages on a rank each is as fast as the rank and has its part of the
    memory."""
    per_rank = 1 if axis.schedule not in LOOPED else max(2, len(axis.stages) // len(speeds))
    cost = per_rank * room.parameter * parameters.total / blocks if room else 0.0
    most = _most(room, cost)
    stages = balance(blocks, list(speeds) * per_rank, None if most is None else most * per_rank, "block")
    return replace(axis, size=len(speeds), stages=stages)


def _most(room: Room | None, cost: float) -> list[float] | None:
    return None if room is None else _counts(room.left(), cost)


def _counts(left: Sequence[float], cost: float) -> list[float]:
    """How many units of `cost` bytes fit each rank."""
    return [math.inf if not cost else bytes_ // cost for bytes_ in left]


def balance(total: int, speeds: Sequence[float], most: Sequence[float] | None, what: str) -> tuple[int, ...]:
    """`total` equal units over ranks of these speeds, at least one and at most `most` each, so that the last
    to finish finishes first.

    Raises UsageError for fewer units than ranks, MachineError where a rank has no room for one, or all ranks
    together not for all.
    """
    if total < len(speeds):
        raise UsageError(
            f"every rank needs a {what}", expected=f"at most {total} ranks", found=str(len(speeds))
        )
    limits = list(most) if most is not None else [math.inf] * len(speeds)
    if min(limits) < 1:
        raise MachineError(
            f"rank {limits.index(min(limits))} has no memory for a single {what}",
            remedy="leave that device out",
        )
    if sum(limits) < total:
        raise MachineError(
            f"the devices together have no memory for every {what}",
            expected=str(total),
            found=f"room for {sum(int(n) for n in limits)}",
        )
    counts = [1] * len(speeds)
    waiting = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(waiting)
    left = total - len(speeds)
    while left:
        _, rank = heapq.heappop(waiting)
        if counts[rank] < limits[rank]:
            counts[rank] += 1
            left -= 1
            heapq.heappush(waiting, ((counts[rank] + 1) / speeds[rank], rank))
    return tuple(counts)


def ratio(speeds: Sequence[float]) -> tuple[int, ...]:
    """Speeds as a ratio of whole numbers; of others than whole numbers the nearest one with small terms."""
    if all(float(speed).is_integer() for speed in speeds):
        return _reduced([int(speed) for speed in speeds])
    parts = [Fraction(speed / min(speeds)).limit_denominator(10) for speed in speeds]
    scale = math.lcm(*(part.denominator for part in parts))
    found = _reduced([int(part * scale) for part in parts])
    return (
        found
        if max(found) <= FINEST
        else _reduced([max(1, round(FINEST * speed / max(speeds))) for speed in speeds])
    )


def _reduced(values: Sequence[int]) -> tuple[int, ...]:
    divisor = math.gcd(*values)
    return tuple(value // divisor for value in values)


# ---------------------------------------------------------------- time


def step_time(plan: ParallelPlan, speeds: Sequence[float], parameters: Parameters, batch_size: int) -> float:
    """How long a step of a plan along one axis computes on ranks of these speeds; 1 is the whole on one
    device of speed 1."""
    if plan.pp > 1:
        return _pipeline_time(plan, speeds)
    if plan.cut is not None:
        return sum(
            weight * _slowest(_shares_of(plan, kind), speeds)
            for kind, weight in (
                ("attention", parameters.attention / parameters.total),
                ("mlp", parameters.mlp / parameters.total),
            )
        )
    return _slowest(apportion(batch_size, plan.shares), speeds)


def _shares_of(plan: ParallelPlan, kind: str) -> tuple[int, ...]:
    assert plan.cut is not None
    if plan.cut.layout(kind) == "sequence":
        return plan.cut.sequence
    return plan.cut.heads if kind == "attention" else plan.cut.columns


def _slowest(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """When the last rank is done with its share of one unit of work."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True)) / sum(shares)


def _pipeline_time(plan: ParallelPlan, speeds: Sequence[float]) -> float:
    blocks = [sum(end - first for first, end in stage.blocks.values()) for stage in plan.stages]
    per_rank = [0.0] * plan.pp
    for stage, count in enumerate(blocks):
        per_rank[stage % plan.pp] += count / sum(blocks) / speeds[stage % plan.pp]
    ramp = (sum(per_rank) - max(per_rank)) / (len(blocks) // plan.pp)
    return max(per_rank) + ramp / plan.microbatches
