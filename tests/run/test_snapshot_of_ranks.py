"""Snapshots of a state that lies over the ranks: written beside training, to the bytes and with the errors of
those that all wait for, and a kill meanwhile leaves the one before."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import petune.run.saver
from petune.files.range_writer import RangeWriter
from petune.files.safetensors import writing
from petune.parallel.launch import beats, process_group
from petune.run.saver import Saver
from petune.run.saves import Saves
from petune.run.state import HeldState
from petune.run.step import OptimizerStep
from petune.saving import checkpoint
from tests.group_pool import ends
from tests.kills import arm
from tests.planned_runs import PLANS, small, trained
from tests.small_runs import assert_same_run, run

pytestmark = pytest.mark.usefixtures("no_picture")
BESIDE = "petune-save"  # the name of the thread
SHAPE: dict[str, Any] = {"save_every": 50, "eval_every": 50, "snapshot_every": 1, "warmup": 0}


def snapshots_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints" / "snapshots").glob("step-*"))


@pytest.mark.parametrize("plan", ["tp", pytest.param("pp", marks=pytest.mark.long)])
def test_steps_are_made_while_ranks_write_a_snapshot_and_those_between_take_none(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first snapshot is written before step 3 is made; the second is of the step after."""
    moved, commit, take, begin = threading.Event(), checkpoint.commit, OptimizerStep.take, Saves.begin

    def late(root: Path, step: int, *given: Any, **named: Any) -> Path:
        if threading.current_thread().name == BESIDE and step == 1:
            assert moved.wait(60)
        return commit(root, step, *given, **named)

    def taken(self: OptimizerStep) -> dict[str, Any]:
        record = take(self)
        if self.progress.step == 3:
            moved.set()
        elif self.progress.step == 4:
            for thread in [one for one in threading.enumerate() if one.name == BESIDE]:
                thread.join(60)
        return record

    def noted(self: Saves, held: HeldState, write: Any) -> None:
        begin(self, held, write)
        (tmp_path / f"rank-{process_group.started()[0]}").open("a").write("copied\n")

    def waited(self: Saver, held: HeldState, put: Any) -> None:
        if self.progress.step == 1:
            self.folder.checkpoints.mkdir(exist_ok=True)
            self._commit(self.folder.checkpoints / "waited", self._facts(), held)
        put_beside(self, held, put)

    put_beside = Saver._put_beside
    monkeypatch.setattr(checkpoint, "commit", late)
    monkeypatch.setattr(OptimizerStep, "take", taken)
    monkeypatch.setattr(Saves, "begin", noted)
    monkeypatch.setattr(Saver, "_put_beside", waited)
    found = trained(small(tmp_path, "llama", "lora", parallel=PLANS[plan], **SHAPE)) / "checkpoints"
    assert snapshots_of(found.parent) == ["step-1", "step-4"], "those between were passed over"
    assert [(tmp_path / f"rank-{rank}").read_text().count("copied") for rank in (0, 1)] == [2, 2]
    one, other = found / "snapshots" / "step-1", found / "waited" / "step-1"
    assert checkpoint.verify(one).files == checkpoint.verify(other).files
    assert (one / "state.safetensors").read_bytes() == (other / "state.safetensors").read_bytes()
    said = checkpoint.verify(one).facts["snapshot"]
    assert said["step"] == 1 and said["run_step"] >= 3, "its age is that of the moment when it is committed"
    assert "snapshots: 2 taken, 2 of them written" in (found.parent / "run.log").read_text()


def test_what_a_rank_cannot_write_ends_the_run_in_the_same_words_and_leaves_no_torso(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_beats: None
) -> None:
    recipe = small(tmp_path, "llama", "lora", parallel=PLANS["tp"], timeout=3, max_steps=3, **SHAPE)
    write = RangeWriter.write

    def refused(self: RangeWriter, name: str, *given: Any) -> None:
        if process_group.started()[0] == 1 and self.path.parent.name.startswith("step-2."):
            with writing(self.path):
                raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        write(self, name, *given)

    def joined(self: OptimizerStep) -> dict[str, Any]:
        for thread in [one for one in threading.enumerate() if one.name == BESIDE]:
            thread.join(60 if self.progress.step == 1 else 0)
        return take(self)

    take, said = OptimizerStep.take, []
    monkeypatch.setattr(RangeWriter, "write", refused)
    monkeypatch.setattr(OptimizerStep, "take", joined)
    for waits in (False, True):
        out = tmp_path / ("waits" if waits else "run")
        monkeypatch.setattr(
            petune.run.saver, "lacks_room", lambda needed, waits=waits: "a test" if waits else None
        )
        found = ends(2, lambda recipe: run(recipe) and None, recipe | {"out": str(out)}, timeout=30)
        assert found[1].code == 5, found
        words = str(found[1].error).replace(str(out), "").rsplit("petune.errors.", 1)[1]
        said.append(re.sub(r"tmp-\d+", "tmp", words))
        assert snapshots_of(out) == ["step-1"], "a torso is left, or what stood is gone"
    assert said[0] == said[1] and "ENOSPC" in said[0]


@pytest.mark.parametrize(
    ("rank", "call"),
    [
        (0, 8),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(0, 3), (0, 12), (0, 20), (1, 3), (1, 9)]),
    ],
)
def test_a_rank_killed_while_a_snapshot_is_written_leaves_the_one_before(
    rank: int, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.02)
    monkeypatch.setattr(beats, "SILENT_S", 0.1)
    shape = {**SHAPE, "max_steps": 3, "parallel": PLANS["tp"]}
    recipe = small(tmp_path, "llama", "lora", timeout=2, **shape)
    straight = trained(small(tmp_path, "llama", "lora", **shape, out="straight"))

    def train(recipe: dict[str, Any]) -> None:
        commit, take = checkpoint.commit, OptimizerStep.take

        def armed(root: Path, step: int, *given: Any, **named: Any) -> Path:
            if step == 2 and process_group.started()[0] == rank:
                assert threading.current_thread().name == BESIDE and root.name == "snapshots"
                arm(call)
            return commit(root, step, *given, **named)

        def joined(self: OptimizerStep) -> dict[str, Any]:
            for thread in [one for one in threading.enumerate() if one.name == BESIDE]:
                thread.join(60 if self.progress.step == 1 else 0)
            return take(self)

        checkpoint.commit = armed
        OptimizerStep.take = joined  # in this very process, which ends soon
        run(recipe)

    found = ends(2, train, recipe, timeout=30)
    assert (found[rank].code, found[1 - rank].code) == (-signal.SIGKILL, 6), found
    path, _, damaged = checkpoint.newest_good(tmp_path / "run" / "checkpoints")
    assert (path.parent.name, path.name) == ("snapshots", "step-1") and not damaged
    trained(recipe, resume=True)
    assert not [name for name in os.listdir(path.parent) if "tmp" in name]
    assert_same_run(tmp_path / "run", straight)
