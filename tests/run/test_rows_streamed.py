"""Runs on streamed rows: what is resumed, and under whatever plan, is the run that was not stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from petune.errors import DataError, RecipeError, Stopped
from petune.recipe import load_recipe
from tests.group_pool import assert_same_but_for_rounding
from tests.planned_runs import PLANS, trained
from tests.small_runs import Listener, assert_same_run, numbers, run, settings, terminate_at

pytestmark = pytest.mark.usefixtures("no_picture")


def streamed(place: Path, *, out: str = "run", **changes: Any) -> dict[str, Any]:
    """24 rows in windows of five, four a step: eight steps see each row once, and some again."""
    data = settings(place)["data"] | {"stream": True, "window": 5} | changes.pop("data", {})
    shape = {"batch_size": 4, "accumulate": 1, "eval_every": 4, "keep": 20}
    return settings(place, **{"out": out, "max_steps": 8, **shape, **changes, "data": data})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, the rows and `whole`, a run that was not stopped."""
    folder = tmp_path_factory.mktemp("streamed")
    run(streamed(folder, out="whole"))
    return folder


@pytest.mark.parametrize("step", [1, 5, 7])
def test_a_resumed_run_goes_on_with_the_very_next_row(step: int, place: Path) -> None:
    recipe = streamed(place, out=f"from-{step}")
    with pytest.raises(Stopped):
        run(recipe, terminate_at(step))
    listener = Listener()
    assert_same_run(run(recipe, listener, resume=True).folder, place / "whole")
    assert not any("read again" in note for note in listener.notes)


@pytest.mark.parametrize("beside", [False, True], ids=["in-checkpoints", "in-snapshots"])
def test_a_state_says_where_the_next_row_is(beside: bool, place: Path) -> None:
    out, saves = f"marks-{beside}", {"save_every": 9, "snapshot_every": 1} if beside else {}
    with pytest.raises(Stopped):
        run(streamed(place, out=out, eval_every=9, **saves), terminate_at(7))
    found = place / out / "checkpoints" / ("snapshots/step-6" if beside else "step-7")
    mark = json.loads((found / "manifest.json").read_text())["facts"]["stream"]
    place_now = 24 if beside else 28
    assert mark["place"] <= place_now < mark["place"] + 5


def test_replicas_share_the_rows_of_each_step(place: Path) -> None:
    found = trained(streamed(place, out="dp", parallel=PLANS["dp"]))
    assert_same_but_for_rounding(found, place / "whole")


def test_a_run_of_one_process_is_resumed_by_two(place: Path) -> None:
    recipe = streamed(place, out="by-two")
    with pytest.raises(Stopped):
        run(recipe, terminate_at(5))
    found = trained(recipe | {"parallel": PLANS["dp"]}, resume=True)
    assert_same_but_for_rounding(found, place / "whole")
    assert "read again" not in (found / "run.log").read_text()


def test_a_run_on_one_array_is_resumed_by_reading_it_again_and_says_so(place: Path) -> None:
    rows = [json.loads(line) for line in Path(settings(place)["data"]["path"]).read_text().splitlines()]
    (place / "rows.json").write_text(json.dumps(rows))
    recipe = streamed(place, out="array", data={"path": str(place / "rows.json")})
    with pytest.raises(Stopped):
        run(recipe, terminate_at(5))
    listener = Listener()
    found = run(recipe, listener, resume=True).folder
    assert numbers(found) == numbers(place / "whole")
    assert any("rows.json can only be read from its beginning" in note for note in listener.notes)


def test_a_bad_row_ends_the_run_when_it_is_met_and_its_last_state_stays(tmp_path: Path) -> None:
    recipe = streamed(tmp_path)
    file = Path(recipe["data"]["path"])
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines * 6, "{\n", *lines]))  # beyond the first rows that are looked at
    with pytest.raises(DataError, match=r"causal\.jsonl:145"):
        run(recipe | {"max_steps": 60, "save_every": 10, "eval_every": 60})
    assert (tmp_path / "run" / "checkpoints" / "step-30").is_dir()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"max_steps": None}, "no known end"),
        ({"epochs": 2}, "remove epochs"),
        ({"data": {"packing": True}}, "by their lengths"),
        ({"data": {"chunk": True}}, "joins all documents"),
        ({"data": {"split": 0.3}}, "chosen among all"),
        ({"data": {"held_out": 5}}, "gives the held-out rows already"),
        ({"cache": True, "method": "side"}, "rows that come again"),
        ({"task": "classify"}, "classes must be known"),
        ({"data": {"stream": False}}, "data.stream is off"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_go_with_a_stream_is_refused_in_words(
    changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    recipe = streamed(tmp_path)
    data = recipe["data"] | changes.pop("data", {})
    with pytest.raises(RecipeError, match=word):
        load_recipe(recipe | changes | {"data": data})


def test_a_run_holds_out_the_first_rows_of_its_stream(tmp_path: Path) -> None:
    recipe = streamed(tmp_path)
    del recipe["data"]["eval"]
    found = run(recipe | {"data": recipe["data"] | {"held_out": 6}, "max_steps": 3})
    assert found.summary["held_out"] == 6
    setup = json.loads((found.folder / "setup.json").read_text())
    assert any("streamed in windows of 5 rows" in note for note in setup["data"]["sources"])
