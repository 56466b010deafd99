"""The runs of a sweep, ranked: the settings that were tried, each with the mean and the spread of its seeds'
scores."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petune.files.safetensors import write_file, writing
from petune.report.files import RunFiles, is_run
from petune.report.markup import Markup, element, join, section, table
from petune.report.page import NAME, content, page
from petune.report.words import NONE, figure

HEADS = ("rank", "settings", "metric", "mean", "lowest", "highest", "untouched base", "runs")


@dataclass(frozen=True)
class Trial:
    """One choice of settings and its runs, one for each seed.

    rank: 1 is the best; trials of equal means share one, and one with a run that has no score yet, or none
    that is a number, has none. wanted: runs there are to be.
    """

    values: Mapping[str, str]
    runs: tuple[RunFiles, ...]
    wanted: int
    rank: int | None = None

    @property
    def scores(self) -> list[float]:
        """The scores of the runs that are finished."""
        found = [run.score("after") for run in self.runs if run.state == "finished"]
        return [score for score in found if score is not None]

    @property
    def whole(self) -> bool:
        """Whether all of its runs have a score."""
        return len(self.scores) == self.wanted

    @property
    def mean(self) -> float:
        """Of the scores; there must be one."""
        return statistics.fmean(self.scores)

    def facts(self) -> dict[str, Any]:
        """What is known of it, as JSON has it."""
        scores, first = self.scores, next(iter(self.runs), None)
        return {
            "rank": self.rank,
            "settings": dict(self.values),
            "metric": first.metric if first else None,
            "mean": self.mean if scores else None,
            "scores": scores,
            "base": first.score("before") if first else None,
            "wanted": self.wanted,
            "runs": [{"path": str(run.path), "state": run.state} for run in self.runs],
        }

    def cells(self) -> tuple[str, ...]:
        """The same as people read it, in the order of HEADS."""
        facts, scores = self.facts(), self.scores
        return (
            str(self.rank or NONE),
            ", ".join(f"{key}={value}" for key, value in self.values.items()),
            str(facts["metric"] or NONE),
            figure(facts["mean"]),
            figure(min(scores, default=None)),
            figure(max(scores, default=None)),
            figure(facts["base"]),
            f"{len(scores)} of {self.wanted}",
        )


def ranked(runs: Iterable[tuple[Mapping[str, str], Path]]) -> list[Trial]:
    """The trials of runs, each given by its settings and folder, the best first; those without a rank
    last."""
    found: dict[tuple[tuple[str, str], ...], list[Path]] = {}
    for values, folder in runs:
        found.setdefault(tuple(values.items()), []).append(folder)
    trials = [
        Trial(dict(values), tuple(RunFiles(one) for one in folders if is_run(one)), len(folders))
        for values, folders in found.items()
    ]
    whole = [trial for trial in trials if trial.whole]
    sign = -1 if any(run.summary.get("direction") == "max" for one in whole for run in one.runs) else 1
    whole.sort(key=lambda trial: sign * trial.mean)
    means = [trial.mean for trial in whole]
    places = [Trial(one.values, one.runs, one.wanted, means.index(one.mean) + 1) for one in whole]
    return places + [trial for trial in trials if not trial.whole]


def ranking(trials: Sequence[Trial]) -> Markup:
    """The table of the trials."""
    said = (
        "Mean, lowest and highest of the seeds' scores on the held-out rows: a difference within the spread"
        " of the seeds says nothing."
    )
    shown = table(HEADS, [one.cells() for one in trials], numbers=range(3, len(HEADS)))
    return section("Ranking", shown, element("p", said, class_="facts"))


def write_page(trials: Sequence[Trial], folder: Path) -> None:
    """Write the page about a sweep: the ranking, then its runs side by side. Raises MachineError."""
    runs = [run for trial in trials for run in trial.runs]
    inside = join((element("h1", f"Sweep {folder.name}"), ranking(trials), content(runs) if runs else ""))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / NAME, [page(f"sweep {folder.name}", inside).encode()])
