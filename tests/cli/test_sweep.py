"""`petune sweep` sorts its words, runs the grid in turn and prints the ranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from petune_cli.sweep import sorted_out, split

from petune.run import sweep as sweeping
from tests.cli.conftest import Type
from tests.made_runs import write_run


def test_values_between_commas_are_choices_but_for_lists_and_plans() -> None:
    assert split("1e-4,2e-4") == ["1e-4", "2e-4"] and split("[q,v],{a: 1, b: 2},x") == [
        "[q,v]",
        "{a: 1, b: 2}",
        "x",
    ]
    axes, others = sorted_out(["r.yaml", "lr=1,2", "epochs=3", "parallel=dp:2,tp:2", "method.targets=[q,v]"])
    assert axes == {"lr": ["1", "2"]}
    assert others == ["r.yaml", "epochs=3", "parallel=dp:2,tp:2", "method.targets=[q,v]"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are trained; a run with a score by its rate is made in each."""
    folders: list[str] = []

    def train(recipe: Any, **options: Any) -> None:
        folders.append(recipe.out)
        score = {"loss": recipe.lr + recipe.seed / 1e3}
        came_out = {"metric": "loss", "direction": "min", "after": score}
        write_run(Path(recipe.out), came_out=came_out)

    monkeypatch.setattr(sweeping, "train", train)
    return folders


def test_the_grid_is_run_in_turn_and_ranked(type_: Type, trained: list[str]) -> None:
    shown = type_("sweep", "llama_lora", "lr=0.2,0.1", "r=8,32", "out=s", "--seeds", "2")
    assert shown.code == 0, shown.err
    assert len(trained) == 8 and trained[0] == "s-sweep/lr=0.2,method.r=8,seed=0"
    lines = shown.out.splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("rank")) :]
    assert [line.split()[0] for line in table[1:5]] == ["1", "1", "3", "3"]
    assert "lr=0.1, method.r=8" in table[1] and "2 of 2" in table[1] and table[-1] == "s-sweep/report.html"


def test_json_stands_alone_on_standard_output(type_: Type, trained: list[str]) -> None:
    shown = type_("sweep", "llama_lora", "lr=0.2,0.1", "out=s", "--json")
    found = json.loads(shown.out)
    assert [one["settings"] for one in found] == [{"lr": "0.1"}, {"lr": "0.2"}]
    assert found[0]["rank"] == 1 and found[0]["runs"][0]["state"] == "finished"
    assert "run 2 of 2" in shown.err


def test_without_a_choice_it_is_no_sweep(type_: Type) -> None:
    shown = type_("sweep", "llama_lora", "lr=0.2")
    assert shown.code == 2 and "this is no sweep" in shown.err and "lr=1e-4,2e-4" in shown.err
