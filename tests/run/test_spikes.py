"""Spikes: a step far outside its recent range is named with its rows and left out exactly, on every rank,
also by a run taken up again."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from petune.errors import RecipeError, Stopped, TrainingFault
from petune.parallel.launch import process_group
from petune.parallel.runner import Runner
from petune.recipe import load_recipe
from petune.run.progress import Progress
from petune.run.spikes import LEAST, SpikeRule, limit, outside
from petune.run.step import OptimizerStep
from petune.saving import checkpoint
from tests.group_pool import assert_same_state, ends
from tests.planned_runs import PLANS
from tests.small_runs import Listener, assert_same_run, newest, numbers, run, settings, state_of, terminate_at

pytestmark = pytest.mark.usefixtures("no_picture")
AT, STEPS = 6, 8  # the step that spikes, and the last one
FEW, SOON = 4, 3  # in short runs: steps that a range is made of, and spikes in a row with which a run ends


# ---------------------------------------------------------------- what is a spike


def test_the_range_is_that_of_the_median_and_the_usual_distance_from_it():
    draw = random.Random(0)
    values = [5 + draw.gauss(0, 1) for _ in range(1000)]
    assert limit(values, 10) == pytest.approx(15, rel=0.1), (
        "1.4826 times the median absolute deviation is the standard deviation"
    )
    assert limit(values + [1e9] * 100, 10) < 20, "spikes do not widen it"
    assert limit([2.0] * 20, 10) == pytest.approx(4.0), "a tenth of the median is the least"


def test_a_loss_or_a_norm_outside_is_named_and_nothing_is_judged_too_early():
    recent = [[2.0, 1.0]] * LEAST
    assert outside(2.5, 1.5, recent, 10) is None
    assert (
        outside(4.1, 1.0, recent, 10)
        == f"loss 4.1, where the last {LEAST} steps have a median of 2 and allow 4"
    )
    both = outside(5.0, 3.0, recent, 10)
    assert both is not None and both.startswith("loss 5,") and "; gradient norm 3," in both
    assert outside(0.0, 0.0, recent, 10) is None, "less is no spike"
    assert outside(1e9, 1e9, recent[1:], 10) is None


def test_a_spike_does_not_enter_the_range_unless_it_is_only_warned_of():
    for action, kept in (("skip", 16), ("warn", 17)):
        progress = Progress(recent=[[2.0, 1.0]] * 16)
        assert SpikeRule(action, 64, 10.0).judge(9.0, 1.0, progress, list) is not None
        assert (len(progress.recent), progress.spikes) == (kept, 1)
        assert SpikeRule(action, 16, 10.0).judge(2.0, 1.0, progress, list) is None
        assert (progress.recent[-1], len(progress.recent), progress.spikes) == ([2.0, 1.0], 16, 0)
    said = SpikeRule("skip", 64, 10.0).judge(
        2.0, 1.0, Progress(recent=[[2.0, 1.0]] * 16), lambda flags: [True]
    )
    assert said == "outside its range in another process", "all decide the same"
    assert (
        SpikeRule("off", 64, 10.0).judge(9.0, 1.0, progress := Progress(), list) is None
        and progress == Progress()
    )


# ---------------------------------------------------------------- a run with a spike


@pytest.fixture
def judged_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a range be made of a few steps, so that short runs have one."""
    monkeypatch.setattr("petune.run.spikes.LEAST", FEW)
    monkeypatch.setattr("petune.run.spikes.IN_A_ROW", SOON)


def recipe_of(place: Path, **changes: Any) -> dict[str, Any]:
    """Eight steps of four rows, six an epoch, with dropout."""
    shape = {"epochs": 2, "max_steps": STEPS, "save_every": 100, "eval_every": 100, "keep": 10}
    shape |= {"batch_size": 4, "accumulate": 1}
    return settings(place, **{**shape, "schedule": "cosine", **changes})


def spiking(monkeypatch: pytest.MonkeyPatch, steps: Collection[int], rank: int = 0) -> None:
    """Let the gradients of these steps be a thousand times too large, on one rank; every step draws from
    torch's generator."""
    complete, step = Runner._complete, OptimizerStep.take
    now = {"step": 0}

    def watched(self: OptimizerStep) -> dict[str, Any]:
        now["step"] = self.progress.step + 1
        return step(self)

    def spoil(self: Runner) -> None:
        complete(self)
        torch.rand(1)  # as the dropout of a model that is not ours draws from torch's own generator
        if now["step"] in steps and process_group.started()[0] == rank:
            for value in self.tuned.values():
                if value.grad is not None:
                    value.grad.mul_(1000)

    monkeypatch.setattr(OptimizerStep, "take", watched)
    monkeypatch.setattr(Runner, "_complete", spoil)


def left_out(monkeypatch: pytest.MonkeyPatch, steps: Collection[int], passes: bool) -> None:
    """Let a run have no rows in these steps: it goes forward and backward there or not, and changes
    nothing."""
    step, update = OptimizerStep.take, OptimizerStep._update

    def without(self: OptimizerStep) -> dict[str, Any]:
        if self.progress.step + 1 not in steps or passes:
            return step(self)
        self.progress.step += 1
        return {
            "step": self.progress.step,
            "epoch": 0,
            "loss": 0.0,
            "lr": 0.0,
            "grad_norm": 0.0,
            "tokens": 0,
            "tokens_per_s": 0,
        }

    def updated(self: OptimizerStep, *given: Any) -> None:
        torch.rand(1)
        if self.progress.step + 1 not in steps:
            update(self, *given)

    monkeypatch.setattr(OptimizerStep, "take", without)
    monkeypatch.setattr(OptimizerStep, "_update", updated)


def same_end(found: Path, expected: Path) -> None:
    """The last checkpoints, bit by bit."""
    (tensors, facts), (others, other_facts) = state_of(newest(found)), state_of(newest(expected))
    assert newest(found).name == newest(expected).name
    assert tensors.keys() == others.keys() and facts == other_facts
    assert [name for name, value in tensors.items() if not torch.equal(value, others[name])] == []


@pytest.mark.usefixtures("judged_early")
@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=pytest.mark.long)])
def test_skipping_leaves_out_the_update_of_the_step_and_nothing_else(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = recipe_of(tmp_path, family=family)
    with monkeypatch.context() as patched:
        left_out(patched, [AT], passes=True)
        expected = run(recipe | {"out": str(tmp_path / "expected")})
    listener = Listener()
    with monkeypatch.context() as patched:
        spiking(patched, [AT])
        found = run(recipe | {"on_spike": "skip"}, listener)
        with pytest.raises(Stopped):
            run(recipe | {"on_spike": "skip", "out": str(tmp_path / "stopped")}, terminate_at(AT))
        run(recipe | {"on_spike": "skip", "out": str(tmp_path / "stopped")}, resume=True)
    same_end(found.folder, expected.folder)
    record = next(record for record in found.history if record["step"] == AT)
    assert record["spike"] == "skip" and "gradient norm" in str(record["outside"])
    assert len(record["rows"]) == 4 and all(":" in where and ".jsonl" in where for where in record["rows"])  # type: ignore[arg-type]
    [note] = [
        note
        for note in listener.notes
        if note.startswith(f"SPIKE at step {AT}, the update was left out: gradient norm ")
    ]
    assert record["rows"][0] in note  # type: ignore[index]
    assert (
        record["tokens"] == next(record for record in found.history if record["step"] == AT - 1)["tokens"]
    ), "nothing was trained"
    assert_same_run(tmp_path / "stopped", found.folder)


@pytest.mark.usefixtures("judged_early")
@pytest.mark.parametrize("saved", [pytest.param("checkpoint", marks=pytest.mark.long), "snapshot", "start"])
def test_rewinding_ends_as_a_run_that_never_saw_the_rows(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shape = {"checkpoint": {"save_every": 4}, "snapshot": {"snapshot_every": 5}, "start": {}}[saved]
    back = {"checkpoint": 4, "snapshot": 5, "start": 0}[saved]
    recipe = recipe_of(tmp_path, **shape)
    with monkeypatch.context() as patched:
        left_out(patched, range(back + 1, AT + 1), passes=False)
        expected = run(recipe | {"out": str(tmp_path / "expected")})
    with monkeypatch.context() as patched:
        spiking(patched, [AT])
        found = run(recipe | {"on_spike": "rewind"})
    same_end(found.folder, expected.folder)
    record = next(record for record in found.history if record["step"] == AT)
    assert (record["spike"], record["rewound_to"]) == ("rewind", back)
    assert [record["step"] for record in numbers(found.folder) if "loss" in record] == list(
        range(1, STEPS + 1)
    )


@pytest.mark.usefixtures("judged_early")
def test_stopping_saves_the_state_before_the_step_from_which_skipping_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spiking(monkeypatch, [AT])
    skipped = run(recipe_of(tmp_path, on_spike="skip", out="skipped"))
    recipe = recipe_of(tmp_path, on_spike="stop")
    with pytest.raises(
        TrainingFault,
        match=rf"step {AT}  a spike: the update was not made.*\n.*gradient norm .*; rows .*\.jsonl:\d+",
    ) as raised:
        run(recipe)
    assert raised.value.code == 7 and newest(tmp_path / "run").name == f"step-{AT - 1}"
    with pytest.raises(TrainingFault, match=f"step {AT}"):
        run(recipe, resume=True)
    run(recipe | {"on_spike": "skip"}, resume=True, allow_change=["on_spike"])
    assert_same_run(tmp_path / "run", skipped.folder)


@pytest.mark.usefixtures("judged_early")
def test_warning_changes_nothing_but_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spiking(monkeypatch, [AT])
    plain, listener = run(recipe_of(tmp_path, out="plain")), Listener()  # its gradients are too large as well
    warned = run(recipe_of(tmp_path, on_spike="warn"), listener)
    same_end(warned.folder, plain.folder)
    assert [record["spike"] for record in warned.history if "spike" in record] == ["warn"]
    assert any(note.startswith(f"SPIKE at step {AT}, the update was made") for note in listener.notes)


@pytest.mark.usefixtures("judged_early")
@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_run_that_has_left_its_range_for_good_ends(
    action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spiking(monkeypatch, range(AT, 100))
    with pytest.raises(TrainingFault, match=f"the last of {SOON} spikes in a row"):
        run(recipe_of(tmp_path, on_spike=action))
    assert newest(tmp_path / "run").name == f"step-{AT - 1 + SOON - 1}"
    # a run that goes on may meet as many again
    assert checkpoint.verify(newest(tmp_path / "run")).facts["progress"]["spikes"] == 0


@pytest.mark.usefixtures("judged_early")
@pytest.mark.crossed(1)
@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in ("dp", "shard") else pytest.mark.long) for plan in PLANS]
)
@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_spike_on_one_rank_is_left_out_by_all(
    plan: str, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_every = {"skip": 4, "rewind": 100}[action]  # back to the start, which has no moments
    recipe = recipe_of(tmp_path, on_spike=action, save_every=save_every)
    with monkeypatch.context() as patched:
        spiking(patched, [AT])
        run(recipe | {"out": str(tmp_path / "alone")})
    spiking(monkeypatch, [AT], rank=1)
    found = ends(2, _run, recipe | {"parallel": PLANS[plan]})
    assert [end.code for end in found] == [0, 0], found
    assert_same_state(newest(tmp_path / "run"), newest(tmp_path / "alone"))
    assert [record.get("spike") for record in numbers(tmp_path / "run") if record["step"] == AT] == [action]


def _run(recipe: dict[str, Any]) -> None:
    run(recipe)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spike_window": 32}, r"spike_window: it is about on_spike, which is off"),
        ({"spike_threshold": 5.0}, r"spike_threshold: it is about on_spike, which is off"),
        ({"on_spike": "skip", "memory": {"stream": "fp32"}}, r"on_spike: memory\.stream has made the update"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], said: str, tmp_path: Path):
    with pytest.raises(RecipeError, match=said):
        load_recipe(settings(tmp_path, method="full", clip=None, accumulate=1, kernels="reference") | change)
