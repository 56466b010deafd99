"""Shares for devices of which nothing is known but how fast they are beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from petune.errors import UsageError
from petune.estimate.cluster import of_speeds
from petune.estimate.forecast import Forecast, limits_of, priced, sketch
from petune.estimate.planner import Planner
from petune.parallel import ParallelConfig
from petune.parallel.configs import CutConfig, DpConfig, EpConfig, PpConfig
from petune.recipe import Recipe


@dataclass(frozen=True)
class Advice:
    """Shares for devices of unequal speed: the axes to write into the recipe, what they cost, and the
    predicted time of a step as a fraction of the even plan's, in which communication does not count."""

    parallel: ParallelConfig
    forecast: Forecast
    ratio: float


def advise(recipe: Recipe, speeds: Sequence[float], memory: Sequence[int] | None = None) -> Advice:
    """The recipe's axes shared out over ranks of these speeds, as far as their memory goes.

    Raises UsageError for a recipe without axes or a model without a table, MachineError where nothing fits.
    """
    if not recipe.parallel.axes:
        remedy = "name one: parallel=galaxy; or let --cluster choose"
        raise UsageError("speeds are for the axes of a plan", where="parallel", found="none", remedy=remedy)
    drawn = sketch(recipe)
    limits = limits_of(len(speeds), drawn.device, memory)
    planner = Planner(drawn, of_speeds(speeds, limits), recipe.gradient_checkpointing)
    even = _evenly(recipe.parallel, len(speeds))
    best = planner.search([even]).choices[0]
    before = planner.clocks[best.again].of(planner.plan(even)).total
    return Advice(best.parallel, priced(drawn, best.parallel, len(speeds), memory), best.time.total / before)


def _evenly(parallel: ParallelConfig, ranks: int) -> ParallelConfig:
    """The axes with the lists they have taken out; a single one gets as many ranks as there are speeds."""
    cleared: dict[str, Any] = {}
    for name, axis in parallel.axes.items():
        size = ranks if len(parallel.axes) == 1 else axis.size
        if isinstance(axis, DpConfig):
            cleared[name] = replace(axis, size=size, shares=())
        elif isinstance(axis, CutConfig):
            cleared[name] = replace(axis, size=size, shares=(), heads=(), columns=(), sequence=())
        elif isinstance(axis, PpConfig):
            cleared[name] = replace(axis, size=size, stages=())
        elif isinstance(axis, EpConfig):
            cleared[name] = replace(axis, size=size, shares=(), experts=())
    return replace(parallel, **cleared)
