"""The loop: what a step computes, what ends a run and with which code, which checkpoint is the best one, and
what a refused run leaves."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import petune.run.loop
import petune.run.objective
import petune.run.step
from petune.errors import FileError, MachineError, RecipeError, TrainingFault, UsageError
from petune.parallel import Outputs
from petune.run.audit import Audit
from petune.run.evaluate import forward, outputs_of
from petune.run.step import OptimizerStep
from petune.saving import checkpoint
from petune.tasks import Example, count, loss_sum
from tests.small_runs import (
    METHODS,
    TASK,
    WORDS,
    Listener,
    Scripted,
    going_wrong,
    newest,
    numbers,
    run,
    settings,
    state_of,
    training,
    write_model,
)

pytestmark = pytest.mark.usefixtures("no_picture")

ALL = [(family, method) for family in TASK for method in METHODS]


def quiet_training(place: Path, family: str, method: str, **changes: Any) -> OptimizerStep:
    """A set-up loop without any dropout, its tuned tensors moved away from where they begin so that each has
    a gradient."""
    if not (place / family).exists():
        write_model(place / family, family)
    config = {**METHODS[method], **({"dropout": 0.0} if method != "full" else {})}
    made = training(settings(place, family, config, **{"lr": 1e-4, **changes}))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for value in made.tuned.values():
            value += 0.05 * torch.randn(value.shape, generator=generator)
    made.audit = Audit(made.tuned, {})
    return made


def gradients(made: OptimizerStep) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step, by the loop's own passes."""
    micro = made.micro_batches(0)
    total = sum(count(batch, made.weights) for batch in micro)
    made.model.train()
    loss = made.runner.backward(micro, total)
    return loss, {name: value.grad.clone() for name, value in made.tuned.items() if value.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys() and found
    for name, value in expected.items():
        assert float((found[name] - value).detach().abs().max()) <= tolerance * max(
            1.0, float(value.detach().abs().max())
        ), name


# ---------------------------------------------------------------- one step


@pytest.mark.slow
@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", TASK)
def test_sixteen_rows_at_once_and_one_by_one_make_the_same_step_in_float64(
    family: str, method: str, tmp_path: Path
):
    weights = {"class_weights": {"red": 0.3, "blue": 1.7}} if family == "bert" else {}
    sizes = {"16x1": (16, 1), "1x16": (1, 16), "5x4": (5, 4)}
    made = {}
    for name, (rows, times) in sizes.items():
        at_least = 16 if name != "5x4" else 20
        assert rows * times >= at_least
        made[name] = quiet_training(
            tmp_path, family, method, batch_size=rows, accumulate=times, out=name, **weights
        )
        made[name].model.double()
    lengths = {batch["input_ids"].shape[1] for batch in made["1x16"].micro_batches(0)}
    assert len(lengths) > 3  # rows of one length would prove nothing
    loss, expected = gradients(made["16x1"])
    for value in made["16x1"].tuned.values():
        value.grad = None
    again, found = gradients(made["1x16"])
    for value in made["1x16"].tuned.values():
        value.grad = None
    assert abs(loss - again) < 1e-12
    assert_close(found, expected, 1e-12)
    records = [made[name].take() for name in ("16x1", "1x16")]
    assert abs(records[0]["loss"] - records[1]["loss"]) < 1e-12
    assert abs(records[0]["grad_norm"] - records[1]["grad_norm"]) < 1e-9
    assert_close(dict(made["1x16"].tuned), dict(made["16x1"].tuned), 1e-11)
    assert len(made["5x4"].micro_batches(0)) == 4
    assert len(made["5x4"].micro_batches(1)) == 1  # four rows are left


@pytest.mark.parametrize("family", ["bert", "t5", "llama"])
def test_accumulation_changes_nothing_beyond_rounding_in_float32(family: str, tmp_path: Path):
    one, other = (
        quiet_training(tmp_path, family, "lora", batch_size=rows, accumulate=16 // rows, out=f"{rows}")
        for rows in (16, 1)
    )
    assert_close(gradients(other)[1], gradients(one)[1], 1e-5)


@pytest.mark.parametrize("family", ["bart", "t5", "llama"])
def test_the_loss_of_a_step_is_the_mean_over_all_its_trained_tokens(family: str, tmp_path: Path):
    made = quiet_training(tmp_path, family, "lora", batch_size=3, accumulate=4)
    summed = tokens = 0.0
    for index in petune.run.step.units_of_step(0, made.steps, made.recipe.seed):
        example = made.units[index]
        assert isinstance(example.labels, list)
        # transformers' own
        theirs = made.model(
            input_ids=torch.tensor([example.input_ids]), labels=torch.tensor([example.labels])
        ).loss
        summed, tokens = summed + theirs.item() * example.trained, tokens + example.trained
    assert made.take()["loss"] == pytest.approx(summed / tokens, abs=1e-5)


def test_class_weights_weigh_the_mean_and_balanced_ones_come_from_the_rows(tmp_path: Path):
    made = quiet_training(tmp_path, "bert", "full", batch_size=12, accumulate=2, class_weights="balanced")
    rows = [json.loads(line)["label"] for line in (tmp_path / "classify.jsonl").read_text().splitlines()]
    names = made.prepared.rows.labels
    assert names == ("blue", "green", "red")
    wanted = [len(rows) / (3 * rows.count(name)) for name in names]
    assert made.weights is not None
    assert made.weights.tolist() == pytest.approx(wanted)
    made.model.eval()
    losses = []
    for batch in made.micro_batches(0):
        weights = torch.tensor(wanted)[batch["labels"]]
        each = nn.functional.cross_entropy(forward(made.model, batch), batch["labels"], reduction="none")
        losses.append(((each * weights).sum().item(), weights.sum().item()))
    assert made.take()["loss"] == pytest.approx(
        sum(loss for loss, _ in losses) / sum(weight for _, weight in losses), abs=1e-5
    )


def test_packed_rows_have_the_loss_and_gradients_of_unpacked_ones(tmp_path: Path):
    one = quiet_training(tmp_path, "llama", "lora", batch_size=64, accumulate=1, out="one")
    data = one.recipe.resolved()["data"] | {"packing": True, "max_length": 32}
    packed = quiet_training(tmp_path, "llama", "lora", batch_size=64, accumulate=1, out="two", data=data)
    assert 1 < len(packed.units) < len(one.units) / 2
    (loss, expected), (again, found) = gradients(one), gradients(packed)
    assert again == pytest.approx(loss, abs=1e-5)
    assert_close(found, expected, 1e-5)


def test_matrices_decay_and_vectors_do_not(tmp_path: Path):
    groups = quiet_training(tmp_path, "llama", "full", weight_decay=0.1).optimizer.param_groups
    assert {(value.dim() > 1, group["weight_decay"]) for group in groups for value in group["params"]} == {
        (True, 0.1),
        (False, 0.0),
    }


def test_the_gradient_is_clipped_to_the_norm_and_the_record_has_the_norm_before(tmp_path: Path):
    free = quiet_training(tmp_path, "llama", "full", out="free", clip=None)
    clipped = quiet_training(tmp_path, "llama", "full", out="clipped", clip=1e-3)
    _, expected = gradients(free)
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in expected.values()))
    for value in free.tuned.values():
        value.grad = None
    kept: dict[str, float] = {}
    inner = clipped.optimizer.step

    def step() -> None:
        kept["norm"] = math.sqrt(
            sum(float(value.grad.double().square().sum()) for value in clipped.tuned.values())
        )
        inner()

    clipped.optimizer.step = step  # type: ignore[method-assign]
    assert clipped.take()["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert kept["norm"] == pytest.approx(1e-3, rel=1e-3)
    assert free.take()["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_last_step_of_an_epoch_takes_the_rows_that_are_left(tmp_path: Path):
    listener = Listener()
    run(settings(tmp_path, batch_size=5, accumulate=2, epochs=2), listener)
    made = training(settings(tmp_path, batch_size=5, accumulate=2, epochs=2, out="other"))
    assert [len(made.rows_of(step)) for step in range(6)] == [10, 10, 4, 10, 10, 4]
    assert [record["epoch"] for record in listener.steps] == pytest.approx(
        [1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2], abs=1e-4
    )
    every = sum(len(example.input_ids) for example in made.units)
    assert listener.steps[2]["tokens"] == every
    assert listener.steps[-1]["tokens"] == 2 * every


# ---------------------------------------------------------------- ways to compute it


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("bart", "adapter"),
        ("t5", "side"),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("bert", "lora"), ("t5", "full"))),
        pytest.param("llama", "lora", marks=pytest.mark.long),
    ],
)
def test_gradient_checkpointing_changes_memory_and_not_the_losses(family: str, method: str, tmp_path: Path):
    config = METHODS[method] | ({"dropout": 0.0} if method != "full" else {})
    write_model(tmp_path / family, family)
    one, other = Listener(), Listener()
    run(settings(tmp_path, family, config, max_steps=3, save_every=50, out="plain"), one)
    run(
        settings(
            tmp_path,
            family,
            config,
            max_steps=3,
            save_every=50,
            out="checkpointed",
            gradient_checkpointing=True,
        ),
        other,
    )
    assert [record["loss"] for record in other.steps] == pytest.approx(
        [record["loss"] for record in one.steps], abs=1e-5
    )


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("bert", "side"),
        ("t5", "full"),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("bart", "lora"), ("t5", "adapter"))),
        ("llama", "lora"),
    ],
)
def test_a_bf16_run_trains_fp32_tensors_beside_bf16_ones_and_can_be_taken_up_again(
    family: str, method: str, tmp_path: Path
):
    recipe = settings(tmp_path, family, method, dtype="bf16", max_steps=4, eval_every=4)
    made = training({**recipe, "out": str(tmp_path / "other")})
    assert {value.dtype for value in made.tuned.values()} == {torch.float32}
    if method != "full":
        frozen = {value.dtype for value in made.model.parameters() if not value.requires_grad}
        assert frozen == {torch.bfloat16}
    finished = run(recipe)
    assert all(math.isfinite(record["loss"]) for record in finished.metrics() if "loss" in record)
    assert all(math.isfinite(value) for value in finished.eval()["tuned"].values())
    assert finished.eval()["tuned"] == pytest.approx(finished.summary["after"], abs=1e-3)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_a_compiled_model_trains_to_the_same_losses(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled: list[nn.Module] = []
    real = nn.Module.compile

    def without_code_generation(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compiled.append(module)
        real(module, *args, backend=backend, **kwargs)

    monkeypatch.setattr(nn.Module, "compile", without_code_generation)
    torch._dynamo.reset()
    write_model(tmp_path / "llama", "llama", num_hidden_layers=1)
    rows = tmp_path / "rows.jsonl"  # of one length and a number that fills every batch: one shape, few graphs
    rows.write_text(
        "".join(
            json.dumps({"text": f"{first} sun {second} sea"}) + "\n"
            for first in WORDS[:3]
            for second in WORDS[:4]
        )
    )
    recipe = settings(
        tmp_path, method={"name": "lora", "r": 2}, max_steps=2, warmup=0, batch_size=2, accumulate=1
    )
    recipe["data"] = {"path": str(rows), "split": 0.34}
    one, other = Listener(), Listener()
    run({**recipe, "out": str(tmp_path / "eager")}, one)
    run({**recipe, "compile": True}, other)
    assert len(compiled) == 1
    assert [record["loss"] for record in other.steps] == pytest.approx(
        [record["loss"] for record in one.steps], abs=1e-5
    )


def test_init_adapter_starts_from_saved_weights(tmp_path: Path):
    first = run(settings(tmp_path, out="first", lr=0.01))
    saved, _ = state_of(newest(first.folder))
    made = training(settings(tmp_path, out="second", init_adapter=str(first.folder / "tuned")))
    assert {name.removeprefix("tuned/") for name in saved if name.startswith("tuned/")} == set(made.tuned)
    for name, value in made.tuned.items():
        assert torch.equal(value.detach(), saved[f"tuned/{name}"]), name
        assert value.requires_grad


# ---------------------------------------------------------------- faults


def spoil_call(
    monkeypatch: pytest.MonkeyPatch, number: int, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Let `spoil` change the logits of the training pass `number` (from 1)."""
    calls = iter(range(1, 10_000))

    def spoiled(model: nn.Module, batch: dict[str, torch.Tensor]) -> Outputs:
        outputs = outputs_of(model, batch)
        if model.training and next(calls) == number:
            outputs.logits = spoil(outputs.logits)
        return outputs

    monkeypatch.setattr(petune.run.objective, "outputs_of", spoiled)


def infinite_gradient(logits: torch.Tensor) -> torch.Tensor:
    logits.register_hook(lambda gradient: gradient * math.inf)
    return logits


SPOILS = {"loss": lambda logits: logits * math.nan, "gradient": infinite_gradient}


@pytest.mark.parametrize("what", SPOILS)
def test_a_non_finite_value_ends_the_run_before_the_update_and_names_step_and_rows(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    straight = run(settings(tmp_path, out="straight", keep=10))
    with monkeypatch.context() as patch:
        spoil_call(patch, 2 * 3 + 2, SPOILS[what])  # the second pass of step 4
        with pytest.raises(TrainingFault) as caught:
            run(settings(tmp_path, keep=10))
    assert caught.value.code == 7
    text = str(caught.value)
    assert text.startswith("step 4  ") and f"the {what} is not finite" in text
    made = training(settings(tmp_path, out="other"))
    rows = [example.where for example in made.rows_of(3)]
    assert all(row.startswith("causal.jsonl:") or "/causal.jsonl:" in row for row in rows)
    assert all(row in text for row in rows)
    # the state before the update is there, verifies, and goes on to what the straight run came to
    last = newest(tmp_path / "run")
    assert last.name == "step-3"
    checkpoint.verify(last)
    expected, _ = state_of(tmp_path / "straight" / "checkpoints" / "step-3")
    assert all(torch.equal(value, expected[name]) for name, value in state_of(last)[0].items())
    run(settings(tmp_path, keep=10), resume=True)
    assert numbers(tmp_path / "run") == numbers(straight.folder)


def test_a_non_finite_evaluation_ends_the_run_and_is_never_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    passes = iter(range(1, 10_000))

    def spoiled(model: nn.Module, batch: dict[str, torch.Tensor]) -> Outputs:
        outputs = outputs_of(model, batch)
        # five an evaluation: the base, step 1, step 2, then NaN
        if not model.training and next(passes) > 3 * 5:
            outputs.logits = outputs.logits * math.nan
        return outputs

    monkeypatch.setattr(petune.run.objective, "outputs_of", spoiled)
    with pytest.raises(TrainingFault, match="not finite") as caught:
        run(settings(tmp_path, eval_every=1))
    assert caught.value.code == 7
    assert (tmp_path / "run" / "best").read_text().split()[0] in ("checkpoints/step-1", "checkpoints/step-2")
    assert newest(tmp_path / "run").name == "step-2"


def test_a_non_finite_loss_leaves_the_weights_in_memory_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spoil_call(monkeypatch, 2, SPOILS["loss"])
    made = quiet_training(tmp_path, "llama", "lora")
    before = {name: value.detach().clone() for name, value in made.tuned.items()}
    with pytest.raises(TrainingFault):
        made.take()
    assert all(torch.equal(value, before[name]) for name, value in made.tuned.items())


def test_a_step_whose_labels_are_all_masked_is_an_error_and_never_a_loss_of_zero(tmp_path: Path):
    made = quiet_training(tmp_path, "llama", "lora")
    made.units = [
        Example(unit.input_ids, [-100] * len(unit.input_ids), unit.where, unit.length) for unit in made.units
    ]
    with pytest.raises(TrainingFault, match="masked") as caught:
        made.take()
    assert caught.value.code == 7
    assert made.progress.step == 0


def test_a_masked_row_among_others_counts_for_nothing(tmp_path: Path):
    made = quiet_training(tmp_path, "llama", "lora", batch_size=1, accumulate=4)
    first = petune.run.step.units_of_step(0, made.steps, 0)[0]
    unit = made.units[first]
    masked = Example(unit.input_ids, [-100] * len(unit.input_ids), unit.where, unit.length)
    made.units = [masked if at == first else other for at, other in enumerate(made.units)]
    other = [batch for batch in made.micro_batches(0) if count(batch)]
    assert len(other) == 3
    expected = sum(float(loss_sum(forward(made.model, batch), batch, "causal")[0]) for batch in other) / sum(
        map(count, other)
    )
    assert made.take()["loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ],
)
def test_out_of_memory_says_in_which_phase_and_what_to_change(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spoil_call(monkeypatch, 3, lambda logits: (_ for _ in ()).throw(error))
    with pytest.raises(MachineError) as caught:
        run(settings(tmp_path, method="full", batch_size=8, accumulate=1))
    assert caught.value.code == 5
    text = str(caught.value)
    assert "out of memory in the forward and backward pass, step 3" in text
    assert str(error) in text
    for way in ("batch_size=4 accumulate=2", "gradient_checkpointing=true", "data.max_length", "method=lora"):
        assert way in text


def test_out_of_memory_suggests_only_what_is_left_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spoil_call(monkeypatch, 1, lambda logits: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(MachineError) as caught:
        run(settings(tmp_path, batch_size=1, accumulate=4, gradient_checkpointing=True))
    text = str(caught.value)
    assert "data.max_length" in text
    assert all(way not in text for way in ("batch_size", "gradient_checkpointing", "method=lora"))


def test_out_of_memory_in_the_optimizer_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))
    )
    with pytest.raises(MachineError, match="optimizer step") as caught:
        run(settings(tmp_path, max_steps=1, warmup=0))
    assert "step 1" in str(caught.value)


def test_out_of_memory_in_an_evaluation_is_said_so_with_its_own_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        petune.run.loop,
        "scored",
        lambda *args, **kwargs: (_ for _ in ()).throw(torch.OutOfMemoryError("no")),
    )
    with pytest.raises(MachineError, match="out of memory in the evaluation") as caught:
        run(settings(tmp_path))
    assert "eval_batch_size=1" in str(caught.value)
    assert "accumulate" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")],
)
def test_out_of_memory_while_loading_is_said_so(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("petune.run.build.tune", lambda *args: (_ for _ in ()).throw(error))
    with pytest.raises(MachineError, match="out of memory") as caught:
        run(settings(tmp_path))
    assert "load" in str(caught.value)


def test_another_runtime_error_is_not_called_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spoil_call(
        monkeypatch,
        1,
        lambda logits: (_ for _ in ()).throw(RuntimeError("mat1 and mat2 shapes cannot be multiplied")),
    )
    with pytest.raises(RuntimeError, match="mat1"):
        run(settings(tmp_path))


def test_a_full_disk_is_found_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = settings(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    listener = Listener()
    with pytest.raises(MachineError, match="not enough disk space") as caught:
        run(recipe, listener)
    assert caught.value.code == 5
    assert "found 0.977 KiB" in str(caught.value)
    assert not listener.steps and not list((tmp_path / "run").glob("checkpoints/*"))


# ---------------------------------------------------------------- evaluation, best, early stop


def script_scores(monkeypatch: pytest.MonkeyPatch, name: str, values: list[float]) -> None:
    """The evaluations of a run, the first on the untouched base, give these values; further ones the last."""
    left = iter(values)

    def scored(*args: Any, **kwargs: Any) -> Scripted:
        return Scripted(**{"loss": 1.0, name: next(left, values[-1])})

    monkeypatch.setattr(petune.run.loop, "scored", scored)


@pytest.mark.parametrize(
    ("family", "metric", "values", "best"),
    [
        # smaller is better; an equal one later is not
        ("llama", "loss", [9.0, 3.0, 2.0, 4.0, 2.0, 5.0, 6.0], 2),
        ("llama", "token_accuracy", [0.0, 0.1, 0.2, 0.4, 0.3, 0.4, 0.1], 3),
        # worse than the base, but the best of those trained
        ("bert", "accuracy", [0.9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 6),
    ],
)
def test_tuned_holds_the_state_with_the_best_value(
    family, metric, values, best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script_scores(monkeypatch, metric, values)
    recipe = settings(tmp_path, family, "adapter", metric=metric, eval_every=1, save_every=3)
    finished = run(recipe)
    assert finished.summary["best_step"] == best
    assert (finished.folder / "best").read_text().splitlines()[0] == f"checkpoints/step-{best}"
    kept, _ = state_of(finished.folder / "checkpoints" / f"step-{best}")
    last, _ = state_of(newest(finished.folder))
    tuned = load_file(finished.folder / "tuned" / "tuned.safetensors")
    assert {f"tuned/{name}" for name in tuned} == {name for name in kept if name.startswith("tuned/")}
    assert all(torch.equal(value, kept[f"tuned/{name}"]) for name, value in tuned.items())
    assert best == 6 or not all(torch.equal(value, last[f"tuned/{name}"]) for name, value in tuned.items())


def test_the_scores_after_are_those_of_the_state_in_tuned(tmp_path: Path):
    finished = run(going_wrong(tmp_path, eval_every=1, save_every=3))
    scored = {record["step"]: record["eval_loss"] for record in finished.metrics() if "eval_loss" in record}
    best = finished.summary["best_step"]
    assert best == 1 and all(scored[step + 1] > scored[step] + 0.01 for step in range(best, 6))
    assert finished.summary["before"]["loss"] == scored[0]
    assert finished.summary["after"]["loss"] == pytest.approx(scored[best], abs=1e-6)
    assert finished.eval()["tuned"]["loss"] == pytest.approx(scored[best], abs=1e-5)


def test_training_stops_when_no_evaluation_was_better_for_as_long_as_patience_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script_scores(monkeypatch, "loss", [9.0, 3.0, 2.0, 2.0, 4.0, 1.0, 1.0])
    listener = Listener()
    finished = run(settings(tmp_path, eval_every=1, patience=2, save_every=50), listener)
    assert len(listener.steps) == 4
    assert finished.summary["best_step"] == 2
    assert newest(finished.folder).name == "step-4"


def test_a_better_evaluation_renews_the_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script_scores(monkeypatch, "loss", [9.0, 3.0, 4.0, 2.0, 4.0, 1.0, 4.0])
    listener = Listener()
    run(settings(tmp_path, eval_every=1, patience=2), listener)
    assert len(listener.steps) == 6


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script_scores(monkeypatch, "loss", [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    finished = run(settings(tmp_path, eval_every=1, save_every=1, keep=2))
    assert {path.name for path in (finished.folder / "checkpoints").glob("step-*")} == {
        "step-1",
        "step-5",
        "step-6",
    }


def test_eval_every_and_save_every_say_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script_scores(monkeypatch, "loss", [1.0, 5.0, 6.0, 7.0])
    listener = Listener()
    finished = run(settings(tmp_path, eval_every=2, save_every=3, keep=9), listener)
    assert [record["step"] for record in listener.scores] == [0, 2, 4, 6]
    # 2 is the best
    assert {path.name for path in (finished.folder / "checkpoints").glob("step-*")} == {
        "step-2",
        "step-3",
        "step-6",
    }


def test_without_either_both_happen_after_each_epoch(tmp_path: Path):
    recipe = settings(tmp_path, epochs=2, keep=9)
    del recipe["save_every"]
    listener = Listener()
    finished = run(recipe, listener)
    assert [record["step"] for record in listener.scores] == [0, 6, 12]
    assert {path.name for path in (finished.folder / "checkpoints").glob("step-*")} == {"step-6", "step-12"}


def test_max_steps_ends_the_run_evaluated_and_saved(tmp_path: Path):
    listener = Listener()
    finished = run(settings(tmp_path, max_steps=4, save_every=50), listener)
    assert [record["step"] for record in listener.steps] == [1, 2, 3, 4]
    assert [record["step"] for record in listener.scores] == [0, 4]
    assert newest(finished.folder).name == "step-4"


def test_a_metric_that_the_task_lacks_is_refused(tmp_path: Path):
    recipe = settings(tmp_path, "bert", metric="perplexity")
    del recipe["task"]  # inferred from the data, so that the recipe alone cannot know
    with pytest.raises(RecipeError, match="perplexity") as caught:
        run(recipe)
    assert "accuracy" in str(caught.value)


def test_the_control_and_the_scores_before_do_not_change_what_is_trained(tmp_path: Path):
    losses = []
    for head_only in (True, False):
        listener = Listener()
        finished = run(
            settings(tmp_path, "bert", "lora", head_only=head_only, out=f"{head_only}", max_steps=3), listener
        )
        losses.append([record["loss"] for record in listener.steps])
        assert (finished.summary["head_only"] is not None) is head_only
    assert losses[0] == losses[1]


# ---------------------------------------------------------------- what a refused run leaves


def change_of(what: str, place: Path) -> dict[str, Any]:
    return {
        "a target that matches nothing": {"method": {"name": "lora", "targets": ["nowhere"]}},
        "a module to train that is not there": {"method": {"name": "lora", "also_train": ["nowhere"]}},
        "a class that the rows lack": {"class_weights": {"purple": 2.0}},
        "a metric of another task": {"metric": "perplexity"},
        "no adapter to start from": {"init_adapter": str(place / "nowhere")},
        "rows that are not there": {"data": str(place / "nowhere.jsonl")},
        "a model that is not there": {"model": str(place / "nowhere")},
        "cuda where there is none": {"device": "cuda"},
    }[what]


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("a target that matches nothing", 2),
        ("a module to train that is not there", 2),
        ("a class that the rows lack", 2),
        ("a metric of another task", 2),
        ("no adapter to start from", 4),
        ("rows that are not there", 3),
        ("a model that is not there", 4),
        ("cuda where there is none", 5),
    ],
)
def test_a_run_refused_before_its_first_step_writes_nothing(
    what: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = settings(tmp_path, "bert", "lora")
    del recipe["task"]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((UsageError, FileError, MachineError, petune.errors.DataError)) as caught:
        run({**recipe, **change_of(what, tmp_path)})
    assert caught.value.code == code
    assert "nowhere" in str(caught.value) or what in (
        "a class that the rows lack",
        "a metric of another task",
        "cuda where there is none",
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_the_last_line_of_a_finished_run_names_commands_that_fit_its_method(tmp_path: Path):
    for method, fits in (("lora", "petune merge"), ("side", "petune.load(")):
        listener = Listener()
        run(settings(tmp_path, method=method, out=method, max_steps=1, warmup=0), listener)
        (last,) = [line for line in listener.closing if line.startswith("next ")]
        assert fits in last and "petune eval" in last


def test_a_run_that_diverged_says_so_wherever_it_is_shown_and_scored(tmp_path: Path):
    listener = Listener()
    # ruins all weights, suits factors
    rate = {"max_steps": 3, "lr": 1.0, "schedule": "constant", "warmup": 0}
    finished = run(settings(tmp_path, method="full", **rate), listener)
    summary = finished.summary
    first, last = summary["loss"]
    assert last > first + 1 and summary["last"]["loss"] > summary["before"]["loss"] + 1, (
        "this run does not show what it should"
    )
    diverged, beaten = summary["warnings"]
    assert (
        diverged.startswith(f"training diverged: loss {first:.4f} -> {last:.4f}, held out")
        and "lower lr (it was 1)" in diverged
    )
    assert beaten.startswith("no better than the untouched base: loss")
    assert listener.closing[-2:] == [f"WARNING  {diverged}", f"WARNING  {beaten}"]
    readme = (finished.folder / "README.md").read_text()
    assert f"**Warning:** {diverged}.\n" in readme and f"**Warning:** {beaten}.\n" in readme
    scored = finished.eval()["warnings"]
    assert [line.partition(":")[0] for line in scored] == [
        line.partition(":")[0] for line in summary["warnings"]
    ]
    good = run(settings(tmp_path, out="good", **rate))
    assert good.summary["warnings"] == [] and "Warning" not in (good.folder / "README.md").read_text()
