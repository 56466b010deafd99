"""Whether a run folder is whole: what a check-up says of good ones, and that no damage of any file it answers
for is missed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import petune.run.loop
from petune.errors import FileError, Stopped, TrainingFault
from petune.files.lock import RunLock
from petune.files.manifest import seal_folder
from petune.run.checkup import check_up
from petune.run.finished import load_run
from petune.run.step import OptimizerStep
from petune.saving import checkpoint
from tests.small_runs import Scripted, going_wrong, run, settings, snapshot, terminate_at


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a merged folder beside a stopped one."""
    place = tmp_path_factory.mktemp("runs")
    finished = run(going_wrong(place, eval_every=2, out="finished"))
    finished.merge()
    with pytest.raises(Stopped):
        run(settings(place, out="stopped"), terminate_at(3))
    return place


@pytest.fixture
def finished(made: Path, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(made / "finished", tmp_path / "finished")


@pytest.fixture
def stopped(made: Path, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(made / "stopped", tmp_path / "stopped")


def test_a_finished_run_is_whole_and_nothing_in_it_changes(finished: Path) -> None:
    before = snapshot(finished)
    found = check_up(finished)
    facts = dict(found.facts)
    assert (
        found.problems == []
        and facts["state"] == "finished"
        and facts["verdict"] == "whole"
        and facts["leftovers"] == "none"
    )
    assert facts["id"] == load_run(finished).summary["run_id"] and facts["best"] == "checkpoints/step-2"
    assert (
        facts["tuned"].startswith("whole")
        and facts["merged"].startswith("whole")
        and "finished" in facts["--resume"]
    )
    assert (
        sum(name == "checkpoint" for name, _ in found.facts)
        == len(checkpoint.candidates(finished / "checkpoints"))
        == 3
    )
    assert len(found.facts) < 24, "more than a screen"
    assert snapshot(finished) == before


@pytest.mark.parametrize(
    ("keep", "best"),
    [pytest.param(10, "checkpoints/step-2", id="it is there"), pytest.param(2, None, id="rotated out")],
)
def test_a_run_that_goes_back_to_an_earlier_checkpoint_is_whole(
    keep: int, best: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations at 2 and 4, each better than the one before. Going back to 3, it ends before it saves
    again."""
    left = iter(range(99, 0, -1))
    monkeypatch.setattr(petune.run.loop, "scored", lambda *_: Scripted(loss=float(next(left))))
    recipe = settings(tmp_path, eval_every=2, save_every=1, keep=keep)
    with pytest.raises(Stopped):
        run(recipe, terminate_at(4))
    folder = tmp_path / "run"
    assert (folder / "best").read_text().startswith("checkpoints/step-4\n")
    with monkeypatch.context() as patch, pytest.raises(TrainingFault):
        patch.setattr(OptimizerStep, "take", failing)
        run(recipe, resume=folder / "checkpoints" / "step-3")
    found = check_up(folder)
    assert found.problems == [] and dict(found.facts).get("best") == best
    assert (folder / "checkpoints" / "aside-step-4").is_dir()
    assert run(recipe, resume=True).summary["best_step"] == 6


def failing(self: OptimizerStep) -> None:
    raise TrainingFault("it ends here")


def test_a_stopped_run_says_where_resume_goes_on_and_what_was_left_half_made(stopped: Path) -> None:
    (stopped / ".tuned.tmp-5").mkdir()
    (stopped / "checkpoints" / "step-9.tmp-5").mkdir()
    facts = dict(check_up(stopped).facts)
    assert (
        facts["state"] == "stopped"
        and facts["--resume"] == "goes on from step-3"
        and facts["verdict"] == "whole"
    )
    assert facts["leftovers"].startswith(".tuned.tmp-5, checkpoints/step-9.tmp-5")
    with RunLock(stopped):
        assert dict(check_up(stopped).facts)["state"] == "running"


def flip(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        raw[-20] ^= 1
        (folder / name).write_bytes(raw)

    return damage


def seal_anew(name: str, **changes: object) -> Callable[[Path], None]:
    """Edit a file of `tuned/` and make its manifest fit."""

    def damage(folder: Path) -> None:
        edit(f"tuned/{name}", **changes)(folder)
        seal_folder(folder / "tuned")

    return damage


def cut(name: str, at: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        whole = (folder / name).read_text()
        (folder / name).write_text(whole[: whole.index(at) + 1])

    return damage


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    return damage


@pytest.mark.parametrize(
    ("named", "damage"),
    [
        ("step-6/state.safetensors", flip("checkpoints/step-6/state.safetensors")),
        ("tuned/model.safetensors", flip("tuned/model.safetensors")),
        ("tuned/petune.json", edit("tuned/petune.json", sha256={})),
        ("tuned  is not what this run wrote", seal_anew("petune.json", petune="0.0.9")),
        ("tuned  is missing", lambda folder: shutil.rmtree(folder / "tuned")),
        ("summary.json  is of another run", edit("summary.json", run_id="0" * 32)),
        ("env.json  is of another run", edit("env.json", run_id="0" * 32)),
        ("env.json  is missing", lambda folder: (folder / "env.json").unlink()),
        ("resolved.yaml", lambda folder: (folder / "resolved.yaml").write_text("lr: [")),
        ("resolved.yaml  was cut or edited", cut("resolved.yaml", "\nschedule:")),
        (
            "metrics.jsonl:2",
            lambda folder: (folder / "metrics.jsonl").write_text('{"step": 1}\nx\n{"step": 2}\n'),
        ),
        ("best  names", lambda folder: shutil.rmtree(folder / "checkpoints" / "step-2")),
        ("an --overwrite of this run was cut off", lambda folder: (folder / ".replacing").write_text("")),
        (
            "README.md  is a symbolic link",
            lambda folder: (folder / "README.md").unlink() or (folder / "README.md").symlink_to("/x"),
        ),
    ],
)
def test_damage_is_named(named: str, damage: Callable[[Path], None], finished: Path) -> None:
    damage(finished)
    found = check_up(finished)
    assert any(named in str(problem) for problem in found.problems), found.problems
    assert dict(found.facts)["verdict"].startswith("damaged")


def test_a_checkpoint_of_another_run_is_damage(finished: Path, stopped: Path) -> None:
    shutil.copytree(finished / "checkpoints" / "step-6", stopped / "checkpoints" / "step-6")
    found = check_up(stopped)
    assert (
        "another run" in str(found.problems[0])
        and dict(found.facts)["--resume"] == "is refused: step-6 is of another run"
    )


def test_what_holds_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / "thesis.txt"):
        with pytest.raises(FileError, match=str(place)):
            check_up(place)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_one_damaged_file_is_one_problem_in_the_singular(finished: Path) -> None:
    (finished / "summary.json").write_text("[]")
    found = check_up(finished)
    assert len(found.problems) == 1
    assert dict(found.facts)["verdict"] == "damaged: 1 problem"
