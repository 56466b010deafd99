"""A run that was stopped goes on as if it had not been, from any step and as often as one likes; or it says
why it cannot."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy
import pytest

import petune.run.train
from petune.errors import FileError, MachineError, PetuneError, RecipeError, Stopped, UsageError
from petune.methods.configs import method_of
from petune.run.evaluate import outputs_of
from petune.run.train import Run
from petune.saving import checkpoint
from tests.small_runs import (
    METHODS,
    Listener,
    as_yaml,
    assert_same_run,
    going_wrong,
    newest,
    numbers,
    run,
    settings,
    snapshot,
    state_of,
    terminate_at,
    training,
    write_model,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("no_picture")
ROOT = Path(__file__).parents[2]
STEPS = 6
WHOLE = {"batch_size": 4, "accumulate": 1}  # a step in one pass, for what is about whole steps


class Shared:
    """A model and data that no test changes, and the runs on them that were not stopped, each trained when it
    is first asked for."""

    def __init__(self, place: Path) -> None:
        self.place, self._made = place, dict[str, Run]()

    def settings(self, out: Path, **changes: Any) -> dict[str, Any]:
        """A recipe on them that runs in a folder of the test's own."""
        return settings(self.place, **WHOLE, **changes, out=str(out))

    def straight(self, **changes: Any) -> Run:
        """The run of a recipe that was not stopped; it is only read."""
        if (key := json.dumps(changes)) not in self._made:
            self._made[key] = run(settings(self.place, **WHOLE, **changes, out=f"straight-{len(self._made)}"))
        return self._made[key]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(tmp_path_factory.mktemp("shared"))


def stopped_at(recipe: Any, *steps: int, **options: Any) -> Stopped:
    """Run until SIGTERM after one of the steps."""
    with pytest.raises(Stopped) as caught:
        run(recipe, terminate_at(*steps), **options)
    assert caught.value.code == 75
    return caught.value


# ---------------------------------------------------------------- the same end


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        ("full", (4,)),
        ("lora", (2,)),
        *(pytest.param(name, range(1, STEPS), marks=pytest.mark.long) for name in METHODS),
    ],
)
def test_a_run_stopped_after_any_step_ends_bit_by_bit_as_one_that_was_not(
    method: str, steps: Sequence[int], tmp_path: Path, shared: Shared
):
    """An evaluation is due after the fourth, and the third is in the run that is stopped after every one."""
    shape = {"family": "llama", "method": method, "eval_every": 4, "keep": 10}
    straight = shared.straight(**shape)
    for step in steps:
        folder = tmp_path / f"stopped-{step}"
        recipe = shared.settings(folder, **shape)
        error = stopped_at(recipe, step)
        assert f"step {step} of {STEPS}" in str(error) and "--resume" in str(error)
        assert newest(folder).name == f"step-{step}"
        listener = Listener()
        run(recipe, listener, resume=True)
        assert [record["step"] for record in listener.steps] == list(range(step + 1, STEPS + 1))
        assert_same_run(folder, straight.folder)


def test_components_of_the_base_are_taken_again_and_files_hold_twice_the_rank(tmp_path: Path):
    method = {"name": "lora", "r": 2, "init": "pissa", "init_iterations": 2}
    straight = run(settings(tmp_path, method=method, max_steps=3, out="straight"))
    stopped_at(recipe := settings(tmp_path, method=method, max_steps=3, out="stopped"), 2)
    run(recipe, resume=True)
    assert_same_run(tmp_path / "stopped", straight.folder)
    config = json.loads((straight.folder / "tuned" / "adapter_config.json").read_text())
    assert (config["r"], config["init_lora_weights"]) == (4, True)


def test_rates_of_their_own_are_kept_in_the_state_and_go_on(tmp_path: Path):
    shape = {"family": "llama", "method": {"name": "lora", "r": 2, "lr_ratio": 8}, "max_steps": 3}
    straight = run(settings(tmp_path, **shape, out="straight"))
    stopped_at(recipe := settings(tmp_path, **shape, out="stopped"), 2)
    groups = state_of(newest(tmp_path / "stopped"))[1]["optimizer"]["groups"]
    lr = {group["options"].get("lr_ratio", 1): group["options"]["lr"] for group in groups}
    assert lr[8] == 8 * lr[1] > 0
    run(recipe, resume=True)
    assert_same_run(tmp_path / "stopped", straight.folder)


@pytest.mark.parametrize(
    ("family", "method", "steps"),
    [
        ("t5", "adapter", (1, 4)),
        *(
            pytest.param(*pair, range(1, STEPS), marks=pytest.mark.long)
            for pair in (("t5", "adapter"), ("llama", "full"), ("bert", "lora"), ("bart", "side"))
        ),
    ],
)
def test_a_run_stopped_after_every_step_ends_bit_by_bit_as_one_that_was_not(
    family: str, method: str, steps: Sequence[int], tmp_path: Path, shared: Shared
):
    shape = {
        "family": family,
        "method": method,
        "eval_every": 2,
        "save_every": 50,
        "schedule": "cosine",
        "weight_decay": 0.1,
    }
    straight = shared.straight(**shape)
    recipe = shared.settings(tmp_path / "run", **shape)
    for step in steps:
        stopped_at(recipe, step, resume=step > 1)
    run(recipe, resume=True)
    assert_same_run(tmp_path / "run", straight.folder)


def test_dropout_and_order_make_the_steps_differ_so_that_resume_can_go_wrong(tmp_path: Path):
    """The straight run of the tests above, changed in one respect at a time, begins elsewhere."""
    losses = [
        training(settings(tmp_path, **{"method": "lora", **changes})).take()["loss"]
        for changes in ({}, {"seed": 1}, {"method": {"name": "lora", "r": 2}})
    ]
    assert losses[0] != losses[1] and losses[0] != losses[2]


def test_a_run_of_several_epochs_goes_on_in_the_middle_of_one(tmp_path: Path):
    shape = {"epochs": 2, "batch_size": 5, "accumulate": 2}
    straight = run(settings(tmp_path, **shape, out="straight"))
    recipe = settings(tmp_path, **shape)
    stopped_at(recipe, 2)
    stopped_at(recipe, 4, resume=True)
    run(recipe, resume=True)
    assert_same_run(tmp_path / "run", straight.folder)


def test_a_run_of_packed_sequences_goes_on_bit_by_bit(tmp_path: Path):
    data = settings(tmp_path)["data"] | {"packing": True, "max_length": 24}
    shape = {"data": data, "batch_size": 1, "accumulate": 2}
    straight = run(settings(tmp_path, **shape, out="straight"))
    stopped_at(settings(tmp_path, **shape), 2)
    run(settings(tmp_path, **shape), resume=True)
    assert_same_run(tmp_path / "run", straight.folder)


@pytest.fixture
def stop_in_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call with a number: SIGTERM comes in that forward pass of an evaluation, counted from 1 over the whole
    run."""
    wanted = {"at": 0, "seen": 0}

    def counted(model: Any, batch: Any) -> Any:
        wanted["seen"] += not model.training
        if not model.training and wanted["seen"] == wanted["at"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return outputs_of(model, batch)

    def arm(at: int) -> None:
        wanted.update(at=at, seen=0)

    monkeypatch.setattr("petune.run.objective.outputs_of", counted)
    return arm


@pytest.mark.parametrize(
    "evaluation", [0, 1, *(pytest.param(number, marks=pytest.mark.long) for number in (2, 3))]
)
def test_a_stop_in_an_evaluation_loses_neither_it_nor_the_best_checkpoint(
    evaluation: int, tmp_path: Path, stop_in_pass: Any
):
    """Nine held-out rows in batches of two: five passes an evaluation, at steps 0, 2, 4 and 6."""
    straight = run(going_wrong(tmp_path, eval_every=2, save_every=50, out="straight"))
    assert straight.summary["best_step"] == 2
    recipe = going_wrong(tmp_path, eval_every=2, save_every=50)
    stop_in_pass(5 * evaluation + 3)
    with pytest.raises(Stopped, match=f"at step {2 * evaluation} of 6"):
        run(recipe)
    stop_in_pass(0)
    finished = run(recipe, resume=True)
    assert_same_run(finished.folder, straight.folder)
    for key in ("before", "after", "best_step", "loss", "tokens"):
        assert finished.summary[key] == straight.summary[key], key


def test_a_stop_before_the_first_step_still_knows_the_scores_of_base_and_control(
    tmp_path: Path, stop_in_pass: Any
):
    shape = {"family": "bert", "head_only": True, "max_steps": 2, "warmup": 0}
    straight = run(settings(tmp_path, **shape, out="straight"))
    stop_in_pass(7)  # after the base is scored, while the control's features are computed
    with pytest.raises(Stopped, match="at step 0 of 2"):
        run(settings(tmp_path, **shape))
    stop_in_pass(0)
    finished = run(settings(tmp_path, **shape), resume=True)
    assert finished.summary["before"] == straight.summary["before"]
    assert finished.summary["head_only"] == straight.summary["head_only"] is not None
    assert_same_run(finished.folder, straight.folder)


def test_sigterm_to_a_process_saves_and_ends_with_75(tmp_path: Path):
    shape = {"epochs": 2, "max_steps": 10, "save_every": 1000, "eval_every": 1000}
    straight = run(settings(tmp_path, **shape, out="straight"))
    recipe = as_yaml(tmp_path / "recipe.yaml", settings(tmp_path, **shape))
    metrics, said = tmp_path / "run" / "metrics.jsonl", tmp_path / "said"

    def train() -> NoReturn:
        code = 0
        try:
            run(recipe, Listener(lambda step: time.sleep(0.2)))
        except PetuneError as error:
            said.write_text(str(error))
            code = error.code
        finally:
            os._exit(code)

    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    try:
        while child.is_alive() and not (metrics.exists() and '"step": 2,' in metrics.read_text()):
            time.sleep(0.01)
        child.terminate()
        child.join(60)
    finally:
        child.kill()
    assert child.exitcode == 75
    assert "stopped by SIGTERM" in said.read_text()
    at = int(newest(tmp_path / "run").name.removeprefix("step-"))
    assert 2 <= at < 10
    run(recipe, resume=True)
    assert_same_run(tmp_path / "run", straight.folder)


def test_ctrl_c_stops_like_sigterm_and_a_second_one_interrupts_at_once(tmp_path: Path):
    def interrupt(times: int) -> Listener:
        return Listener(
            lambda step: (
                [os.kill(os.getpid(), signal.SIGINT) for _ in range(times)] and None if step == 2 else None
            )
        )

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match="SIGINT"):
        run(settings(tmp_path, out="once", max_steps=3), interrupt(1))
    with pytest.raises(KeyboardInterrupt):
        run(settings(tmp_path, out="twice", max_steps=3), interrupt(2))
    assert signal.getsignal(signal.SIGINT) is handler
    checkpoint.verify(newest(tmp_path / "twice"))
    run(settings(tmp_path, out="twice", max_steps=3), resume=True)


# ---------------------------------------------------------------- damage


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "a flipped bit":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()


@pytest.mark.crossed(1)
@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["a flipped bit", "truncated", "missing"])
def test_resume_falls_back_aloud_and_an_explicit_path_never_does(
    how: str, file: str, tmp_path: Path, shared: Shared
):
    straight = shared.straight()
    recipe = shared.settings(tmp_path / "run")
    stopped_at(recipe, 4)
    last = newest(tmp_path / "run")
    damage(last / file, how)
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(FileError) as caught:
        run(recipe, resume=last)
    assert caught.value.code == 4
    assert "step-4" in str(caught.value)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before
    listener = Listener()
    run(recipe, listener, resume=True)
    aloud = [note for note in listener.notes if "NOT RESUMED" in note]
    assert aloud and "step-4" in aloud[0] and file in aloud[0]
    assert [record["step"] for record in listener.steps] == [4, 5, 6]
    assert_same_run(tmp_path / "run", straight.folder)


def test_when_no_checkpoint_is_whole_resume_does_not_start_anew(tmp_path: Path):
    stopped_at(settings(tmp_path), 2)
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        damage(path / "state.safetensors", "a flipped bit")
    with pytest.raises(FileError, match="no checkpoint is whole") as caught:
        run(settings(tmp_path), resume=True)
    assert caught.value.code == 4


def test_an_explicit_path_goes_back_and_sets_the_later_steps_aside(tmp_path: Path, shared: Shared):
    straight = shared.straight()
    stopped_at(shared.settings(tmp_path / "run", keep=10), 5)
    listener = Listener()
    run(
        shared.settings(tmp_path / "run", keep=10),
        listener,
        resume=tmp_path / "run" / "checkpoints" / "step-2",
    )
    assert [record["step"] for record in listener.steps] == [3, 4, 5, 6]
    assert (tmp_path / "run" / "checkpoints" / "aside-step-5").is_dir()
    assert_same_run(tmp_path / "run", straight.folder)


@pytest.mark.parametrize(
    ("place", "says"), [("nowhere", "nowhere"), ("run/tuned", "init_adapter=.*tuned"), ("llama", "llama")]
)
def test_an_explicit_path_that_is_no_checkpoint_is_refused(place: str, says: str, tmp_path: Path):
    stopped_at(settings(tmp_path), 2)
    (tmp_path / "run" / "tuned").mkdir()
    (tmp_path / "run" / "tuned" / "adapter_config.json").write_text("{}")
    with pytest.raises(FileError, match=says) as caught:
        run(settings(tmp_path), resume=tmp_path / place)
    assert caught.value.code == 4


# ---------------------------------------------------------------- something else than before


def test_changed_data_is_refused_and_the_run_stays_as_it_was(tmp_path: Path):
    stopped_at(settings(tmp_path), 2)
    before = snapshot(tmp_path / "run")
    write_rows(tmp_path / "causal.jsonl", "causal", seed=9)
    with pytest.raises(FileError, match="the data has changed") as caught:
        run(settings(tmp_path), resume=True)
    assert caught.value.code == 4
    assert snapshot(tmp_path / "run") == before


def test_data_that_shrank_are_changed_data_though_the_run_would_be_over(tmp_path: Path):
    recipe = settings(tmp_path, max_steps=None, epochs=2)
    stopped_at(recipe, 7)
    rows = (tmp_path / "causal.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "causal.jsonl").write_text("".join(rows[: len(rows) // 2]))
    with pytest.raises(FileError, match="the data has changed"):
        run(recipe, resume=True)


@pytest.mark.parametrize(
    "method", ["lora", *(pytest.param(name, marks=pytest.mark.long) for name in ("adapter", "side"))]
)
def test_another_base_is_refused_and_the_run_stays_as_it_was(method: str, tmp_path: Path):
    stopped_at(settings(tmp_path, method=method), 2)
    before = snapshot(tmp_path / "run")
    write_model(tmp_path / "llama", "llama", dropout=0.1, seed=1)
    with pytest.raises(FileError, match="the base model is another one") as caught:
        run(settings(tmp_path, method=method), resume=True)
    assert caught.value.code == 4
    assert snapshot(tmp_path / "run") == before


def test_one_changed_value_in_the_base_is_found(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    stopped_at(settings(tmp_path), 2)
    file = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-6
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(FileError, match="the base model is another one"):
        run(settings(tmp_path), resume=True)


def test_a_finished_run_that_cannot_be_extended_stays_finished(tmp_path: Path):
    finished = run(settings(tmp_path))
    before = snapshot(finished.folder)
    write_rows(tmp_path / "causal.jsonl", "causal", seed=9)
    with pytest.raises(FileError):
        run(settings(tmp_path, epochs=2), resume=True, allow_change=["epochs"])
    assert snapshot(finished.folder) == before
    assert petune.run.train.load_run(finished.folder).summary["steps"] == STEPS


def test_changed_settings_are_refused_with_both_values_and_the_way_to_allow_them(tmp_path: Path):
    stopped_at(settings(tmp_path), 2)
    before = snapshot(tmp_path / "run")
    changed = settings(tmp_path, lr=5e-4, batch_size=4, method={"name": "lora", "r": 2, "dropout": 0.2})
    with pytest.raises(RecipeError) as caught:
        run(changed, resume=True)
    assert caught.value.code == 2
    text = str(caught.value)
    for key, old, new in (
        ("lr", "0.001", "0.0005"),
        ("batch_size", "2", "4"),
        ("method.dropout", "0.1", "0.2"),
    ):
        assert f"{key} has changed" in text
        assert f"expected {old}, found {new}" in text
        assert f"--allow-change {key}" in text
    assert snapshot(tmp_path / "run") == before
    with pytest.raises(RecipeError) as caught:
        run(changed, resume=True, allow_change=["lr", "method"])
    assert "batch_size" in str(caught.value) and "lr has changed" not in str(caught.value)
    finished = run(changed, resume=True, allow_change=["lr", "method", "batch_size"])
    assert finished.recipe.lr == 5e-4


@pytest.mark.parametrize(
    "change", [{"keep": 5}, {"save_every": 2}, {"head_only": True}, {"eval_batch_size": 1}]
)
def test_settings_that_leave_the_numbers_alone_may_change(
    change: dict[str, Any], tmp_path: Path, shared: Shared
):
    straight = shared.straight()
    stopped_at(shared.settings(tmp_path / "run"), 2)
    run(shared.settings(tmp_path / "run", **change), resume=True)
    losses = [
        [record for record in numbers(folder) if "loss" in record]
        for folder in (tmp_path / "run", straight.folder)
    ]
    assert losses[0] == losses[1]


def test_a_moved_folder_of_data_and_model_is_no_change(tmp_path: Path):
    place = tmp_path / "before"
    place.mkdir()
    stopped_at(settings(place), 2)
    moved = tmp_path / "after"
    shutil.move(place, moved)
    run(settings(moved), resume=True)


def test_changed_sizes_are_refused_even_when_the_change_is_allowed(tmp_path: Path):
    stopped_at(settings(tmp_path), 2)
    with pytest.raises(FileError, match="is not the tensor this recipe trains"):
        run(
            settings(tmp_path, method={"name": "lora", "r": 4, "dropout": 0.1}),
            resume=True,
            allow_change=["method"],
        )


# ---------------------------------------------------------------- the folder


def test_a_finished_run_resumed_says_so_and_returns(tmp_path: Path):
    recipe = settings(tmp_path, max_steps=3, lr=None, warmup=0, schedule="constant")
    finished = run(recipe)
    width = json.loads((Path(finished.recipe.model) / "config.json").read_text())["hidden_size"]
    usual = method_of(finished.recipe.method).lr_at(width)
    used = {record["lr"] for record in numbers(finished.folder) if "loss" in record}
    assert used == {finished.recipe.lr} == {usual} != {method_of(finished.recipe.method).usual_lr}
    before = snapshot(finished.folder)
    listener = Listener()
    again = run(recipe, listener, resume=True)
    assert any("is finished" in note for note in listener.notes)
    assert not listener.steps
    assert again.summary == finished.summary
    shutil.rmtree(finished.recipe.model)  # of whose width the rate was
    assert run(recipe, resume=True).summary == finished.summary
    assert snapshot(finished.folder) == before


def test_a_finished_run_is_not_silently_taken_for_another(tmp_path: Path):
    run(settings(tmp_path, max_steps=3))
    with pytest.raises(RecipeError, match="lr has changed"):
        run(settings(tmp_path, max_steps=3, lr=5e-4), resume=True)


def test_a_finished_run_goes_on_for_longer_when_that_is_allowed(tmp_path: Path):
    run(settings(tmp_path))
    listener = Listener()
    finished = run(settings(tmp_path, epochs=2), listener, resume=True, allow_change=["epochs"])
    assert [record["step"] for record in listener.steps] == list(range(7, 13))
    assert finished.summary["steps"] == 12
    assert [record["step"] for record in numbers(finished.folder) if "loss" in record] == list(range(1, 13))


def test_a_change_that_would_train_nothing_of_a_finished_run_is_refused(tmp_path: Path):
    finished = run(settings(tmp_path))
    before = snapshot(finished.folder)
    with pytest.raises(UsageError, match="all 6 steps of this run are done"):
        run(settings(tmp_path, lr=5e-4), resume=True, allow_change=["lr"])
    assert snapshot(finished.folder) == before


def test_resume_where_no_run_began_is_refused(tmp_path: Path):
    before = None
    with pytest.raises(UsageError, match="no run to resume") as caught:
        recipe = settings(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        run(recipe, resume=True)
    assert caught.value.code == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_killed_before_its_first_save_starts_anew_and_its_records_too(tmp_path: Path, shared: Shared):
    straight = shared.straight(save_every=50)

    def die(step: int) -> None:
        if step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(shared.settings(tmp_path / "run", save_every=50), Listener(die))
    listener = Listener()
    run(shared.settings(tmp_path / "run", save_every=50), listener, resume=True)
    assert any("no checkpoint yet" in note for note in listener.notes)
    assert_same_run(tmp_path / "run", straight.folder)


def test_records_after_the_checkpoint_are_written_once_even_after_a_cut_last_line(
    tmp_path: Path, shared: Shared
):
    straight = shared.straight(save_every=2)

    def die(step: int) -> None:
        if step == 3:
            with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
                file.write('{"step": 4, "los')
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(shared.settings(tmp_path / "run", save_every=2), Listener(die))
    run(shared.settings(tmp_path / "run", save_every=2), resume=True)
    assert_same_run(tmp_path / "run", straight.folder)


def test_an_occupied_folder_is_refused_and_not_touched(tmp_path: Path):
    recipe = settings(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    for options in ({}, {"overwrite": True}):
        with pytest.raises(UsageError) as caught:
            run(recipe, **options)
        assert caught.value.code == 2
        assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_out_that_is_a_file_is_refused(tmp_path: Path):
    recipe = settings(tmp_path)
    (tmp_path / "run").write_text("mine")
    for options in ({}, {"overwrite": True}):
        with pytest.raises(UsageError, match="out is a file"):
            run(recipe, **options)
    assert (tmp_path / "run").read_text() == "mine"


def test_overwrite_replaces_a_run_and_leaves_nothing_of_it_but_what_is_not_petunes(tmp_path: Path):
    finished = run(settings(tmp_path, max_steps=4))
    finished.eval()
    (finished.folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="occupied"):
        run(settings(tmp_path, max_steps=2, warmup=0))
    fresh = run(settings(tmp_path, max_steps=2, warmup=0), overwrite=True)
    assert fresh.summary["steps"] == 2
    assert {path.name for path in (fresh.folder / "checkpoints").glob("step-*")} == {"step-1", "step-2"}
    assert [record["step"] for record in fresh.metrics() if "loss" in record] == [1, 2]
    assert not (fresh.folder / "eval.json").exists()
    assert (fresh.folder / "notes.txt").read_text() == "mine"


def test_an_overwrite_that_is_refused_leaves_the_old_run(tmp_path: Path):
    finished = run(settings(tmp_path, max_steps=3))
    before = snapshot(finished.folder)
    with pytest.raises(UsageError):
        run(settings(tmp_path, max_steps=3, method={"name": "lora", "targets": ["nowhere"]}), overwrite=True)
    assert snapshot(finished.folder) == before


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lasts(tmp_path: Path, shared: Shared):
    recipe = shared.settings(tmp_path / "run")
    errors: list[MachineError] = []

    def intrude(step: int) -> None:
        if step == 2:
            for options in ({"resume": True}, {"overwrite": True}):
                with pytest.raises(MachineError, match="another run is using this folder") as caught:
                    run(recipe, **options)
                errors.append(caught.value)

    straight = shared.straight()
    run(recipe, Listener(intrude))
    assert [error.code for error in errors] == [5, 5]
    assert_same_run(tmp_path / "run", straight.folder)


def test_a_checkpoint_holds_the_optimizer_and_every_generator(tmp_path: Path):
    finished = run(settings(tmp_path, method="full", max_steps=3))
    tensors, facts = state_of(newest(finished.folder))
    tuned = {name.removeprefix("tuned/") for name in tensors if name.startswith("tuned/")}
    for part in ("exp_avg", "exp_avg_sq", "step"):
        assert {
            name.removeprefix(f"optimizer/{part}/")
            for name in tensors
            if name.startswith(f"optimizer/{part}/")
        } == tuned
    assert {"rng/torch", "rng/python"} <= tensors.keys()
    manifest = json.loads((newest(finished.folder) / "manifest.json").read_text())
    assert manifest["step"] == 3 and facts["optimizer"]["class"] == "AdamW"


class Draws(petune.Callback):
    """What somebody's model or callback may do: draw from Python's generator and numpy's."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float]] = []

    def on_step(self, step: int, metrics: Any) -> None:
        self.drawn.append((random.random(), float(numpy.random.random())))


def test_pythons_and_numpys_generators_are_seeded_and_go_on_where_they_were(tmp_path: Path):
    straight, again, stopped, resumed = (Draws() for _ in range(4))
    shape: dict[str, Any] = {"max_steps": 3, "save_every": 50}
    run(settings(tmp_path, **shape, out="straight"), callbacks=[straight])
    run(settings(tmp_path, **shape, out="again"), callbacks=[again])
    stopped_at(settings(tmp_path, **shape), 2, callbacks=[stopped])
    random.seed(99)
    numpy.random.seed(99)
    run(settings(tmp_path, **shape), resume=True, callbacks=[resumed])
    assert len(straight.drawn) == 3 and again.drawn == straight.drawn == stopped.drawn + resumed.drawn
    run(settings(tmp_path, **shape, seed=1, out="other"), callbacks=[again])
    assert again.drawn[3:] != straight.drawn


def test_a_run_killed_soon_after_a_request_to_stop_says_next_time_what_was_lost(
    tmp_path: Path, shared: Shared
):
    straight = shared.straight(save_every=2)
    recipe = shared.settings(tmp_path / "run", save_every=2)

    def asked_and_killed(step: int) -> None:
        if step == 5:  # the save that SIGTERM asks for never comes
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            run(recipe, Listener(asked_and_killed))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert checkpoint.newest_good(tmp_path / "run" / "checkpoints")[1].step == 4
    listener = Listener()
    run(recipe, listener, resume=True)
    assert "lost since this state was saved, and trained again: steps 5 to 5" in listener.notes
    assert_same_run(tmp_path / "run", straight.folder)
