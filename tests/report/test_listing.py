"""Runs as rows: their names, their order, and what stands where nothing is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from petune.report import listing
from petune.report.files import find_runs
from tests.made_runs import step_records, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs: a finished one, one that stopped, one that is damaged."""
    write_run(tmp_path / "b", facts={"began": 100.0})
    write_run(tmp_path / "sweep" / "c", records=step_records(7), finished=False, facts={"began": 300.0})
    (write_run(tmp_path / "a", facts={"began": 200.0}) / "summary.json").write_text("{")
    return tmp_path


def rows(folder: Path) -> list[dict[str, object]]:
    return listing.rows(find_runs(folder), folder)


def test_a_row_says_what_a_run_is_and_what_came_out(folder: Path) -> None:
    found = {str(one["name"]): one for one in rows(folder)}
    assert list(found) == ["a", "b", "sweep/c"]
    assert found["b"] | {"path": ""} == {
        **{"name": "b", "model": "demo:minilm", "method": "lora", "plan": "one process", "steps": 40},
        **{"planned": 40, "metric": "accuracy", "base": 0.5, "tuned": 0.9, "began": 100.0},
        **{"state": "finished", "folder": "readable", "path": ""},
    }
    assert (found["sweep/c"]["state"], found["sweep/c"]["tuned"]) == ("stopped", None)
    assert str(found["a"]["folder"]).startswith("damaged: summary.json")
    assert listing.cells(found["sweep/c"])[4:8] == ("7 of 40", "accuracy", "-", "-")


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("name", ["a", "b", "sweep/c"]),
        ("began", ["sweep/c", "a", "b"]),
        ("tuned", ["a", "b", "sweep/c"]),
        ("steps", ["a", "b", "sweep/c"]),
        ("state", ["a", "b", "sweep/c"]),
    ],
)
def test_rows_are_sorted_with_unknown_numbers_last(key: str, order: list[str], folder: Path) -> None:
    assert [one["name"] for one in listing.ordered(rows(folder), key)] == order
    assert len(listing.cells(rows(folder)[0])) == len(listing.KEYS)


def test_a_run_by_itself_has_its_own_name(folder: Path) -> None:
    assert [one["name"] for one in rows(folder / "b")] == ["b"]
