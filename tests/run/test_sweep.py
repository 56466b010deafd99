"""A sweep: the grid it makes, ordinary runs in its cells, and what a second start leaves alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from petune.errors import RecipeError, Stopped, TrainingFault, UsageError
from petune.recipe import load_recipe
from petune.run import sweep as sweeping
from petune.run.sweep import advance, grid
from petune.run.train import load_run
from tests.small_runs import Listener, settings, terminate_at


def test_every_choice_has_a_run_for_each_seed_in_a_folder_of_its_own() -> None:
    base = load_recipe("llama_lora", ["out=runs/s", "seed=3"])
    cells = grid(base, {"lr": ["1e-4", "2e-4"], "r": ["8", "32"]}, seeds=2)
    assert len(cells) == 8 and len({cell.recipe.out for cell in cells}) == 8
    assert cells[0].recipe.out == "runs/s-sweep/lr=1e-4,method.r=8,seed=3"
    found = [(cell.recipe.lr, cell.recipe.method.r, cell.recipe.seed) for cell in cells]  # type: ignore[attr-defined]
    assert found == [(lr, r, seed) for lr in (1e-4, 2e-4) for r in (8, 32) for seed in (3, 4)]
    (one, _) = grid(load_recipe("llama_lora"), {"method.targets": ["[q,v]", "[q]"]})
    assert one.recipe.out == "runs/llama_lora-sweep/method.targets=_q,v_,seed=0"
    assert [cell.recipe.seed for cell in grid(base, {"seed": ["5", "9"]})] == [5, 9]


@pytest.mark.parametrize(
    ("axes", "seeds", "match"),
    [
        ({}, 2, "this is no sweep"),
        ({"lr": [str(at / 1e4) for at in range(1, 1002)]}, 1, "at most 1000 runs"),
        ({"lr": ["1e-4", "1e-4"]}, 1, "these cannot be the values"),
        ({"lr": ["1e-4", ""]}, 1, "these cannot be the values"),  # of lr=1e-4,
        ({"out": ["a", "b"]}, 1, "these cannot be the values"),
        ({"seed": ["1", "2"]}, 2, "these cannot be the values"),
        ({"method.targets": ["[q]", "(q)"]}, 1, "would share a folder"),
    ],
)
def test_what_is_no_grid_is_refused(axes: Any, seeds: int, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        grid(load_recipe("llama_lora"), axes, seeds)


def test_every_cell_is_checked_before_the_first_one_runs() -> None:
    with pytest.raises(RecipeError, match="lr"):
        grid(load_recipe("llama_lora"), {"lr": ["1e-4", "-1"]})


@pytest.mark.slow
def test_finished_cells_are_left_alone_and_a_stopped_one_goes_on(tmp_path: Path, no_picture: None) -> None:
    base = load_recipe(settings(tmp_path, out="run", max_steps=2, warmup=0))
    cells = grid(base, {"lr": ["1e-3", "null"]})
    advance(cells, 0, Listener())
    first = cells[0].folder.path / "summary.json"
    before = os.stat(first).st_mtime_ns
    with pytest.raises(Stopped):
        advance(cells, 1, terminate_at(1))
    listener = Listener()
    for at in range(2):
        trials = advance(cells, at, listener)
    assert os.stat(first).st_mtime_ns == before
    assert [record["step"] for record in listener.steps] == [2], "it goes on behind its first step"
    assert [trial.rank for trial in trials] == [1, 2]
    best = load_run(trials[0].runs[0].path).summary["after"]["loss"]
    assert best == trials[0].mean <= trials[1].mean
    again = Listener()
    assert [trial.mean for trial in advance(cells, 1, again)] == [trial.mean for trial in trials]
    assert again.steps == [] == again.notes
    page = (tmp_path / "run-sweep" / "report.html").read_text()
    assert "Ranking" in page and "lr=null" in page
    changed = grid(load_recipe(base, ["batch_size=3"]), {"lr": ["1e-3", "null"]})
    with pytest.raises(RecipeError, match="batch_size has changed"):
        advance(changed, 0, Listener())


def test_a_cell_that_cannot_train_leaves_the_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise TrainingFault("the loss is not a number")

    monkeypatch.setattr(sweeping, "train", fails)
    cells, listener = grid(load_recipe("llama_lora", [f"out={tmp_path}/run"]), {"lr": ["1", "2"]}), Listener()
    trials = [advance(cells, at, listener) for at in range(2)][-1]
    assert len(listener.notes) == 2 and [trial.rank for trial in trials] == [None, None]
