"""What part of the work, and of the tensors, a rank of a plan has."""

from __future__ import annotations

from collections.abc import Sequence

from petune.estimate.footprint import routed
from petune.estimate.workload import Part, Workload
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import Cut, ParallelPlan


def share_of(part: Part, cut: Cut | None, index: int) -> float:
    """The part of a part that rank `index` of a cut computes."""
    if cut is None or part.place == "embedding":
        return 1.0
    if part.place == "head":
        return _fraction(cut.vocabulary, index)
    if part.place in ("connection", "ladder"):
        return _fraction(cut.sequence, index) if cut.connection == "sequence" else 1.0
    of_mlp = part.place in ("mlp", "experts")
    if cut.layout("mlp" if of_mlp else "attention") == "sequence":
        if part.place == "scores" and cut.exchange == "ulysses":
            return 1 / len(cut.sequence)
        if part.place == "scores" and part.causal:
            start, whole = sum(cut.sequence[:index]), sum(cut.sequence)
            return ((start + cut.sequence[index]) ** 2 - start**2) / whole**2
        return _fraction(cut.sequence, index)
    return _fraction(cut.columns if of_mlp else cut.heads, index)


def held_of(part: Part, cut: Cut | None, index: int) -> float:
    """The part of a part's tensors that the rank holds."""
    if cut is None or part.place in ("connection", "ladder"):
        return 1.0
    kind = "mlp" if part.place == "experts" else part.place
    by_sequence = kind in ("attention", "mlp") and cut.layout(kind) == "sequence"
    return 1.0 if by_sequence else share_of(part, cut, index)


def held_experts(plan: ParallelPlan) -> list[float]:
    """The part of all experts that each rank holds of those that share them."""
    return [held / sum(plan.experts) for held in plan.experts] or [1.0]


def _fraction(shares: Sequence[int], index: int) -> float:
    return shares[index] / sum(shares) if shares else 1.0


def by_tokens(part: Part, cut: Cut) -> bool:
    """Whether ranks of a cut have a part for tokens of their own."""
    if part.place in ("connection", "ladder"):
        return True
    return cut.layout("mlp" if part.place in ("mlp", "experts") else "attention") == "sequence"


def numbers_of(plan: ParallelPlan, pp: int) -> range:
    """The stages of a rank of the pipeline."""
    return range(pp, max(1, len(plan.stages)), plan.pp)


def span(plan: ParallelPlan, work: Workload, number: int) -> tuple[int, int]:
    """The blocks [start, end) of a stage, counted over all stacks."""
    if not plan.stages:
        return 0, len(work.blocks)
    counts = [sum(end - first for first, end in stage.blocks.values()) for stage in plan.stages[: number + 1]]
    return sum(counts[:-1]), sum(counts)


def spread_of(plan: ParallelPlan, dp: int, rows: int) -> tuple[float, float]:
    """The part of all experts that a replica holds, and copies of tokens that they see for each of its own,
    in a pass of so many rows of all replicas."""
    at = Coordinate(dp=dp, ep=dp % plan.ep)
    return held_experts(plan)[at.ep], routed(plan, at, rows)
