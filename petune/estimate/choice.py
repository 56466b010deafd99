"""What a search for a plan gives: plans, their price, and what was left out."""

from __future__ import annotations

from dataclasses import dataclass

from petune.estimate.cluster import Cluster
from petune.estimate.durations import StepTime
from petune.parallel import ParallelConfig, ParallelPlan


@dataclass(frozen=True)
class PricedPlan:
    """A plan with its price. again: blocks recompute; fullest: the largest part of its memory that a rank
    fills, 0 where no memory is known; fused: blocks are, which recompute by themselves where they have to."""

    parallel: ParallelConfig
    plan: ParallelPlan
    again: bool
    time: StepTime
    fullest: float
    fused: bool

    @property
    def checkpointing(self) -> bool:
        """Whether a recipe of it has to ask for it: gradient_checkpointing."""
        return self.again and not self.fused


@dataclass(frozen=True)
class Findings:
    """What a search has found: choices that fit, the fastest first, one of each layout; how many plans were
    compared, and why others were left out, with how many."""

    choices: tuple[PricedPlan, ...]
    compared: int
    left_out: tuple[tuple[str, int], ...]
    cluster: Cluster
