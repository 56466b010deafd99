"""Whatever a run folder holds is read, and what cannot be is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from petune.files.lock import RunLock
from petune.report import files
from petune.report.files import RunFiles, find_runs, names_of
from tests.made_runs import evaluation, step_records, write_json, write_run


def test_a_whole_run_is_read_without_a_fault(tmp_path: Path) -> None:
    run = RunFiles(write_run(tmp_path / "run")).read()
    assert run.faults == [] and run.state == "finished"
    assert (run.name, run.method, run.plan, run.step, run.planned) == ("run", "lora", "one process", 40, 40)
    assert (run.metric, run.score("before"), run.score("after"), run.began) == ("accuracy", 0.5, 0.9, 1.75e9)


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    with RunLock(folder):
        assert RunFiles(folder).state == "running"
    assert RunFiles(folder).state == "stopped"


def test_while_it_runs_the_latest_scores_count(tmp_path: Path) -> None:
    records = [evaluation(0, 0.5), *step_records(20), evaluation(10, 0.6), evaluation(20, 0.8)]
    run = RunFiles(write_run(tmp_path / "run", 40, records=records, finished=False))
    assert (run.score("before"), run.score("after"), run.step, run.planned) == (0.5, 0.8, 20, 40)


def test_settings_that_refer_to_one_another_are_not_followed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    bomb = [
        "a: &a [x, x]",
        *(f"{two}: &{two} [*{one}, *{one}]" for one, two in zip("abcd", "bcde", strict=True)),
    ]
    (folder / "resolved.yaml").write_text("\n".join(bomb))
    run = RunFiles(folder).read()
    assert any("the anchor &a" in fault for fault in run.faults) and len(str(run.settings)) < 1000


DAMAGE: dict[str, tuple[str, str]] = {  # what is written, and what is said of it
    "summary.json": ('{"steps": 3', "summary.json"),
    "setup.json": ("[]", "setup.json: "),
    "env.json": ("\x00\xff", "env.json:1:1: not JSON"),
    "resolved.yaml": ("model: x\nlr: [1, 2", "resolved.yaml:2:10: not YAML"),
    "metrics.jsonl": ('{"step": 1}\nnonsense\n{"step": 2}\n', "metrics.jsonl: 1 of 3 lines"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_named_and_the_rest_is_read(name: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(DAMAGE[name][0])
    run = RunFiles(folder).read()
    assert len(run.faults) == 1 and DAMAGE[name][1] in run.faults[0]
    assert run.step == (2 if name == "metrics.jsonl" else 40)


def test_a_summary_that_was_edited_is_a_fault(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    found = json.loads((folder / "summary.json").read_text())
    write_json(folder / "summary.json", found | {"after": {"accuracy": 1.0}})
    assert any("has been changed" in fault for fault in RunFiles(folder).read().faults)


def test_the_half_last_line_of_a_run_that_was_cut_off_is_no_fault(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    assert RunFiles(folder).read().faults == []
    write_json(folder / "summary.json", {"steps": 40})
    assert len(RunFiles(folder).read().faults) == 1


def test_no_link_is_followed_and_no_pipe_waited_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (tmp_path / "secret").write_text('{"secret": 1}')
    for name in ("setup.json", "metrics.jsonl", "recipe.yaml"):
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "secret")
    (folder / "run.log").unlink()
    os.mkfifo(folder / "run.log")
    run = RunFiles(folder).read()
    assert (run.setup, run.records, run.log) == ({}, [], [])
    assert len(run.faults) == 3 and "is a symbolic link" in run.faults[0]


@pytest.mark.parametrize("value", [None, [], "text", 7, {"total": "many"}, {"total": -1}])
def test_facts_of_another_kind_are_no_facts(value: Any, tmp_path: Path) -> None:
    facts = {"steps": value, "plan": value, "began": value, "metric": ""}
    came_out = {"before": value, "after": value, "metric": "", "steps": value}
    run = RunFiles(write_run(tmp_path / "run", facts=facts, came_out=came_out, settings={"method": value}))
    assert run.read().faults == [] and run.score("after") in (None, 0.55)
    assert run.planned in (None, 7) and run.metric == "loss" and run.method and run.plan
    assert run.began == 7 if value == 7 else run.began > 1e9


def test_runs_are_found_below_a_folder_and_links_are_not_followed(tmp_path: Path) -> None:
    for name in ("b", "a/one", "a/two", "a/one/checkpoints/inner", "w/x/y/far"):
        write_run(tmp_path / "runs" / name) if "inner" not in name else None
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "runs" / "b")
    found = find_runs(tmp_path / "runs")
    assert [path.relative_to(tmp_path / "runs").as_posix() for path in found] == ["a/one", "a/two", "b"]
    assert find_runs(tmp_path / "runs" / "b") == [tmp_path / "runs" / "b"]
    assert find_runs(tmp_path / "nothing") == []


def test_folders_of_another_user_are_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "mine")
    (tmp_path / "private").mkdir()

    def asked(path: Path, look: Callable[[Path], bool] = files.is_run) -> bool:
        if path.name == "private":  # what root, who runs tests somewhere, would be allowed
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(files, "is_run", asked)
    assert find_runs(tmp_path) == [tmp_path / "mine"]
    assert "did you mean" in str(files.no_run(tmp_path / "mone"))
    with pytest.raises(PermissionError):
        find_runs(tmp_path / "private")


def test_runs_of_one_name_are_told_apart_by_the_folders_above(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("x/run", "y/run", "y/other")]
    assert names_of([RunFiles(path) for path in paths]) == ["x/run", "y/run", "y/other"]
    assert names_of([RunFiles(path) for path in paths[1:]]) == ["run", "other"]
    assert names_of([RunFiles(paths[0])] * 2) == ["run", "run"] and names_of([]) == []
