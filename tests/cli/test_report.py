"""`petune report` writes the page where it is wanted, of runs alone."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from petune_cli.report import complete

from petune.recipe import load_recipe, sealed_settings
from tests.cli.conftest import Type
from tests.made_runs import write_run


def write_whole_run(folder: Path, settings: dict[str, Any]) -> None:
    """A run whose resolved.yaml holds every setting, as one that trained leaves it."""
    file = write_run(folder, settings=settings) / "resolved.yaml"
    file.write_bytes(sealed_settings(load_recipe(file), "0" * 32))


def test_the_page_of_a_run_lies_in_it_and_that_of_several_here(type_: Type, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name)
    assert type_("report", "one").out == "one/report.html\n"
    assert type_("report", "one", "two").out == "report.html\n"
    assert "2 runs compared" in (tmp_path / "report.html").read_text()
    assert type_("report", "one").code == 0
    assert "say --overwrite" in type_("report", "one", "two").err
    (tmp_path / "rows.csv").write_text("text,label\n")
    assert "say --overwrite" in type_("report", "two", "-o", "rows.csv").err
    assert (tmp_path / "rows.csv").read_text() == "text,label\n"
    assert type_("report", "two", "-o", "rows.csv", "--overwrite").out == "rows.csv\n"
    assert type_("report", "two", "-o", "elsewhere.html").code == 0
    assert (
        "two" in (tmp_path / "elsewhere.html").read_text() and not (tmp_path / "two" / "report.html").exists()
    )


def test_what_is_no_run_is_refused(type_: Type, tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    shown = type_("report", "one", "nothing")
    assert shown.code == 4 and "this is not a run folder" in shown.err and "petune runs" in shown.err
    assert not (tmp_path / "report.html").exists()
    assert type_("report", "one", "-o", "no/such/page.html").code == 2


def test_answers_are_kept_in_the_run_and_shown(
    type_: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def answer(run: Any, count: int, metrics: Any) -> dict[str, Any]:
        asked.append((run, count, metrics))
        scores = {"base": {"exact_match": 0.0}, "tuned": {"exact_match": 1.0}}
        return {
            "rows": [{"prompt": "red sun", "expected": "red", "base": "blue", "tuned": "red"}],
            "scores": scores,
        }

    monkeypatch.setattr("petune.run.train.load_run", lambda folder: folder.name)
    monkeypatch.setattr("petune.run.answers.before_and_after", answer)
    write_run(tmp_path / "one")
    assert type_("report", "one", "--answers", "3", "--metric", "exact_match").code == 0
    assert asked == [("one", 3, ["exact_match"])]
    assert json.loads((tmp_path / "one" / "answers.json").read_text())["rows"][0]["tuned"] == "red"
    page = (tmp_path / "one" / "report.html").read_text()
    assert "Held-out rows, before and after" in page and "exact_match" in page


def test_the_forecast_is_that_of_petune_plan(type_: Type, tmp_path: Path) -> None:
    settings = {"model": "demo:tiny-llama", "data": {"path": "demo:docstrings-domain", "max_length": 32}}
    write_whole_run(tmp_path / "one", settings | {"task": "causal", "device": "cpu"})
    assert type_("report", "one", "--forecast").code == 0
    (rank,) = json.loads((tmp_path / "one" / "forecast.json").read_text())["ranks"]
    (planned,) = json.loads(type_("plan", "one/resolved.yaml", "--json").out)["ranks"]
    assert rank["total"] == planned["total"] > rank["frozen"] == planned["memory"]["frozen"] > 0


def test_a_run_that_has_finished_has_its_forecast_on_its_page_or_says_why_not(
    type_: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.log.say", said.append)
    settings = {"model": "demo:tiny-llama", "data": {"path": "demo:docstrings-domain", "max_length": 32}}
    write_whole_run(tmp_path / "one", settings | {"task": "causal", "device": "cpu"})
    complete(tmp_path / "one")
    page = (tmp_path / "one" / "report.html").read_text()
    assert "predicted" in page and "--forecast" not in page and said == []
    (tmp_path / "one" / "resolved.yaml").write_text("model: {")
    complete(tmp_path / "one")
    assert "has no forecast" in said[0] and (tmp_path / "one" / "report.html").read_text() == page


def test_the_schedule_of_a_plan_is_drawn_as_petune_plan_draws_it(type_: Type, tmp_path: Path) -> None:
    settings = {"model": "demo:tiny-llama", "data": {"path": "demo:docstrings-domain", "max_length": 32}}
    settings |= {"task": "causal", "device": "cpu", "parallel": {"pp": {"size": 2, "microbatches": 2}}}
    write_whole_run(tmp_path / "one", settings)
    ranks = [{"blocks": [0, 1]}, {"blocks": [1, 2]}]
    (tmp_path / "one" / "setup.json").write_text(json.dumps({"plan": {"words": "pp 2", "ranks": ranks}}))
    assert type_("report", "one", "--forecast").code == 0
    assert type_("plan", "one/resolved.yaml", "--svg", "drawn.svg").code == 0
    drawn = base64.b64encode((tmp_path / "drawn.svg").read_bytes()).decode()
    assert f'src="data:image/svg+xml;base64,{drawn}"' in (tmp_path / "one" / "report.html").read_text()
