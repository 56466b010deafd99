"""The audit finds what trains nothing and what moves that should not, names it, and leaves honest runs
alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import petune.run.objective
import petune.run.step
from petune.errors import FileError, TrainingFault
from petune.parallel import Outputs
from petune.run.audit import Audit
from petune.run.build import Prepared, build
from petune.run.evaluate import outputs_of
from petune.run.loop import Loop
from tests.small_runs import METHODS, TASK, WORDS, Listener, loop, newest, run, settings, training

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", TASK)
def test_an_honest_run_passes_for_every_family_and_method(family: str, method: str, tmp_path: Path):
    listener = Listener()
    run(settings(tmp_path, family, method, max_steps=4, save_every=2), listener)
    assert len(listener.steps) == 4


def caught_model(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module], None] = lambda model: None
) -> list[nn.Module]:
    """Where the model of the next run will be found; `change` is done to it before the run sees it."""
    models: list[nn.Module] = []

    def keep(prepared: Prepared) -> nn.Module:
        models.append(build(prepared))
        change(models[0])
        return models[0]

    monkeypatch.setattr(petune.run.step, "build", keep)
    return models


def test_a_tuned_tensor_that_no_forward_pass_reaches_is_named_after_two_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def disconnect(model: nn.Module) -> None:
        layer = model.get_submodule("model.layers.1.mlp.up_proj")
        layer.update = lambda x: torch.zeros(())  # type: ignore[assignment, method-assign]

    caught_model(monkeypatch, disconnect)
    listener = Listener()
    with pytest.raises(TrainingFault) as caught:
        run(settings(tmp_path), listener)
    assert caught.value.code == 7
    assert [problem.where for problem in caught.value.problems] == [
        f"model.layers.1.mlp.up_proj.lora_{part}" for part in "AB"
    ]
    assert "no gradient" in str(caught.value)
    assert len(listener.steps) == 1  # the second update was not made


def test_a_tuned_tensor_that_never_moves_is_named_after_three_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
def test_a_frozen_tensor_moved_behind_the_loops_back_is_named_and_nothing_is_saved(
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


def test_rows_of_tokens_that_come_late_or_never_end_no_run(tmp_path: Path):
    lora = {"name": "lora", "r": 2, "token_rows": [6]}  # a word of chats alone
    found = run(settings(tmp_path, method=lora, max_steps=4, save_every=50))
    assert [record["step"] for record in found.history if "loss" in record][-1] == 4


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
    assert [problem.where for problem in caught.value.problems] == [
        f"layer.{index:02}" for index in range(10)
    ]


def test_a_checkpoint_with_a_checksum_of_another_version_is_not_compared_and_says_so(tmp_path: Path):
    resumed = loop(settings(tmp_path))
    resumed.saver._refuse_foreign(resumed_facts := facts_of(resumed), tmp_path, ())
    with pytest.raises(FileError, match="the base model is another one"):
        resumed.saver._refuse_foreign(resumed_facts | {"frozen": "2:0123456789abcdef"}, tmp_path, ())
    assert not resumed.reporter.log.exists()
    resumed.saver._refuse_foreign(resumed_facts | {"frozen": "0123456789abcdef"}, tmp_path, ())
    assert "NOT COMPARED WITH THE BASE" in resumed.reporter.log.read_text()


def facts_of(made: Loop) -> dict[str, Any]:
    """What a checkpoint of a loop would say of itself."""
    made.step.audit = made.step.make_audit()
    return made.saver._facts()


def test_labels_never_reach_the_models_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models = caught_model(monkeypatch)
    seen: list[set[str]] = []

    def watch(model: nn.Module, batch: dict[str, torch.Tensor]) -> Outputs:
        handle = model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(set(kwargs)), with_kwargs=True
        )
        try:
            return outputs_of(model, batch)
        finally:
            handle.remove()

    monkeypatch.setattr(petune.run.objective, "outputs_of", watch)
    run(settings(tmp_path, "t5", max_steps=1, warmup=0))
    assert models and seen and all("labels" not in names for names in seen)


def test_a_step_too_small_for_a_norm_in_a_warm_up_ends_no_run(tmp_path: Path):
    made = training(settings(tmp_path, "llama", "full", lr=1e-5, warmup=3000))
    made.audit = made.make_audit()
    for _ in range(4):
        made.take()
    assert made.audit.still  # norms of ones


def test_what_stands_still_in_a_warm_up_is_named_when_the_rate_is_large():
    tuned = two()
    audit = Audit(tuned, {})
    for share in (0.02, 0.05, 0.08, 0.1, 0.7):
        tuned["a"].data += 1
        audit.after_update(share)
    with pytest.raises(TrainingFault) as caught:
        audit.after_update(0.3)
    assert caught.value.problems[0].where == "b"


def test_a_bias_of_keys_that_rounding_alone_would_move_is_no_fault():
    tuned = {
        "layer.0.key.bias": nn.Parameter(torch.ones(3)),
        "layer.0.query.bias": nn.Parameter(torch.ones(3)),
    }
    audit = Audit(tuned, {})
    for _ in range(4):
        tuned["layer.0.query.bias"].data += 1
        audit.after_update()


def test_updates_of_texts_too_short_for_attention_do_not_count():
    tuned = two()
    audit = Audit(tuned, {})
    tuned["a"].grad, tuned["b"].grad = torch.ones(3), torch.zeros(3)  # b: a query, whose text is one token
    for longest in (1, 1, 2, 3, 1):
        audit.after_backward([torch.ones(2, longest)])
        tuned["a"].data += 1
        audit.after_update()
    with pytest.raises(TrainingFault, match="b  has had no gradient"):
        audit.after_backward()


def test_a_run_of_texts_of_one_word_is_not_ended(tmp_path: Path):
    rows = tmp_path / "words.jsonl"
    rows.write_text("".join(f'{{"text": "{word}"}}\n' for word in WORDS))
    found = run(settings(tmp_path, data={"path": str(rows)}, max_steps=4, save_every=50))
    assert [record["step"] for record in found.history if "loss" in record][-1] == 4
