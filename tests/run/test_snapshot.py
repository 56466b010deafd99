"""Snapshots: each is the state of its step whatever happens meanwhile, and a killed run goes on from the
newest as if it had not been."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import petune.run.state
from petune.errors import FileError, MachineError, RecipeError, TrainingFault, UsageError
from petune.parallel.launch import process_group
from petune.recipe import load_recipe
from petune.run.snapshot import Snapshots, age
from petune.run.state import write_packed
from petune.run.step import OptimizerStep
from petune.saving import checkpoint
from tests.group_pool import assert_same_but_for_rounding, ends
from tests.planned_runs import PLANS, small, trained
from tests.small_runs import Listener, assert_same_run, going_wrong, newest, numbers, run, settings, state_of

pytestmark = pytest.mark.usefixtures("no_picture")
WHOLE = {"batch_size": 4, "accumulate": 1}  # a step in one pass, for what is about whole steps


def snapshots_of(folder: Path) -> list[str]:
    """Names in a run's folder of snapshots."""
    place = folder / "checkpoints" / "snapshots"
    return sorted(path.name for path in place.iterdir()) if place.is_dir() else []


def wait_for(there: Callable[[], bool]) -> None:
    """Until something is there, which another thread or process brings about."""
    until = time.monotonic() + 20
    while not there():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.002)


# ---------------------------------------------------------------- what is copied


def test_what_is_written_is_the_state_of_its_step_and_the_newest_comes_next(tmp_path: Path):
    free, begun = threading.Event(), threading.Event()

    def slow(folder: Path, tensors: Any, facts: Any) -> None:
        begun.set()
        assert free.wait(20)
        write_packed(folder, tensors, facts)

    live = {
        "a": torch.zeros(3, 5),
        "step": torch.tensor(0.0),
        "b": torch.zeros(7, dtype=torch.bfloat16),
        "rng": torch.zeros(9).byte(),
    }
    now, places = {"step": 0}, set()
    with Snapshots(tmp_path, torch.device("cpu"), slow, lambda: now["step"]) as snapshots:
        for step in range(1, 6):
            now["step"] = step
            for value in live.values():
                value.add_(1)  # in place, as an optimizer does
            snapshots.settle()
            snapshots.take(step, live, {"of": step}, run_id="run", facts={"x": 1})
            snapshots.begin()
            places.add(
                frozenset(value.data_ptr() for turn in snapshots._turns for value in turn.tensors.values())
            )
            assert begun.wait(20)
        now["step"] = 7
        free.set()
    # two rooms, seen when the first and when both were made
    assert len(places) <= 3 and (snapshots.taken, snapshots.written) == (5, 2)
    for step in (1, 5):
        manifest = checkpoint.verify(tmp_path / "snapshots" / f"step-{step}")
        assert (
            manifest.facts == {"x": 1, "snapshot": {"step": step, "run_step": 7}} and manifest.run_id == "run"
        )
        tensors, facts = state_of(tmp_path / "snapshots" / f"step-{step}")
        assert facts == {"of": step} and tensors.keys() == live.keys()
        assert all(
            value.dtype == live[name].dtype and value.eq(step).all() for name, value in tensors.items()
        )
    assert sorted(os.listdir(tmp_path / "snapshots")) == ["latest", "step-1", "step-5"]


def test_a_run_with_snapshots_ends_as_one_without_and_they_displace_no_checkpoint(tmp_path: Path):
    shape = {"eval_every": 1, "save_every": 3, "keep": 2, "max_steps": 6}
    recipe = going_wrong(tmp_path, **shape, out="straight")
    straight = run(recipe)
    listener = Listener(
        lambda step: wait_for(
            lambda: step < 3 or f"step-{step - 1}" in snapshots_of(tmp_path / "run") or step == 4
        )
    )
    run(recipe | {"out": str(tmp_path / "run"), "snapshot_every": 1}, listener)
    assert_same_run(tmp_path / "run", straight.folder)
    # the best, which came first, and the two newest
    left = ["latest", "snapshots", "step-1", "step-3", "step-6"]
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == left
    assert snapshots_of(tmp_path / "run") == ["latest", "step-4", "step-5"]
    assert "saves    a snapshot every step" in listener.lines
    assert listener.notes[-2].startswith("snapshots: 3 taken, 3 of them written, at most ")


# ---------------------------------------------------------------- killed


def killed_at(step: int, after: Callable[[Path], bool]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """What a process calls: train, and be killed after a step, once something is true of the run folder."""

    def train(recipe: dict[str, Any], options: dict[str, Any]) -> None:
        def at_step(now: int) -> None:
            if now == step:
                wait_for(lambda: after(Path(recipe["out"])))
                os.kill(os.getpid(), signal.SIGKILL)

        run(recipe, Listener(at_step), **options)

    return train


@pytest.mark.parametrize(
    ("family", "method", "every"),
    [
        ("t5", "adapter", 2),
        *(pytest.param(*one, 1, marks=pytest.mark.long) for one in (("bert", "full"), ("llama", "lora"))),
    ],
)
def test_a_killed_run_loses_one_step_and_goes_on_bit_by_bit(
    family: str, method: str, every: int, tmp_path: Path
):
    shape = {"family": family, "method": method, "eval_every": 3, "save_every": 50, "schedule": "cosine"}
    straight = run(settings(tmp_path, **WHOLE, **shape, out="straight"))
    recipe = settings(tmp_path, **WHOLE, **shape, snapshot_every=every)
    found = ends(1, killed_at(5, lambda folder: "step-4" in snapshots_of(folder)), recipe, {})
    assert found[0].code == -signal.SIGKILL, found
    with pytest.raises(UsageError, match="occupied"):  # what has nothing but snapshots is no beginning either
        run(recipe)
    listener = Listener()
    run(recipe, listener, resume=True)
    assert [record["step"] for record in listener.steps] == [5, 6]
    [note] = [note for note in listener.notes if note.startswith("resumed from ")]
    assert f"{os.path.join('snapshots', 'step-4')} at step 4, a snapshot that was committed at step " in note
    assert any(
        line.startswith("resumed  at step 4, a snapshot that was committed at step ")
        for line in listener.lines
    )
    assert_same_run(tmp_path / "run", straight.folder)


@pytest.mark.parametrize("at", ["write", "rename"])
def test_a_kill_between_copy_and_commit_leaves_the_snapshot_before(at: str, tmp_path: Path):
    straight = run(settings(tmp_path, **WHOLE, save_every=50, out="straight"))
    recipe = settings(tmp_path, **WHOLE, save_every=50, snapshot_every=1)

    def train(recipe: dict[str, Any]) -> None:
        rename, write = os.rename, write_packed

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def renamed(old: Any, new: Any) -> None:
            die() if Path(new).name == "step-3" else rename(old, new)

        def written(folder: Path, tensors: Any, facts: Any) -> None:
            write(folder, tensors, facts)
            if folder.parent.name == "snapshots" and folder.name.startswith("step-3."):
                die()

        if at == "rename":
            os.rename = renamed  # type: ignore[assignment]
        else:
            petune.run.state.write_packed = written
        run(
            recipe,
            Listener(
                lambda step: wait_for(
                    lambda: step == 1 or f"step-{step - 1}" in snapshots_of(tmp_path / "run")
                )
            ),
        )

    assert ends(1, train, recipe)[0].code == -signal.SIGKILL
    assert any(name.startswith("step-3.tmp-") for name in snapshots_of(tmp_path / "run"))
    listener = Listener()
    run(recipe, listener, resume=True)
    assert listener.steps[0]["step"] == 3
    assert not any("tmp" in name for name in snapshots_of(tmp_path / "run"))
    assert_same_run(tmp_path / "run", straight.folder)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_runs_killed_at_forty_random_moments_go_on_to_the_same_end(tmp_path: Path):
    shape = {"epochs": 6, "save_every": 100, "eval_every": 100, "schedule": "cosine"}
    straight = run(settings(tmp_path, **WHOLE, **shape, out="straight"))
    draw, taken_up = random.Random(5), 0

    def train(recipe: dict[str, Any], after_s: float) -> None:
        audit = OptimizerStep.make_audit

        def armed(self: OptimizerStep) -> Any:
            threading.Thread(
                target=lambda: (time.sleep(after_s), os.kill(os.getpid(), signal.SIGKILL)), daemon=True
            ).start()
            return audit(self)

        OptimizerStep.make_audit = armed  # type: ignore[method-assign]
        run(recipe)

    for at in range(40):
        recipe = settings(tmp_path, **WHOLE, **shape, snapshot_every=1, out=f"run-{at}")
        folder = tmp_path / f"run-{at}"
        if ends(1, train, recipe, draw.uniform(0, 0.9))[0].code:
            taken_up += bool(checkpoint.candidates(folder / "checkpoints"))
            run(recipe, resume=(folder / "resolved.yaml").exists())
        assert_same_run(folder, straight.folder)
        shutil.rmtree(folder)
    assert taken_up > 15


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan == "pp" else pytest.mark.long) for plan in PLANS]
)
def test_under_a_plan_a_killed_run_goes_on_from_its_snapshot(plan: str, tmp_path: Path, fast_beats: None):
    recipe = small(tmp_path, "llama", "lora", save_every=50, eval_every=50)
    straight = trained(recipe | {"out": str(tmp_path / "straight")})
    recipe |= {"parallel": PLANS[plan], "snapshot_every": 1, "timeout": 5}

    def train(recipe: dict[str, Any]) -> None:
        step = OptimizerStep.take

        def watched(self: OptimizerStep) -> dict[str, Any]:
            if process_group.started()[0] == 1 and self.progress.step == 3:
                wait_for(
                    lambda: (
                        "step-2" in snapshots_of(tmp_path / "run")
                        or "step-3" in snapshots_of(tmp_path / "run")
                    )
                )
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self)

        OptimizerStep.take = watched  # type: ignore[method-assign]
        run(recipe)

    found = ends(2, train, recipe)
    assert [found[0].code, found[1].code] == [6, -signal.SIGKILL], found
    trained(recipe, resume=True)
    log = (tmp_path / "run" / "run.log").read_text()
    assert "snapshots/step-2 at step 2" in log or "snapshots/step-3 at step 3" in log
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "snapshots")
    assert_same_but_for_rounding(tmp_path / "run", straight)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), MachineError, "ENOSPC"),
        (RuntimeError("the disk sings"), MachineError, "a snapshot could not be written: RuntimeError"),
        (TrainingFault("holds a NaN"), TrainingFault, "holds a NaN"),
    ],
)
def test_a_snapshot_that_cannot_be_written_ends_the_run_at_the_next_step(
    error: Exception,
    kind: type[MachineError | TrainingFault],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    straight = run(settings(tmp_path, save_every=2, out="straight"))
    recipe = settings(tmp_path, save_every=2, snapshot_every=1)

    def refuse(folder: Path, *given: Any) -> None:
        if folder.parent.name == "snapshots":
            raise error
        write_packed(folder, *given)

    def until_it_has_failed(step: int) -> None:
        if step == 4:
            wait_for(lambda: all(thread.name != "petune-snapshot" for thread in threading.enumerate()))

    listener = Listener(until_it_has_failed)
    with monkeypatch.context() as patched, pytest.raises(kind, match=said) as raised:
        patched.setattr(petune.run.state, "write_packed", refuse)
        run(recipe, listener)
    assert raised.value.code == (7 if kind is TrainingFault else 5)
    assert 1 <= len(listener.steps) <= 4, "it went on for more than the step in which the failure was seen"
    assert snapshots_of(tmp_path / "run") == [], "a torso is left"
    if kind is MachineError and len(listener.steps) >= 2:
        run(recipe, resume=True)
        assert_same_run(tmp_path / "run", straight.folder)


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_folder_that_is_gone_is_not_made_anew_and_its_state_is_kept(every: int, tmp_path: Path):
    """Whether there was a snapshot before or not."""

    def move(step: int) -> None:
        if step == 3:
            (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(MachineError, match="was removed, moved or taken"):
        run(settings(tmp_path, **WHOLE, save_every=50, snapshot_every=every), Listener(move))
    assert not (tmp_path / "run").exists()
    assert newest(tmp_path / "run-rescued-1").name == "step-3"


@pytest.mark.parametrize("said", [7, {"run_step": "7"}, {}])
def test_an_age_that_is_no_step_is_refused(said: object, tmp_path: Path):
    manifest = checkpoint.Manifest(2, "run", 3, {"snapshot": said}, {})
    with pytest.raises(FileError, match=r"manifest\.json  facts\.snapshot\.run_step  is not a step"):
        age(manifest, tmp_path / "step-3")
    assert age(checkpoint.Manifest(2, "run", 3, {}, {}), tmp_path / "step-3") == ""


def test_a_damaged_snapshot_is_passed_over_aloud(tmp_path: Path):
    recipe = settings(tmp_path, save_every=2, snapshot_every=1, keep=10)
    straight = run(recipe | {"out": str(tmp_path / "straight")})
    run(recipe)
    folder = tmp_path / "run" / "checkpoints"
    shutil.rmtree(folder / "step-6")
    (tmp_path / "run" / "summary.json").unlink()
    file = folder / "snapshots" / "step-5" / "state.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    listener = Listener()
    run(recipe, listener, resume=True)
    assert any(note.startswith("NOT RESUMED FROM: ") and "snapshots" in note for note in listener.notes)
    assert listener.steps[0]["step"] == 5, "the checkpoint of step 4 is the newest that is whole"
    assert_same_run(tmp_path / "run", straight.folder)


def test_snapshots_since_the_frozen_weights_were_last_seen_whole_are_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    straight = run(settings(tmp_path, save_every=2, out="straight"))
    recipe = settings(tmp_path, save_every=2, snapshot_every=1)
    step = OptimizerStep.take

    def moving(self: OptimizerStep) -> dict[str, Any]:
        if self.progress.step == 2:
            with torch.no_grad():
                next(iter(self.audit.frozen.values())).add_(1)
        if self.progress.step == 3:
            self.keeper.begin()
            wait_for(lambda: "step-3" in snapshots_of(tmp_path / "run"))
        return step(self)

    with monkeypatch.context() as patched, pytest.raises(TrainingFault, match="is frozen but has changed"):
        patched.setattr(OptimizerStep, "take", moving)
        run(recipe)
    assert "aside-step-3" in snapshots_of(tmp_path / "run") and "step-3" not in snapshots_of(tmp_path / "run")
    listener = Listener()
    run(recipe, listener, resume=True)
    assert listener.steps[0]["step"] == 3 and newest(tmp_path / "run").name == "step-6"
    assert numbers(tmp_path / "run") == numbers(straight.folder)
    assert_same_run(tmp_path / "run", straight.folder)


def test_an_interrupt_ends_what_is_being_written_and_no_more(tmp_path: Path):
    with (
        pytest.raises(KeyboardInterrupt),
        Snapshots(tmp_path, torch.device("cpu"), write_packed, lambda: 0) as snapshots,
    ):
        snapshots.take(1, {"a": torch.zeros(3)}, {}, run_id="run", facts={})
        raise KeyboardInterrupt
    assert all(thread.name != "petune-snapshot" for thread in threading.enumerate())
    assert all(checkpoint.verify(path) for path in checkpoint.candidates(tmp_path))


def test_nothing_is_written_to_a_folder_that_is_no_longer_the_runs(tmp_path: Path):
    gone, place = threading.Event(), tmp_path / "run"
    with Snapshots(
        place, torch.device("cpu"), write_packed, lambda: 0, lambda run: gone.is_set() and run == "run"
    ) as snapshots:
        snapshots.take(1, {"a": torch.zeros(3)}, {}, run_id="run", facts={})
        snapshots.drain()
        shutil.rmtree(place)
        gone.set()
        snapshots.take(2, {"a": torch.zeros(3)}, {}, run_id="run", facts={})
        snapshots.drain()
    assert not place.exists() and snapshots.written == 1


def test_streamed_weights_and_snapshots_are_refused_together(tmp_path: Path):
    recipe = settings(
        tmp_path,
        method="full",
        clip=None,
        accumulate=1,
        kernels="reference",
        memory={"stream": "fp32"},
        snapshot_every=1,
    )
    with pytest.raises(
        RecipeError, match=r"snapshot_every: memory\.stream changes the whole model"
    ) as raised:
        load_recipe(recipe)
    assert raised.value.code == 2
