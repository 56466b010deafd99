"""A grid of runs, one after another: every combination of the values that are given for some settings, each
with one seed or several. Each is an ordinary run in a folder of its own; one that is finished is not run
again, one that stopped goes on."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from petune.errors import TrainingFault, UsageError
from petune.recipe import Recipe, load_recipe
from petune.recipe.suggest import setting_of
from petune.report import ranking
from petune.report.ranking import Trial
from petune.run.build import Base
from petune.run.folder import RunFolder
from petune.run.job import Job
from petune.run.reporting import Reporter
from petune.run.train import rated, train

MOST = 1000  # runs of one sweep


@dataclass(frozen=True)
class Cell:
    """One run of a grid: the values it was given, by setting, and its recipe."""

    values: Mapping[str, str]
    recipe: Recipe

    @property
    def folder(self) -> RunFolder:
        """Where it runs."""
        return RunFolder.of(self.recipe)

    def run(self, reporter: Reporter) -> None:
        """Run it from wherever it stands. A training fault is said, and left to be seen in the ranking.

        Raises as `train`; for a finished run of other settings, UsageError.
        """
        recipe = rated(Base(self.recipe))  # as a run writes it down
        if Job(recipe, self.folder, resume=True).is_done():
            return
        state = self.folder.state()
        try:
            train(
                recipe,
                resume=state in ("stopped", "finished"),
                overwrite=state in ("begun", "replaced"),
                reporter=reporter,
            )
        except TrainingFault as fault:
            reporter.note(str(fault))


def grid(base: Recipe, axes: Mapping[str, Sequence[str]], seeds: int = 1) -> list[Cell]:
    """Every run of the grid over a recipe, in the order of the values, checked as recipes are.

    axes: the values of each setting, as texts; a setting of the method may be written without `method`.
    Each run has a folder in OUT-sweep, OUT being the recipe's `out` or runs/NAME. Raises UsageError for no
    axis, a value given twice, an axis `out` or `name`, or `seed` beside seeds, and more than MOST runs;
    RecipeError.
    """
    axes = {setting_of(key) or key: values for key, values in axes.items()}
    for key, values in axes.items():
        never = key in ("out", "name") or (key == "seed" and seeds > 1)
        if never or len(set(values)) < len(values) or "" in values:
            remedy = "give each value once, none empty, `out` one value, and either seed=... or --seeds"
            what, found = "these cannot be the values of a sweep", ",".join(values)
            raise UsageError(what, where=key, found=found, remedy=remedy)
    count = seeds * math.prod(map(len, axes.values()))
    if not axes or count > MOST:
        expected, found = f"settings with several values, at most {MOST} runs", f"{count} runs"
        raise UsageError("this is no sweep", expected=expected, found=found, remedy="lr=1e-4,2e-4 r=8,32")
    place = Path(f"{base.out or f'runs/{base.name}'}-sweep")  # beside the recipe's own run
    cells = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        for seed in range(base.seed, base.seed + seeds):
            own = {"seed": seed} if "seed" not in chosen else {}
            name = ",".join(f"{key}={value}" for key, value in {**chosen, **own}.items())
            out = str(place / re.sub(r"[^\w.,=+-]", "_", name))
            words = [f"{key}={value}" for key, value in chosen.items()]
            cells.append(Cell(chosen, load_recipe(base, words, {**own, "out": out})))
    if len({cell.recipe.out for cell in cells}) < len(cells):
        raise UsageError("two of these values would share a folder", where=str(place), remedy="change one")
    return cells


def advance(cells: Sequence[Cell], at: int, reporter: Reporter) -> list[Trial]:
    """Run one of the cells; then the ranking of all that is there, of which a page is written beside them."""
    cells[at].run(reporter)
    trials = ranking.ranked((one.values, one.folder.path) for one in cells)
    ranking.write_page(trials, cells[at].folder.path.parent)
    return trials
