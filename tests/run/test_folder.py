"""The run folder as a state machine: whatever call a process is killed in, the state that is left has a way
on, and nothing is lost."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from petune.errors import FileError, MachineError, PetuneError, UsageError
from petune.files.atomic import commit_folder, sweep
from petune.files.lock import RunLock
from petune.files.manifest import MANIFEST, check_folder
from petune.files.safetensors import write_json
from petune.recipe import load_recipe
from petune.run.checkup import check_up
from petune.run.entrance import entered
from petune.run.folder import FolderState, RunFolder, names
from petune.saving import checkpoint
from tests.kills import killed_at, left_by_kills
from tests.small_runs import (
    Listener,
    assert_same_run,
    going_wrong,
    newest,
    run,
    settings,
    state_of,
    terminate_at,
)

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("no_picture")
OLD, NEW = "0" * 31 + "1", "0" * 31 + "2"  # ids of two runs
FLAGS: dict[str, dict[str, bool]] = {
    "plain": {},
    "--resume": {"resume": True},
    "--overwrite": {"overwrite": True},
}

# What a start does in each state, as docs/reliability.md has it: None starts, else the exit code of the
# refusal.
ANSWERS: dict[FolderState, tuple[int | None, int | None, int | None]] = {
    "absent": (None, 2, None),
    "begun": (2, None, None),
    "running": (5, 5, 5),
    "stopped": (2, None, None),
    "finished": (2, None, None),
    "replaced": (None, 2, None),
    "foreign": (2, 2, 2),
}

# ---------------------------------------------------------------- folders in every state


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder in memory where there is one: a kill loses no more there than on a disk, and a flush takes no
    time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def folder(place: Path) -> RunFolder:
    """A run folder that is not there yet, of a recipe whose model is."""
    return RunFolder.of(load_recipe(settings(place)))


@pytest.fixture(autouse=True)
def _nothing_is_left(place: Path) -> Iterator[None]:
    yield
    shutil.rmtree(place / "run", ignore_errors=True)


def save(folder: RunFolder, step: int, run_id: str = OLD) -> None:
    """What the loop does at a save: commit, point, rotate."""

    def write(work: Path) -> None:
        write_json(work / "state.json", {"step": step, "run": run_id})

    checkpoint.commit(folder.checkpoints, step, write, run_id=run_id, facts={})
    folder.point_best(step, "loss", 0.5)
    checkpoint.rotate(folder.checkpoints, 2)


def ship(folder: Path, mark: str) -> None:
    """A folder that is committed whole: two files of one mark."""

    def fill(work: Path) -> None:
        (work / "petune.json").write_text(mark)
        (work / "more").write_text(mark)

    commit_folder(folder, fill, True, ("petune.json",))


def finish(folder: RunFolder, mark: str = "old") -> None:
    ship(folder.tuned, mark)
    scores = {"loss": 0.5}
    folder.finish(
        {
            "task": "causal",
            "metric": "loss",
            "before": scores,
            "after": scores,
            "steps": 3,
            "seconds": 1,
            "warnings": [],
        }
    )


def start(folder: RunFolder, run_id: str, **flags: bool) -> None:
    with enter(folder, **flags):
        folder.begin(run_id, overwrite=flags.get("overwrite", False))


def enter(folder: RunFolder, *, resume: bool = False, overwrite: bool = False) -> Any:
    return entered(folder, resume=resume, overwrite=overwrite, allow_change=())


def make(folder: RunFolder, state: FolderState) -> None:
    """Bring a folder into a state by the ways that lead there."""
    if state in ("absent", "foreign"):
        folder.path.mkdir()
        for name in (
            ".lock",
            ".tuned.tmp-77",
            ".resolved.yaml.tmp-77",
            *(["thesis.txt"] if state == "foreign" else []),
        ):
            (folder.path / name).write_text("")
        return
    start(folder, OLD)
    if state in ("stopped", "finished", "replaced"):
        folder.metrics.write_text('{"step": 1}\n{"step": 2}\n')
        save(folder, 1)
        save(folder, 2)
    if state in ("finished", "replaced"):
        finish(folder)
        ship(folder.path / "merged", "old")
    if state == "replaced":
        (folder.path / ".replacing").write_text("")


def answers(folder: RunFolder) -> tuple[int | None, ...]:
    """What each flag says; nothing in the folder changes."""
    codes: list[int | None] = []
    for flags in FLAGS.values():
        try:
            with enter(folder, **flags):
                codes.append(None)
        except PetuneError as error:
            codes.append(error.code)
    return tuple(codes)


@pytest.mark.parametrize("state", [state for state in ANSWERS if state != "running"])
def test_every_flag_says_in_every_state_what_the_table_has(state: FolderState, folder: RunFolder) -> None:
    make(folder, state)
    assert folder.state() == state and answers(folder) == ANSWERS[state]
    for flags, answer in zip(FLAGS.values(), ANSWERS[state], strict=True):
        if answer is None:
            shutil.rmtree(folder.path)
            make(folder, state)
            resumed = flags.get("resume", False)
            start(folder, OLD if resumed else NEW, **flags)
            assert folder.run_id() == (OLD if resumed else NEW) and folder.leftovers() == []
            assert folder.state() == ("stopped" if resumed and state in ("stopped", "finished") else "begun")
            assert json.loads((folder.path / "env.json").read_text())["run_id"] == folder.run_id()


def test_the_documents_have_the_same_table() -> None:
    """A cell that begins with a number is a refusal with that exit code."""
    rows = [
        line.strip("| ").split(" | ")
        for line in (ROOT / "docs" / "reliability.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    found = {row[0]: tuple(int(cell[0]) if cell[0].isdigit() else None for cell in row[2:]) for row in rows}
    assert {state: found.get(state) for state in ANSWERS} == ANSWERS


def test_a_damaged_run_may_be_replaced_and_is_resumed_from_what_is_whole(folder: RunFolder) -> None:
    make(folder, "stopped")
    for step, left in ((2, "goes on from step-1"), (1, "is refused: no checkpoint is whole")):
        (folder.checkpoints / f"step-{step}" / "state.json").write_text("{}")
        facts = dict(check_up(folder.path).facts)
        assert facts["verdict"].startswith("damaged") and facts["--resume"] == left
        assert answers(folder) == (2, None, None)


def test_a_folder_in_use_is_refused_by_every_flag_with_the_process_that_uses_it(folder: RunFolder) -> None:
    make(folder, "finished")
    with RunLock(folder.path):
        assert folder.state() == "running" and answers(folder) == ANSWERS["running"]
        with pytest.raises(MachineError, match=f"process {os.getpid()} on"), enter(folder):
            pass
    assert folder.state() == "finished"


# ---------------------------------------------------------------- killed at every call of every transition

# Name: (the state before, what happens, the states a kill may leave).
TRANSITIONS: dict[str, tuple[FolderState, Callable[[RunFolder], None], set[FolderState]]] = {
    "begin": ("absent", lambda folder: start(folder, NEW), {"absent", "begun"}),
    "overwrite": (
        "finished",
        lambda folder: start(folder, NEW, overwrite=True),
        {"finished", "replaced", "begun"},
    ),
    "overwrite again": ("replaced", lambda folder: start(folder, NEW), {"replaced", "begun"}),
    "resume": ("finished", lambda folder: start(folder, OLD, resume=True), {"finished", "stopped"}),
    "first save": ("begun", lambda folder: save(folder, 1), {"begun", "stopped"}),
    "save": ("stopped", lambda folder: save(folder, 3), {"stopped"}),
    "the same save again": ("stopped", lambda folder: save(folder, 2), {"stopped"}),
    "finish": ("stopped", finish, {"stopped", "finished"}),
    "finish again": ("finished", lambda folder: finish(folder, "new"), {"finished"}),
    "merge": ("finished", lambda folder: ship(folder.path / "merged", "new"), {"finished"}),
    "cut metrics": ("stopped", lambda folder: folder.cut_metrics(1) and None, {"stopped"}),
    "resume after kills": ("stopped", lambda folder: start(folder, OLD, resume=True), {"stopped"}),
    "overwrite after kills": (
        "stopped",
        lambda folder: start(folder, NEW, overwrite=True),
        {"stopped", "replaced", "begun"},
    ),
}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_kill_at_every_call_leaves_a_state_with_a_way_on(name: str, folder: RunFolder) -> None:
    before, work, after = TRANSITIONS[name]
    make(folder, before)
    if name.endswith("after kills"):
        leave_half_made(folder)
    kept, copies = folder.path.with_name("kept"), folder.path.with_name("copies")
    shutil.copytree(folder.path, kept)
    copies.mkdir()
    seen = set[FolderState]()
    try:
        calls = left_by_kills(folder.path, lambda: work(folder), copies)
        assert calls >= 4
        put(kept, folder.path)
        assert killed_at(calls // 2, lambda: work(folder))
        assert places_in(folder.path) == places_in(copies / str(calls // 2)), (
            "a real kill leaves something else"
        )
        for call in range(1, calls + 1):
            put(copies / str(call), folder.path)
            state = folder.state()
            seen.add(state)
            assert state in after, f"call {call}"
            assert answers(folder) == ANSWERS[state], f"call {call}: {state}"
            refuse_half_made(folder, state)
            go_on(folder, state)
    finally:
        shutil.rmtree(kept)
        shutil.rmtree(copies)
    assert after - seen <= {before}, "a state was never left"


def put(copy: Path, place: Path) -> None:
    """Let `place` be what `copy` is."""
    shutil.rmtree(place)
    shutil.copytree(copy, place, symlinks=True)


def places_in(folder: Path) -> dict[str, int]:
    """The size of every file, by its path; the id of a process counts for nothing in either."""
    found = {}
    for path in folder.rglob("*"):
        name = re.sub(r"(tmp|old)-\d+", r"\1-N", str(path.relative_to(folder)))
        found[name] = path.stat().st_size if path.is_file() and path.name != ".lock" else 0
    return found


def leave_half_made(folder: RunFolder) -> None:
    """What kills have left in places of every kind."""
    for name in (
        ".tuned.tmp-99999999",
        ".merged.tmp-99999999",
        ".hf.old-99999999",
        "checkpoints/step-9.tmp-99999999",
    ):
        (folder.path / name).mkdir()
        (folder.path / name / "petune.json").write_text("old")
    for name in (".metrics.jsonl.tmp-99999999", ".best.tmp-99999999", "checkpoints/.latest.tmp-99999999"):
        (folder.path / name).write_text("half")


def refuse_half_made(folder: RunFolder, state: FolderState) -> None:
    """What stands under a final name is whole; of a run that is not being replaced, a checkpoint that stood
    stands."""
    if state in ("stopped", "finished"):
        path, manifest, problems = checkpoint.newest_good(folder.checkpoints)
        assert (
            not problems and manifest.run_id == OLD == folder.run_id() and path.parent == folder.checkpoints
        )
    for shipped in (folder.tuned, folder.path / "merged"):
        if state != "replaced" and shipped.exists():
            check_folder(shipped)
            assert (
                len({file.read_text() for file in shipped.iterdir() if file.name != MANIFEST}) == 1
                and len(names(shipped)) == 3
            )
    assert (
        state != "finished"
        or folder.tuned.exists()
        or any(name.startswith(".tuned.old-") for name in folder.leftovers())
    )


def go_on(folder: RunFolder, state: FolderState) -> None:
    """The next start, by the first flag that is allowed, finds all in order and nothing left over."""
    flags = next(
        flags for flags, answer in zip(FLAGS.values(), ANSWERS[state], strict=True) if answer is None
    )
    start(folder, OLD if flags.get("resume") else NEW, **flags)
    assert folder.leftovers() == [] and not [name for name in os.listdir(folder.path) if name.startswith(".")]
    if flags.get("resume"):
        assert folder.state() in ("begun", "stopped")
        assert state != "finished" or folder.tuned.exists()
    else:
        assert folder.state() == "begun" and not folder.checkpoints.exists() and not folder.tuned.exists()


def test_a_run_killed_while_it_prepared_is_started_again_by_the_same_command(tmp_path: Path) -> None:
    recipe = settings(tmp_path, max_steps=1, warmup=0)
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    (tmp_path / "run" / ".lock").write_text("process 99999999 on nowhere")
    assert run(recipe).summary["steps"] == 1
    assert not [name for name in os.listdir(tmp_path / "run") if name.startswith(".")]


def test_a_commit_removes_what_killed_commits_left_and_spares_a_living_process(tmp_path: Path) -> None:
    for name in (
        ".tuned.tmp-99999999",
        ".tuned.old-99999999",
        f".tuned.tmp-{os.getppid()}",
        ".other.tmp-99999999",
    ):
        (tmp_path / name).mkdir()
    ship(tmp_path / "tuned", "new")
    assert sorted(os.listdir(tmp_path)) == [".other.tmp-99999999", f".tuned.tmp-{os.getppid()}", "tuned"]
    assert sweep(tmp_path, ("tuned",), alone=True) == [f".tuned.tmp-{os.getppid()}"]
    (tmp_path / "tuned").rename(tmp_path / ".tuned.old-99999999")
    assert (
        sweep(tmp_path, ("tuned",)) == [".tuned.old-99999999"]
        and (tmp_path / "tuned" / "more").read_text() == "new"
    )


def kill_on_the_way(place: Path, kills: int, seed: int) -> int:
    """Train runs that are killed at a random call, started again by the flag that is allowed, and killed
    again, each to its end; how many.

    Every end is compared with a run that was left alone.
    """
    straight, draw, done = run(settings(place, eval_every=2, out="straight")), random.Random(seed), 0
    while done < kills:
        folder = RunFolder.of(load_recipe(settings(place, eval_every=2)))
        flags: dict[str, bool] = {}
        while killed_at(draw.randint(1, 300), partial(run, folder.recipe, **flags)):
            done += 1
            state = folder.state()
            codes = answers(folder)
            assert codes == ANSWERS[state], state
            flags = {"resume": True} if codes[1] is None else {}
        assert check_up(folder.path).problems == [] and folder.leftovers() == []
        assert_same_run(folder.path, straight.folder)
        shutil.rmtree(folder.path)
    return done


def test_runs_killed_at_random_calls_again_and_again_end_as_one_that_was_not(place: Path) -> None:
    assert kill_on_the_way(place, 5, seed=0) >= 5


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_runs_killed_at_a_thousand_random_calls_end_as_one_that_was_not(place: Path) -> None:
    assert kill_on_the_way(place, 1000, seed=1) >= 1000


# ---------------------------------------------------------------- two runs, one folder


def test_a_run_that_prepares_holds_its_folder_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from petune.run import rank as training

    recipe, prepare, refused = settings(tmp_path), training.prepare, []

    def pause(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(training, "prepare", prepare)
        for flags in FLAGS.values():
            with pytest.raises(MachineError, match="another run is using this folder") as caught:
                run(recipe | {"seed": 1}, **flags)
            refused.append(caught.value.code)
        return prepare(*args, **named)

    monkeypatch.setattr(training, "prepare", pause)
    finished = run(recipe)
    assert refused == [5, 5, 5] and finished.recipe.seed == 0
    ids = {checkpoint.verify(path).run_id for path in (finished.folder / "checkpoints").glob("step-*")}
    ids |= {
        json.loads((finished.folder / name).read_text())["run_id"] for name in ("env.json", "summary.json")
    }
    assert ids == {RunFolder(finished.folder, finished.recipe).run_id()}


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    recipe = settings(tmp_path, eval_every=2)
    for out in ("run", "other"):
        with pytest.raises(PetuneError):
            run(recipe | {"out": str(tmp_path / out)}, terminate_at(3 if out == "run" else 4))
    mine, other = (
        RunFolder.of(load_recipe(recipe | {"out": str(tmp_path / out)})) for out in ("run", "other")
    )
    assert mine.run_id() != other.run_id()
    strange = other.checkpoints / "step-4"
    for resume in (strange, True):
        with pytest.raises(
            FileError, match=f"step-4 .*another run(.|\n)*run {mine.run_id()}, found run {other.run_id()}"
        ) as caught:
            run(recipe, resume=resume)
        assert caught.value.code == 4
        if resume is strange:
            shutil.copytree(strange, mine.checkpoints / "step-4")
    (mine.checkpoints / "step-4").rename(tmp_path / "moved")
    assert run(recipe, resume=True).summary["run_id"] == mine.run_id()


# ---------------------------------------------------------------- links

FILES = (
    "metrics.jsonl",
    "run.log",
    "README.md",
    "loss.png",
    "best",
    "summary.json",
    "env.json",
    "setup.json",
    "report.html",
    "ranks/rank-1.log",
    ".replacing",
)
FOLDERS = ("tuned", "checkpoints", "merged", "ranks")


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_link_in_a_run_folder_is_refused_and_what_is_behind_it_stays(
    name: str, folder: RunFolder, tmp_path: Path
) -> None:
    make(folder, "stopped")
    (folder.path / "ranks").mkdir(exist_ok=True)
    behind = tmp_path / "behind"
    if name in FOLDERS:
        behind.mkdir()
        (behind / "petune.json").write_text("precious")
    else:
        behind.write_text("precious")
    place = folder.path / name
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(behind)
    for flags in ({"resume": True}, {"overwrite": True}):
        if name == ".replacing" and "resume" in flags:
            continue  # refused as what it says
        with pytest.raises(FileError, match=rf"{name}  is a symbolic link"), enter(folder, **flags):
            pass
    assert (behind / "petune.json" if behind.is_dir() else behind).read_text() == "precious"


def test_a_pipe_and_a_second_name_are_refused_without_blocking(folder: RunFolder, tmp_path: Path) -> None:
    make(folder, "stopped")
    os.mkfifo(folder.log)
    with pytest.raises(FileError, match=r"run\.log  is something else"), enter(folder, resume=True):
        pass
    folder.log.unlink()
    os.link(folder.metrics, folder.path / "again")
    with pytest.raises(FileError, match=r"metrics\.jsonl  is linked elsewhere"), enter(folder, resume=True):
        pass


def test_nothing_is_committed_through_a_link(tmp_path: Path) -> None:
    ship(tmp_path / "mine", "old")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(FileError, match="symbolic link"):
        ship(tmp_path / "link", "new")
    assert (tmp_path / "mine" / "more").read_text() == "old" and sorted(os.listdir(tmp_path)) == [
        "link",
        "mine",
    ]


# ---------------------------------------------------------------- the folder goes while it trains


@pytest.fixture(scope="module")
def straight(place: Path) -> Path:
    """A run that was left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("petune.run.folder.draw_loss", lambda metrics, picture: False)
        return run(settings(place, out="left-alone")).folder


@pytest.mark.parametrize(
    ("how", "step"), [("removed", 3), ("removed", 6), ("moved", 3), ("another run's", 6)]
)
def test_a_folder_lost_in_mid_run_costs_no_step_and_nothing_else_is_touched(
    how: str, step: int, place: Path, straight: Path
) -> None:
    out, kept = place / f"lost-{how}-{step}", place / f"lost-{how}-{step}-rescued-1"

    def lose(at: int) -> None:
        if at == step:
            out.rename(place / f"away-{step}") if how == "moved" else shutil.rmtree(out)
            if how == "another run's":
                out.mkdir()
                (out / "resolved.yaml").write_text(f"# run {NEW}\n")

    with pytest.raises(MachineError) as caught:
        run(settings(place, out=out.name), Listener(lose))
    assert (
        caught.value.code == 5
        and f"step {step} is kept in {kept / 'checkpoints' / f'step-{step}'}" in str(caught.value)
    )
    assert f"petune train {kept} --resume" in str(caught.value)
    assert os.listdir(out) == ["resolved.yaml"] if how == "another run's" else not out.exists()
    finished = run(str(kept), resume=True)
    assert finished.folder == kept and check_up(kept).problems == []
    (tensors, facts), (others, other_facts) = state_of(newest(kept)), state_of(newest(straight))
    assert facts == other_facts and all(value.equal(others[name]) for name, value in tensors.items())


def test_a_folder_lost_at_the_very_end_leaves_what_was_trained_elsewhere(tmp_path: Path) -> None:
    class Losing(Listener):
        def note(self, line: str) -> None:
            if line.startswith("tuned/ holds step"):
                shutil.rmtree(tmp_path / "run")

    with pytest.raises(MachineError, match=r"what was trained is kept in .*run-rescued-1/tuned") as caught:
        run(going_wrong(tmp_path, eval_every=2), Losing())
    assert (
        caught.value.code == 5
        and (tmp_path / "run-rescued-1" / "tuned" / "petune.json").is_file()
        and not (tmp_path / "run").exists()
    )


def test_a_file_in_the_place_of_a_folder_is_called_a_file(tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="a file, not a folder"):
            commit_folder(tmp_path / "tuned", lambda _: None, overwrite, ours=("tuned",))
    assert (tmp_path / "tuned").read_text() == "mine"


def test_what_a_library_in_rust_says_of_a_full_disk_is_the_machines_refusal(tmp_path: Path) -> None:
    def fill(work: Path) -> None:
        (work / "tokenizer.json").touch()
        raise Exception("No space left on device (os error 28)")  # as tokenizers raises it

    with pytest.raises(
        MachineError, match=r"tuned  cannot write: No space left on device \(ENOSPC\)\n.*inodes"
    ):
        commit_folder(tmp_path / "tuned", fill, False, ())
    with pytest.raises(ValueError, match="os error of another kind"):
        commit_folder(tmp_path / "tuned", lambda _: int("os error of another kind") and None, False, ())
    assert os.listdir(tmp_path) == []
