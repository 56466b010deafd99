"""Trials of a sweep: their order by the mean of the seeds, what has no score yet, and their page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from petune.report import ranking
from tests.made_runs import step_records, write_run

Values = dict[str, str]


def finished(folder: Path, score: float, direction: str = "max") -> Path:
    came_out: dict[str, Any] = {"after": {"accuracy": score}, "direction": direction}
    return write_run(folder, came_out=came_out)


@pytest.fixture
def runs(tmp_path: Path) -> list[tuple[Values, Path]]:
    """Two seeds of three choices: the second is better by its mean, though not by its best seed; the third
    lacks a seed."""
    return [
        ({"lr": "1"}, finished(tmp_path / "a0", 0.95)),
        ({"lr": "1"}, finished(tmp_path / "a1", 0.55)),
        ({"lr": "2"}, finished(tmp_path / "b0", 0.8)),
        ({"lr": "2"}, finished(tmp_path / "b1", 0.9)),
        ({"lr": "3"}, finished(tmp_path / "c0", 0.99)),
        ({"lr": "3"}, write_run(tmp_path / "c1", records=step_records(7), finished=False)),
        ({"lr": "4"}, tmp_path / "d0"),
    ]


def test_trials_are_ranked_by_the_mean_of_their_seeds_and_only_whole(runs: list[tuple[Values, Path]]) -> None:
    found = ranking.ranked(runs)
    assert [(one.values["lr"], one.rank) for one in found] == [("2", 1), ("1", 2), ("3", None), ("4", None)]
    facts = found[0].facts()
    assert facts["mean"] == pytest.approx(0.85) and facts["scores"] == [0.8, 0.9] and facts["wanted"] == 2
    assert found[1].cells() == ("2", "lr=1", "accuracy", "0.7500", "0.5500", "0.9500", "0.5000", "2 of 2")
    assert found[3].cells() == ("-", "lr=4", "-", "-", "-", "-", "-", "0 of 1")


def test_where_less_is_better_the_lowest_mean_is_first_and_equal_ones_share_a_rank(tmp_path: Path) -> None:
    scores = {"1": 0.3, "2": 0.2, "3": 0.3, "4": 0.5}
    runs = [({"lr": lr}, finished(tmp_path / lr, score, "min")) for lr, score in scores.items()]
    found = [(one.values["lr"], one.rank) for one in ranking.ranked(runs)]
    assert found == [("2", 1), ("1", 2), ("3", 2), ("4", 4)]


def test_the_page_shows_the_ranking_before_the_runs(runs: list[tuple[Values, Path]], tmp_path: Path) -> None:
    ranking.write_page(ranking.ranked(runs), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert text.index("Ranking") < text.index("runs compared") < text.index("Curves")
    ranking.write_page(ranking.ranked(runs[-1:]), tmp_path)
    assert "Ranking" in (tmp_path / "report.html").read_text()
