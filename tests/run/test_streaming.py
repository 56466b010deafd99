"""Runs whose blocks rest in host memory end as runs whose blocks do not: losses, weights, checkpoints, files;
what cannot be is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import FileError, RecipeError, Stopped, TrainingFault, UsageError
from petune.estimate.forecast import forecast
from petune.kernels.block.module import FusedBlock
from petune.kernels.memory.offloaded_adamw import StreamedAdamW
from petune.methods import wrap
from petune.parallel import ParallelConfig
from petune.parallel.configs import DpConfig
from petune.profiling import profile
from petune.recipe import load_recipe
from petune.run.loop import Loop
from petune.run.step import OptimizerStep
from petune.saving import checkpoint
from tests.fused_runs import assert_alike, recipe, tuned
from tests.small_runs import (
    Listener,
    Scripted,
    assert_same_run,
    loop,
    newest,
    run,
    state_of,
    terminate_at,
    training,
)

pytestmark = pytest.mark.usefixtures("no_picture")
FULL: dict[str, Any] = {"method": "full", "accumulate": 1, "clip": None, "batch_size": 4}
STREAMED: dict[str, Any] = {**FULL, "kernels": "reference", "memory": {"stream": "fp32"}}
BF16: dict[str, Any] = {**STREAMED, "dtype": "bf16", "memory": {"stream": "bf16"}}
MASTERS: dict[str, Any] = {**STREAMED, "dtype": "bf16"}
KINDS = {"fp32": STREAMED, "bf16": BF16, "bf16 with masters": MASTERS}
# a softmax does not see what all of its scores have in common, so its gradient is rounding alone
NOTHING = ("key.bias",)
LAYER = "model.layers.1.mlp.up_proj.weight"


def without_stream(changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in changes.items() if key != "memory"} | {"kernels": "off"}


# ------------------------------------------------------------------ trained as ever


@pytest.mark.crossed(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 5},
        {"weight_decay": 0.1, "schedule": "cosine", "warmup": 2},
        {"gradient_checkpointing": True},
        {"memory": {"stream": "fp32", "keep": "attention", "offload": "attention"}},
    ],
    ids=["", "decay", "recomputed", "offloaded"],
)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_streamed_run_ends_as_one_whose_blocks_stay(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    told, other = Listener(), Listener()
    found = run(recipe(tmp_path, family, "streamed", **{**STREAMED, **changes}), told)
    expected = run(recipe(tmp_path, family, "plain", **without_stream({**STREAMED, **changes})), other)
    assert_alike(found.folder, expected.folder, told, other, but=NOTHING)


def test_a_packed_streamed_run_ends_as_one_whose_blocks_stay(tmp_path: Path) -> None:
    told, other = Listener(), Listener()
    found = run(recipe(tmp_path, "llama", "streamed", **STREAMED, packing=True), told)
    expected = run(recipe(tmp_path, "llama", "plain", **without_stream(STREAMED), packing=True), other)
    assert_alike(found.folder, expected.folder, told, other)


# The comparisons above say nothing if nothing is streamed.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_blocks_of_a_streamed_run_are_fused_and_rest_on_the_host(
    family: str, kind: str, tmp_path: Path
) -> None:
    made = training(recipe(tmp_path, family, "run", **KINDS[kind]))
    optimizer = made.optimizer
    assert isinstance(optimizer, StreamedAdamW) and len(optimizer.blocks) == 2
    made.audit = made.make_audit()
    made.take()
    blocks = [module for module in made.model.modules() if isinstance(module, FusedBlock)]
    assert len(blocks) == 2 and not any(block.spec.said for block in blocks)
    resting = {
        block.host["weight"][entry.span].data_ptr() for block in optimizer.blocks for entry in block.entries
    }
    weights = {value for block in blocks for value in block.parameters()}
    assert {value.data_ptr() for value in weights} == resting
    assert {value.dtype for value in weights} == {torch.float32 if kind == "fp32" else torch.bfloat16}
    dtypes = {
        key: value.dtype for key, value in optimizer.state[next(iter(weights))].items() if key != "step"
    }
    wide = torch.bfloat16 if kind == "bf16" else torch.float32
    assert dtypes == {"exp_avg": wide, "exp_avg_sq": wide} | (
        {"master": torch.float32} if kind == "bf16 with masters" else {}
    )
    assert all(value.grad is None for value in made.tuned.values())


@pytest.mark.parametrize("kind", ["bf16", pytest.param("bf16 with masters", marks=pytest.mark.long)])
def test_weights_in_bfloat16_learn_as_those_in_float32(kind: str, tmp_path: Path) -> None:
    told, other = Listener(), Listener()
    longer = {"max_steps": 40, "epochs": 10, "save_every": 40, "eval_every": 40, "lr": 3e-3}
    run(recipe(tmp_path, "llama", "narrow", **{**KINDS[kind], **longer}), told)
    run(recipe(tmp_path, "llama", "wide", **{**without_stream(STREAMED), **longer}), other)
    found, expected = ([record["loss"] for record in one.steps] for one in (told, other))
    assert sum(expected[-5:]) < 0.8 * sum(expected[:5])
    assert found == pytest.approx(expected, rel=0.03)


def test_steps_too_small_for_bfloat16_are_no_fault(tmp_path: Path) -> None:
    for kind in ("bf16", "bf16 with masters"):
        listener = Listener()
        run(
            recipe(tmp_path, "llama", kind.replace(" ", "-"), **{**KINDS[kind], "lr": 1e-7, "max_steps": 4}),
            listener,
        )
        assert len(listener.steps) == 4  # the audit would have ended it after three


# ------------------------------------------------------------------ kept and taken up again


@pytest.mark.crossed(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_stopped_streamed_run_goes_on_bit_by_bit(family: str, kind: str, tmp_path: Path) -> None:
    straight = run(recipe(tmp_path, family, "straight", **KINDS[kind]))
    stopped = recipe(tmp_path, family, "stopped", **KINDS[kind])
    with pytest.raises(Stopped):
        run(stopped, terminate_at(1))
    assert_same_run(run(stopped, resume=True).folder, straight.folder)


def test_a_checkpoint_holds_weights_states_masters_and_the_step(tmp_path: Path) -> None:
    found = run(recipe(tmp_path, "llama", "run", **MASTERS))
    tensors, facts = state_of(newest(found.folder))
    assert facts["optimizer"]["class"] == "StreamedAdamW"
    assert tensors[f"tuned/{LAYER}"].dtype is torch.bfloat16
    master = tensors[f"optimizer/master/{LAYER}"]
    assert torch.equal(master.bfloat16(), tensors[f"tuned/{LAYER}"]) and not torch.equal(
        master, tensors[f"tuned/{LAYER}"].float()
    )
    assert float(tensors[f"optimizer/step/{LAYER}"]) == 3 and tensors[f"optimizer/exp_avg/{LAYER}"].any()
    assert tensors[f"optimizer/exp_avg_sq/{LAYER}"].dtype is torch.float32


def test_the_room_for_checkpoints_counts_what_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(checkpoint, "require_free", lambda path, size: asked.append(size))
    number = 0
    for name, kind in KINDS.items():
        number = sum(
            value.numel()
            for value in loop(recipe(tmp_path, "llama", name.replace(" ", "-"), **kind)).step.tuned.values()
        )
    found = [size / number for size in asked]
    assert found == pytest.approx([4 * 12 + 4, 4 * 6 + 2, 4 * 14 + 2], rel=0.02)  # and a little for the steps


def test_the_best_checkpoint_is_gone_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = Loop.score
    monkeypatch.setattr(
        Loop,
        "score",
        lambda self: Scripted(**(score(self).result() | {"loss": 1.0 + abs(self.progress.step - 2)})),
    )
    found = run(recipe(tmp_path, "llama", "run", **BF16, eval_every=1))
    best = found.summary["best_step"]
    assert best == 2
    saved = state_of(found.folder / "checkpoints" / f"step-{best}")[0]
    ours = found.speaker.model.state_dict()
    assert all(
        torch.equal(ours[name.removeprefix("tuned/")], value)
        for name, value in saved.items()
        if name.startswith("tuned/")
    )
    assert not torch.equal(saved[f"tuned/{LAYER}"], tuned(found.folder)[f"tuned/{LAYER}"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_streamed_run_is_scored_asked_and_merged(kind: str, tmp_path: Path) -> None:
    for family, prompt in (("llama", "red sun"), ("bert", "red sun")):
        found = run(recipe(tmp_path, family, f"{family}-run", **KINDS[kind]))
        scores = found.eval()
        assert (
            scores["tuned"] == pytest.approx(found.summary["after"], rel=1e-2)
            and scores["base"] == found.summary["before"]
        )
        assert isinstance(found.generate(prompt, **({"max_new_tokens": 2} if family == "llama" else {})), str)
        assert (found.merge() / "model.safetensors").is_file()


def test_streaming_cannot_be_begun_or_given_up_within_a_run(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(recipe(tmp_path, "llama", "run", **STREAMED), terminate_at(1))
    plain = recipe(tmp_path, "llama", "run", **without_stream(STREAMED))
    with pytest.raises(RecipeError, match=r"memory\.stream has changed"):
        run(plain, resume=True)
    with pytest.raises(FileError, match="another optimizer"):
        run(plain, resume=True, allow_change=["memory.stream"])


# ------------------------------------------------------------------ faults


def weights_of(made: OptimizerStep) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in made.model.state_dict().items()}


def test_a_loss_that_is_not_finite_updates_nothing(tmp_path: Path) -> None:
    made = training(recipe(tmp_path, "llama", "run", **STREAMED))
    made.audit = made.make_audit()
    made.take()
    with torch.no_grad():
        made.tuned["model.norm.weight"].fill_(math.inf)
    before = weights_of(made)
    with pytest.raises(TrainingFault, match="the loss is not finite; the update was not made") as caught:
        made.take()
    assert "gradient norm nan" in str(caught.value)  # and not that of the step before
    after = weights_of(made)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_gradient_that_is_not_finite_is_told_with_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, settings = StreamedAdamW._step, recipe(tmp_path, "llama", "run", **STREAMED, save_every=1)

    def spoilt(self: StreamedAdamW, entry: Any, tensors: Any, grad: Tensor) -> None:
        step(self, entry, tensors, torch.full_like(grad, math.inf) if self.steps == 1 else grad)

    with (
        monkeypatch.context() as patch,
        pytest.raises(TrainingFault, match="its update was made inside the backward pass") as caught,
    ):
        patch.setattr(StreamedAdamW, "_step", spoilt)
        run(settings)
    assert "step 2" in str(caught.value) and "the gradient is not finite" in str(caught.value)
    assert newest(Path(settings["out"])).name == "step-1"
    straight = run(recipe(tmp_path, "llama", "straight", **STREAMED, save_every=1))
    assert_same_run(run(settings, resume=True).folder, straight.folder)


def test_a_streamed_tensor_that_gets_no_gradient_or_does_not_move_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = StreamedAdamW._step
    monkeypatch.setattr(
        StreamedAdamW,
        "_step",
        lambda self, entry, *rest: None if entry.name == LAYER else step(self, entry, *rest),
    )
    with pytest.raises(TrainingFault, match="no gradient in 2 updates") as caught:
        run(recipe(tmp_path, "llama", "idle", **STREAMED))
    assert [problem.where for problem in caught.value.problems] == [LAYER]

    def unmoved(self: StreamedAdamW, entry: Any, tensors: Any, grad: Tensor) -> None:
        before = {key: value.clone() for key, value in tensors.items()}
        step(self, entry, tensors, grad)
        if entry.name == LAYER:
            for key, value in before.items():
                tensors[key].copy_(value)

    monkeypatch.setattr(StreamedAdamW, "_step", unmoved)
    for kind in KINDS:
        with pytest.raises(TrainingFault, match="has not moved in 3 updates") as caught:
            run(recipe(tmp_path, "llama", f"still-{kind}".replace(" ", "-"), **KINDS[kind]))
        assert caught.value.problems[0].where == LAYER


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("changes", "key", "remedy"),
    [
        (
            {"method": "lora"},
            "method: memory.stream is for blocks whose weights all train",
            "set method: full",
        ),
        ({"parallel": "dp"}, "parallel: memory.stream is for one process", "set parallel: none"),
        ({"accumulate": 2}, "accumulate: memory.stream uses each gradient up", "set accumulate: 1"),
        ({"clip": 1.0}, "clip: memory.stream uses gradients up", "set clip: null"),
        ({"kernels": "off"}, "memory: it is about fused blocks", "set kernels: auto"),
        (
            {"compile": True, "kernels": "auto"},
            "memory: fused blocks do not go with compile",
            "set compile: false",
        ),
        (
            {"dtype": "fp32", "memory": {"stream": "bf16"}},
            "dtype: memory.stream: bf16 keeps weights in bf16",
            "set dtype: bf16",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_recipe_that_cannot_be_streamed_is_refused(
    changes: dict[str, Any], key: str, remedy: str, tmp_path: Path
) -> None:
    load_recipe(recipe(tmp_path, "llama", "run", **STREAMED))
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe(tmp_path, "llama", "run", **{**STREAMED, **changes}))
    (problem,) = caught.value.problems
    assert key in problem.what and remedy in str(problem.remedy)


def test_all_that_stands_in_the_way_is_told_at_once() -> None:
    needed = {"model": "m", "data": "d", "method": "lora"}
    with pytest.raises(RecipeError) as caught:
        load_recipe(
            {**needed, "memory": {"stream": "bf16"}, "accumulate": 2, "kernels": "off", "dtype": "fp32"}
        )
    found = sorted(problem.what.partition(":")[0] for problem in caught.value.problems)
    assert found == ["accumulate", "clip", "dtype", "memory", "method"]


def refused(place: Path, family: str = "llama", **changes: Any) -> UsageError:
    """What a run is told, which has written nothing."""
    with pytest.raises(UsageError) as caught:
        run(recipe(place, family, "run", **{**STREAMED, **changes}))
    assert not (place / "run").exists()
    return caught.value


def test_a_machine_that_cannot_is_told_all_reasons_before_a_weight_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.run.build.load_base", lambda *args: pytest.fail("weights were loaded"))
    found = refused(tmp_path, kernels="auto", memory={"stream": "bf16"})
    assert [problem.what for problem in found.problems] == [
        "memory.stream: bf16 keeps weights in bf16",
        "memory.stream needs fused blocks",
    ]
    assert (
        "set dtype: bf16" in str(found)
        and "a CUDA device" in str(found)
        and "kernels: reference" in str(found)
    )


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_model_without_fused_blocks_is_refused(family: str, tmp_path: Path) -> None:
    assert "can be fused, as streamed ones must be" in str(refused(tmp_path, family))


def test_blocks_that_would_run_unfused_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedBlock, "unready", lambda block, device: "they were told to")
    found = refused(tmp_path, "llama")
    assert "would run unfused" in str(found) and "they were told to" in str(found)


def test_streaming_is_not_a_setting_of_wrap(tmp_path: Path) -> None:
    model = training(recipe(tmp_path, "llama", "run", **without_stream(STREAMED))).model
    with pytest.raises(UsageError, match="StreamedAdamW"):
        wrap(model, "full", memory={"stream": "bf16"})


def test_phases_of_a_streamed_step_are_not_profiled(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be told apart"):
        profile(load_recipe(recipe(tmp_path, "llama", "run", **STREAMED)))


def test_no_forecast_is_made_for_several_processes(tmp_path: Path) -> None:
    streams = load_recipe(recipe(tmp_path, "llama", "run", **STREAMED))
    with pytest.raises(UsageError, match="one process"):
        forecast(streams, 2, parallel=ParallelConfig(dp=DpConfig(2)))
