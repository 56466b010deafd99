"""Checkpoints written beside training: the bytes, the order and the errors of a save that all wait for, and a
kill meanwhile costs no more than the one that is on its way."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import petune.run.saver
import petune.run.saves
import petune.run.state
from petune.errors import MachineError, PetuneError, Stopped, TrainingFault
from petune.files.safetensors import read_tensors
from petune.parallel.launch import process_group
from petune.run.saver import Saver
from petune.run.saves import Saves, lacks_room, shortage
from petune.run.state import HeldState, write_packed
from petune.run.step import OptimizerStep
from petune.saving import checkpoint
from tests.group_pool import ends
from tests.planned_runs import PLANS, small, trained
from tests.small_runs import Listener, assert_same_run, loop, run, settings, terminate_at

pytestmark = pytest.mark.usefixtures("no_picture")
BESIDE = "petune-save"  # the name of the thread
WHOLE = {"batch_size": 4, "accumulate": 1, "eval_every": 50}


def saved(folder: Path) -> list[str]:
    """Names in a run's folder of checkpoints, but for the pointer."""
    return sorted(path.name for path in folder.glob("checkpoints/*") if path.name != "latest")


def in_thread() -> bool:
    return threading.current_thread().name == BESIDE


def slow(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Let `act` come, in the thread that writes beside training, before it begins with a step."""
    commit = checkpoint.commit

    def late(root: Path, step: int, *given: Any, **named: Any) -> Path:
        if in_thread():
            act(step)
        return commit(root, step, *given, **named)

    monkeypatch.setattr(checkpoint, "commit", late)


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize(
    ("family", "method", "plan"),
    [
        ("bert", "lora", None),
        pytest.param("llama", "full", "dp", marks=pytest.mark.long),
        ("llama", "full", "shard"),
        pytest.param("t5", "full", "tp", marks=pytest.mark.long),
        pytest.param("llama", "lora", "galaxy", marks=pytest.mark.long),
        pytest.param("bart", "full", "pp", marks=pytest.mark.long),
        pytest.param("llama", "full", "sp", marks=pytest.mark.long),
    ],
)
def test_the_bytes_are_those_of_the_state_as_it_was_though_training_has_gone_on(
    family: str, method: str, plan: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("petune.files.hashes.BLOCK", 1000)  # for ranks to share
    beside, begin, take, moved = Saver._save_beside, Saves.begin, OptimizerStep.take, threading.Event()
    slow(monkeypatch, lambda step: moved.wait(60) and None)

    def taken(self: OptimizerStep) -> dict[str, Any]:
        record = take(self)
        if self.progress.step == 3:
            moved.set()
        return record

    def twice(self: Saver, held: HeldState) -> Path:
        if self._writes:  # as a save that all wait for
            self.folder.checkpoints.mkdir(exist_ok=True)
            self._commit(self.folder.checkpoints / "waited", self._facts(), held)
        return beside(self, held)

    def noted(self: Saves, *given: Any) -> None:
        (tmp_path / f"rank-{process_group.started()[0]}").touch()
        begin(self, *given)

    monkeypatch.setattr(Saver, "_save_beside", twice)
    monkeypatch.setattr(Saves, "begin", noted)
    monkeypatch.setattr(OptimizerStep, "take", taken)
    changes = {} if plan is None else {"parallel": PLANS[plan]}
    recipe = small(tmp_path, family, method, max_steps=4, save_every=2, eval_every=50, warmup=0, **changes)
    found = trained(recipe) / "checkpoints"
    assert [path.name for path in tmp_path.glob("rank-*")] == ["rank-0"] if plan in (None, "dp", "sp") else 2
    one, other = found / "step-2", found / "waited" / "step-2"
    assert checkpoint.verify(one).files == checkpoint.verify(other).files
    for name in ("state.safetensors", "state.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert (one / "state.safetensors").read_bytes() != (found / "step-4" / "state.safetensors").read_bytes()


def test_steps_are_made_while_one_checkpoint_is_written_and_the_next_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shape = {**WHOLE, "save_every": 3, "keep": 2, "epochs": 3, "max_steps": 11}
    straight = run(settings(tmp_path, **shape, out="straight"))
    reached, writing = threading.Event(), [0]

    def until_reached(step: int) -> None:
        writing[0] += 1
        assert writing[0] == 1 and (step > 3 or reached.wait(60))
        writing[0] -= 1

    def at_step(step: int) -> None:
        if step == 5:
            assert saved(tmp_path / "run") == [], "nothing is committed, and two steps are made"
            reached.set()

    slow(monkeypatch, until_reached)
    run(settings(tmp_path, **shape), Listener(at_step))
    assert reached.is_set() and saved(tmp_path / "run") == saved(straight.folder) == ["step-11", "step-9"]
    assert_same_run(tmp_path / "run", straight.folder)
    assert all(thread.name != BESIDE for thread in threading.enumerate())


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        TrainingFault("holds a NaN"),
        RuntimeError("it sings"),
    ],
)
def test_what_cannot_be_written_ends_the_run_at_the_next_step_in_the_same_words(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shape = {**WHOLE, "max_steps": 5}
    straight = run(settings(tmp_path, **shape, out="straight"))

    def refuse(folder: Path, *given: Any) -> None:
        if folder.name.startswith("step-3."):
            raise error
        write_packed(folder, *given)

    def until_it_has_failed(step: int) -> None:
        for thread in [one for one in threading.enumerate() if one.name == BESIDE] if step == 4 else ():
            thread.join(60)

    said, listener = [], Listener(until_it_has_failed)
    with monkeypatch.context() as patched:
        patched.setattr(petune.run.state, "write_packed", refuse)
        for waits in (False, True):
            patched.setattr(
                petune.run.saver, "lacks_room", lambda needed, waits=waits: "a test" if waits else None
            )
            folder = tmp_path / ("waits" if waits else "run")
            with pytest.raises(type(error) if isinstance(error, RuntimeError) else PetuneError) as raised:
                run(settings(tmp_path, **shape, out=folder.name), None if waits else listener)
            said.append((str(raised.value).replace(str(folder), ""), getattr(raised.value, "code", 1)))
            assert saved(folder) == ["step-1", "step-2"], "a torso is left, or what stood is gone"
    assert said[0] == said[1] and said[0][1] == {OSError: 5, TrainingFault: 7}.get(type(error), 1)
    assert len(listener.steps) in (3, 4), "it is told at the next step"
    run(settings(tmp_path, **shape), resume=True)
    assert_same_run(tmp_path / "run", straight.folder)


def test_a_stop_and_an_error_wait_for_the_checkpoint_that_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shape = {**WHOLE, "save_every": 2}
    slow(monkeypatch, lambda step: time.sleep(0.3))
    with pytest.raises(Stopped):
        run(settings(tmp_path, **shape), terminate_at(3))
    assert saved(tmp_path / "run") == ["step-2", "step-3"]

    def fail(step: int) -> None:
        if step == 3:
            raise MachineError("the roof leaks")

    with pytest.raises(MachineError, match="the roof leaks"):
        run(settings(tmp_path, **shape, out="other"), Listener(fail))
    assert saved(tmp_path / "other") == ["step-2"]


@pytest.mark.parametrize(("failing", "codes"), [((0, 1), [7, 7]), ((1,), [6, 7])])
def test_an_error_of_a_rank_waits_for_what_all_write_together(
    failing: tuple[int, ...],
    codes: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fast_beats: None,
):
    slow(monkeypatch, lambda step: time.sleep(0.3))
    recipe = small(tmp_path, "llama", "lora", save_every=2, eval_every=50, parallel=PLANS["tp"])
    step = OptimizerStep.take

    def spoilt(self: OptimizerStep) -> dict[str, Any]:
        if self.progress.step == 2 and process_group.started()[0] in failing:
            raise TrainingFault("it went wrong")
        return step(self)

    monkeypatch.setattr(OptimizerStep, "take", spoilt)
    found = ends(2, lambda: run(recipe) and None)
    assert [end.code for end in found] == codes, found
    assert saved(tmp_path / "run") == ["step-2"]
    assert checkpoint.verify(tmp_path / "run" / "checkpoints" / "step-2")


# ---------------------------------------------------------------- killed


@pytest.mark.parametrize("at", ["write", "rename", "best"])
def test_a_kill_while_training_goes_on_leaves_the_checkpoint_before(at: str, tmp_path: Path):
    shape = {**WHOLE, "save_every": 2, "max_steps": 6, "keep": 2}
    straight = run(settings(tmp_path, **shape, out="straight"))
    recipe = settings(tmp_path, **shape)

    def train(recipe: dict[str, Any]) -> None:
        rename, write, tidy, reached = os.rename, write_packed, Saver._tidy, threading.Event()

        def die(*_: Any) -> None:
            assert reached.wait(60) and in_thread()
            os.kill(os.getpid(), signal.SIGKILL)

        def renamed(old: Any, new: Any) -> None:
            die() if Path(new).name == "step-4" else rename(old, new)

        def written(folder: Path, *given: Any) -> None:
            write(folder, *given)
            if folder.name.startswith("step-4."):
                die()

        def tidied(self: Saver, progress: Any) -> None:
            die() if progress.step == 4 else tidy(self, progress)

        if at == "rename":
            os.rename = renamed  # type: ignore[assignment]
        elif at == "write":
            petune.run.state.write_packed = written
        else:
            Saver._tidy = tidied  # type: ignore[method-assign]
        run(recipe, Listener(lambda step: reached.set() if step == 5 else None))

    assert ends(1, train, recipe)[0].code == -signal.SIGKILL
    listener = Listener()
    run(recipe, listener, resume=True)
    assert listener.steps[0]["step"] == (5 if at == "best" else 3)
    assert saved(tmp_path / "run") == saved(straight.folder)
    assert_same_run(tmp_path / "run", straight.folder)


# ---------------------------------------------------------------- room


def test_copies_may_take_half_of_what_is_free_on_every_host():
    assert shortage([("a", 50, 100), ("b", 0, None)]) is None
    assert (
        shortage([("a", 26, 101), ("a", 25, 100)])
        == "copies take 51 B of host memory, and 100 B of a are free"
    )
    assert shortage([("a", 1, 100), ("b", 8 << 30, 15 << 30)]) == (
        "copies take 8 GiB of host memory, and 15 GiB of b are free"
    )
    assert lacks_room(0) is None and lacks_room(1 << 60) is not None


def test_without_room_for_a_copy_training_waits_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []
    monkeypatch.setattr(petune.run.saves, "shortage", lambda ranks: asked.append(ranks[0][1]) or "it is full")
    monkeypatch.setattr(Saves, "begin", lambda *_: pytest.fail("a copy was made"))
    listener = Listener()
    run(settings(tmp_path, eval_every=50), listener)
    told = [note for note in listener.notes if note.startswith("training waits")]
    assert told == ["training waits while a checkpoint is written: it is full"]
    state = read_tensors(tmp_path / "run" / "checkpoints" / "step-6" / "state.safetensors")
    size = sum(value.nbytes for value in state.values())
    assert len(asked) == 6, "once for the room, and at each save but the last"
    assert all(size <= needed < size + 64 * len(state) + (1 << 20) + 1 for needed in asked)


def test_room_for_the_copy_is_made_while_training_begins_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    places, begin = set(), Saves.begin

    def noted(self: Saves, held: HeldState, write: Any) -> None:
        assert self.needs(held.here) == 0, "the room was made before the first save"
        begin(self, held, write)
        assert self._copy is not None and self._copy.buffer is not None
        places.add(self._copy.buffer.data_ptr())
        assert not any(value.is_cuda or value.data_ptr() in places for value in held.here.values())

    monkeypatch.setattr(Saves, "begin", noted)
    made = loop(settings(tmp_path, eval_every=50, save_every=2, keep=3))
    made.folder.begin(made.saver.run_id)
    made.run(resume=False)
    assert len(places) == 1
    assert made.saver.saves._copy is None, "the room is given back before tuned/ is written"
