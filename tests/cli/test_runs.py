"""`petune runs` lists, sorts and verifies; `--json` holds the same for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from petune_cli.runs import without_what_is_alike

from tests.cli.conftest import Type
from tests.made_runs import step_records, write_run


@pytest.fixture
def three(tmp_path: Path) -> None:
    """Two finished runs and one that stopped, in runs/."""
    write_run(tmp_path / "runs" / "a", facts={"began": 100.0})
    write_run(tmp_path / "runs" / "b", facts={"began": 300.0}, came_out={"after": {"accuracy": 0.95}})
    write_run(tmp_path / "runs" / "c", records=step_records(7), finished=False, facts={"began": 200.0})


def test_runs_are_listed_newest_first(type_: Type, three: None) -> None:
    lines = type_("runs").out.splitlines()
    assert lines[0].split()[:4] == ["name", "model", "method", "plan"]
    assert [line.split()[0] for line in lines[1:]] == ["b", "c", "a"]
    assert "7 of 40" in lines[2] and "stopped" in lines[2] and "readable" in lines[2]


def test_they_are_sorted_by_a_column(type_: Type, three: None) -> None:
    found = json.loads(type_("runs", "--sort", "tuned", "--json").out)
    assert [one["name"] for one in found] == ["b", "a", "c"] and found[2]["tuned"] is None
    wrong = type_("runs", "--sort", "beauty")
    assert wrong.code == 2 and "there is no such column" in wrong.err and "began" in wrong.err


def test_verifying_reads_every_file(type_: Type, three: None) -> None:
    found = json.loads(type_("runs", "runs/a", "--verify", "--json").out)
    assert found[0]["folder"].startswith("damaged")  # it has neither an id nor tuned/


def test_an_empty_folder_and_none_are_told_apart(type_: Type, tmp_path: Path) -> None:
    assert type_("runs").code == 2
    (tmp_path / "runs").mkdir()
    assert type_("runs").out == "no run has begun in runs yet\n" and type_("runs", "--json").out == "[]\n"
    (tmp_path / "runs" / "rows.csv").write_text("text\n")
    for verb in ("runs", "watch"):
        assert "this is a file, not a folder of runs" in type_(verb, "runs/rows.csv").err


def test_no_name_is_obeyed_by_a_terminal(type_: Type, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "\x1b[31mred", settings={"model": "\x1b]0;title\x07"})
    shown = type_("runs").out
    assert "\x1b" not in shown and "\\x1b[31mred" in shown
    assert json.loads(type_("runs", "--json").out)[0]["name"] == "\x1b[31mred"


def test_what_is_alike_of_all_runs_is_said_once_on_a_terminal() -> None:
    heads, rows, line = without_what_is_alike(("name", "model", "plan"), [("a", "m", "tp"), ("b", "m", "dp")])
    assert (heads, rows, line) == (["name", "plan"], [["a", "tp"], ["b", "dp"]], "all of them: model m")
    alone = without_what_is_alike(("name", "model"), [("a", "m")])
    assert alone == (["name", "model"], [["a", "m"]], "")
