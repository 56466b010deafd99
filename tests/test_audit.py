"""The audit finds what trains nothing and what moves that should not, names it, and leaves honest runs alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import petune.assemble
import petune.training
from petune.assemble import Prepared, build
from petune.audit import Audit, checksum
from petune.errors import TrainingFault
from petune.evaluate import forward
from tests.small_runs import METHODS, TASK, Listener, newest, run, settings
from tests.small_runs import no_picture as no_picture

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", TASK)
def test_an_honest_run_passes_for_every_family_and_method(family: str, method: str, tmp_path: Path):
    listener = Listener()
    run(settings(tmp_path, family, method, max_steps=4, save_every=2), listener)
    assert len(listener.steps) == 4


def caught_model(monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], None] = lambda model: None) -> list[nn.Module]:
    """Where the model of the next run will be found; `change` is done to it before the run sees it."""
    models: list[nn.Module] = []

    def keep(prepared: Prepared) -> nn.Module:
        models.append(build(prepared))
        change(models[0])
        return models[0]

    monkeypatch.setattr(petune.training, "build", keep)
    return models


def test_a_tuned_tensor_that_the_forward_pass_never_reaches_is_named_after_two_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def disconnect(model: nn.Module) -> None:
        layer = model.get_submodule("model.layers.1.mlp.up_proj")
        layer.update = lambda x: torch.zeros(())  # type: ignore[assignment, method-assign]

    caught_model(monkeypatch, disconnect)
    listener = Listener()
    with pytest.raises(TrainingFault) as caught:
        run(settings(tmp_path), listener)
    assert caught.value.code == 7
    assert [problem.where for problem in caught.value.problems] == [f"model.layers.1.mlp.up_proj.lora_{part}" for part in "AB"]
    assert "no gradient" in str(caught.value)
    assert len(listener.steps) == 1  # the second update was not made


def test_a_tuned_tensor_that_never_moves_is_named_after_three_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models = caught_model(monkeypatch)
    name = "model.layers.0.self_attn.q_proj.lora_A"
    step = torch.optim.AdamW.step

    def step_but_one(optimizer: torch.optim.AdamW, *args: Any) -> None:
        parameter = models[0].get_parameter(name)
        before = parameter.detach().clone()
        step(optimizer, *args)
        with torch.no_grad():
            parameter.copy_(before)

    monkeypatch.setattr(torch.optim.AdamW, "step", step_but_one)
    listener = Listener()
    with pytest.raises(TrainingFault) as caught:
        run(settings(tmp_path), listener)
    assert caught.value.problems[0].where == name
    assert "has not moved in 3 updates" in str(caught.value)
    assert len(listener.steps) == 2


@pytest.mark.parametrize("method", ["lora", "adapter", "side"])
def test_a_frozen_tensor_that_is_moved_behind_the_loops_back_is_named_and_nothing_is_saved(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    models = caught_model(monkeypatch)

    def nudge(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                models[0].get_parameter("model.embed_tokens.weight")[3, 5] += 1e-7

    with pytest.raises(TrainingFault) as caught:
        run(settings(tmp_path, method=method), Listener(nudge))
    assert caught.value.code == 7
    assert [problem.where for problem in caught.value.problems] == ["model.embed_tokens.weight"]
    assert "frozen" in str(caught.value)
    assert newest(tmp_path / "run").name == "step-2"


def test_a_frozen_buffer_that_drifts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models = caught_model(monkeypatch)

    def drift(step: int) -> None:
        models[0].get_buffer("final_logits_bias").add_(0.1)

    with pytest.raises(TrainingFault, match="final_logits_bias"):
        run(settings(tmp_path, "bart"), Listener(drift))


# ---------------------------------------------------------------- the audit by itself


def two() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(3)) for name in ("a", "b")}


def test_a_gradient_may_be_missing_once_but_not_twice():
    tuned = two()
    audit = Audit(tuned, {})
    tuned["a"].grad, tuned["b"].grad = torch.ones(3), torch.zeros(3)
    audit.after_backward()
    tuned["a"].data += 1
    audit.after_update()
    with pytest.raises(TrainingFault) as caught:
        audit.after_backward()
    assert [problem.where for problem in caught.value.problems] == ["b"]


def test_a_gradient_in_either_of_two_updates_is_enough():
    tuned = two()
    audit = Audit(tuned, {})
    for name in ("a", "b"):
        tuned["a"].grad = tuned["b"].grad = None
        tuned[name].grad = torch.tensor([0.0, 0.0, 1.0])
        audit.after_backward()
        audit.after_update()


def test_every_fault_is_named_up_to_ten():
    tuned = {f"layer.{index:02}": nn.Parameter(torch.ones(2)) for index in range(30)}
    audit = Audit(tuned, {})
    audit.after_backward()
    audit.after_update()
    with pytest.raises(TrainingFault) as caught:
        audit.after_backward()
    assert [problem.where for problem in caught.value.problems] == [f"layer.{index:02}" for index in range(10)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_any_changed_element_changes_the_checksum(dtype: torch.dtype):
    value = torch.arange(60).remainder(2).reshape(5, 12).to(dtype)
    before = checksum(value)
    assert checksum(value.clone()) == before
    for index in range(60):
        other = value.clone()
        other.view(-1)[index] = 1 - other.view(-1)[index].int()
        assert checksum(other) != before, index


def test_the_checksum_sees_signs_of_zero_and_exchanged_elements_and_works_on_views():
    value = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    exchanged = value.clone()
    exchanged[0, 0], exchanged[6, 4] = value[6, 4], value[0, 0]
    assert checksum(value) != checksum(exchanged)
    assert checksum(torch.zeros(3)) != checksum(torch.tensor([0.0, -0.0, 0.0]))
    assert checksum(value.T) == checksum(value.T.contiguous()) != checksum(value)
    assert isinstance(checksum(torch.empty(0)), int)
    assert isinstance(checksum(torch.tensor(3.5)), int)


def test_the_checksum_covers_tensors_longer_than_its_chunks():
    value = torch.zeros(2**20 + 7)
    before = checksum(value)
    value[-1] = 1
    assert checksum(value) != before


def test_labels_never_reach_the_models_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models = caught_model(monkeypatch)
    seen: list[set[str]] = []

    def watch(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        handle = model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(set(kwargs)), with_kwargs=True)
        try:
            return forward(model, batch)
        finally:
            handle.remove()

    monkeypatch.setattr(petune.assemble, "forward", watch)
    run(settings(tmp_path, "t5", max_steps=1, warmup=0))
    assert models and seen and all("labels" not in names for names in seen)
