"""What `overlap: true` hides of what the ranks of a cut say in fused blocks, and what it costs (see
petune.kernels.block.turns).

Two halves of the rows go through the blocks in turns. What a half says behind a region is on its way while
the other half computes the same region, then while the first computes the next one: what takes longer than
that is waited for, and what copies take of the memory's time is lost to products. Products are made twice
over half the rows, so what a launch takes counts twice. Sums are added up by a kernel of the half that reads
them, which nothing hides, and behind the last region of all blocks one half has nothing beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petune.estimate.durations import Both
from petune.estimate.workload import Workload
from petune.kernels.block.cores import calls_cores
from petune.methods.configs import method_of
from petune.parallel.plan import ParallelPlan, apportion
from petune.recipe import Recipe

# of the time of what copy engines carry, that which products beside it lose: of three gathers of 384 MiB, 4.6
# ms long, 0.6 (benchmarks/RESULTS.md)
LOST = 0.13


@dataclass(frozen=True)
class HalfRegion:
    """A region of one half: its computing, what is said behind it, and the adding up of that."""

    computing: Both
    saying: Both
    adding: Both


def in_turns(turns: Sequence[HalfRegion]) -> tuple[Both, Both]:
    """The computing of both halves in a block of these regions, and what is left of what they say. What
    stands between regions that talk counts to all of these alike."""
    computing = sum((one.computing for one in turns), Both()) * 2
    talking = [one for one in turns if one.saying.total]
    silent = sum((one.computing for one in turns if not one.saying.total), Both())
    beside = [one.computing + silent * (1 / len(talking)) for one in talking]
    left = Both()
    for one, same, following in zip(talking, beside, beside[1:] + beside[:1], strict=True):
        open_ = _beyond(one.saying, same) + _beyond(one.saying, following)
        left += open_ + (one.saying * 2 + open_ * -1) * LOST + one.adding * 2
    return computing, left


def _beyond(saying: Both, computing: Both) -> Both:
    """What is left of it."""
    return Both(max(0.0, saying.forward - computing.forward), max(0.0, saying.backward - computing.backward))


def added(operation: str, ranks: int, sent: float) -> float:
    """Bytes of memory that adding up moves, of an operation in which a rank sends so many: copy engines bring
    the terms, of two ranks the other's alone."""
    if operation not in ("all-reduce", "reduce-scatter"):
        return 0.0
    terms = sent / (ranks - 1) / (2 if operation == "all-reduce" and ranks > 2 else 1)
    return terms * (ranks + 1)


def takes_halves(work: Workload) -> bool:
    """Whether halves of rows may go through the blocks of such a model in turns: of hidden states alone, by
    steps, without experts."""
    family = work.family
    biased = any(rule.bias for rule in family.stacks.values())
    other = work.shape.experts or family.kind == "encoder-decoder"
    return not (other or biased or calls_cores(family))


def may_pay(plan: ParallelPlan, work: Workload, recipe: Recipe) -> bool:
    """Whether a search tries overlap for a plan, if its blocks are fused: where halves may go through all
    blocks in turns, and what is said is large. Not what ulysses trades: hiding that has made steps longer
    (benchmarks/RESULTS.md)."""
    cut = plan.cut
    if cut is None or "heads" not in (cut.attention, cut.mlp) or recipe.data.packing:
        return False
    if method_of(recipe.method).still:  # whose blocks have no way back
        return False
    return takes_halves(work) and min(apportion(work.rows, plan.shares)) // plan.microbatches > 1
