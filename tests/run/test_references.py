"""Runs on preferences: their step against the paper in float64, against TRL, against other plans, and what is
refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from petune.errors import PetuneError, RecipeError, UsageError
from petune.methods import tuned_parameters, without_tuning
from petune.recipe import load_recipe
from petune.run.finished import load_run
from petune.run.step import OptimizerStep
from petune.tasks import Example
from tests.group_pool import assert_same_but_for_rounding, ranks
from tests.small_runs import assert_same_run, loop, run, settings, terminate_at, training, write_model

pytestmark = pytest.mark.usefixtures("no_picture")
PLANS: dict[str, Any] = {
    "dp": {"dp": {"shares": [3, 1]}},
    "dp sharded": {"dp": {"size": 2, "shard": True}},
    "tp": {"tp": 2},
    "tp, vocabulary cut": {"tp": {"size": 2, "vocabulary": True}},
    "sp": {"sp": 2},
    "pp": {"pp": {"size": 2, "microbatches": 3, "schedule": "gpipe"}},
}


def preferring(place: Path, method: Any = "lora", **changes: Any) -> dict[str, Any]:
    """A recipe of preferences in six steps of four pairs."""
    return settings(place, "llama", method, task="prefer", **{"warmup": 0, **changes})


def stirred(step: OptimizerStep) -> OptimizerStep:
    """The step with a tuning that is no longer at its start, and its references."""
    torch.manual_seed(3)
    with torch.no_grad():
        for value in step.tuned.values():
            value.add_(0.1 * torch.randn_like(value))
    step.refer()
    return step


def log_p(model: nn.Module, example: Example) -> Tensor:
    """log p of the trained tokens of one text by itself, summed in float64, without padding."""
    assert isinstance(example.labels, list)
    logits = model(input_ids=torch.tensor([example.input_ids])).logits[0].double().log_softmax(-1)
    places = [at for at, label in enumerate(example.labels) if label >= 0]
    return sum((logits[at - 1, example.labels[at]] for at in places), torch.zeros((), dtype=torch.float64))


def assert_close(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor]) -> None:
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        grad = found[name]
        assert grad is not None
        assert float((grad.double() - value).abs().max()) <= 1e-5 * largest, name


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", ["lora", "adapter", "side"])
@pytest.mark.parametrize("kernels", ["off", "reference"])
def test_a_step_has_the_loss_and_gradient_of_the_paper(method: str, kernels: str, tmp_path: Path) -> None:
    write_model(tmp_path / "llama", "llama")
    tuned: dict[str, Any] = {"lora": {"r": 2}, "adapter": {"reduction": 8}, "side": {"reduction": 4}}[method]
    kernels = "off" if method == "side" else kernels
    step = stirred(training(preferring(tmp_path, {"name": method, **tuned}, kernels=kernels, clip=None)))
    loss = step.passes(step.micro_batches(0), 0)
    own = {name: value.grad for name, value in step.tuned.items()}

    plain = training(preferring(tmp_path, {"name": method, **tuned}, kernels="off"))
    model = plain.model.double().eval()
    with torch.no_grad():
        for name, value in tuned_parameters(model).items():
            value.copy_(step.tuned[name])
    losses = []
    for example in plain.rows_of(0):
        chosen, rejected = (log_p(model, text) for text in example.texts)
        with torch.no_grad(), without_tuning(model):
            known = [log_p(model, text) for text in example.texts]
        losses.append(-logsigmoid(0.1 * ((chosen - known[0]) - (rejected - known[1]))))
    expected = torch.stack(losses).mean()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-6)
    tuned_now = tuned_parameters(model)
    grads = torch.autograd.grad(expected, list(tuned_now.values()))
    assert_close(own, dict(zip(tuned_now, grads, strict=True)))


def test_references_are_those_of_the_untouched_base_and_only_of_rows_that_come(tmp_path: Path) -> None:
    step = stirred(training(preferring(tmp_path, max_steps=2)))
    used = [unit for unit in step.units if unit.reference is not None]
    assert len(used) == 8 and all(unit.reference is not None for unit in step.held_out)
    model = step.model.eval()
    for unit in used:
        assert unit.reference is not None
        with torch.no_grad(), without_tuning(model):
            expected = [float(log_p(model, text)) for text in unit.texts]
        assert unit.reference == pytest.approx(expected, rel=1e-5)
        with torch.no_grad():
            assert [float(log_p(model, text)) for text in unit.texts] != pytest.approx(expected, rel=1e-5)


def test_held_out_rows_are_asked_padded_as_they_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, asked = training(preferring(tmp_path, batch_size=10, accumulate=1)), list[torch.Size]()
    answer = step.runner.logits

    def noted(batch: Any, *others: Any) -> Any:
        asked.append(batch["input_ids"].shape)
        return answer(batch, *others)

    monkeypatch.setattr(step.runner, "logits", noted)
    step.refer()
    scored = [one["input_ids"].shape for one in step.batches(step.held_out, 10) if one is not None]
    assert asked[-len(scored) :] == scored and len(asked) == 4


def test_there_is_no_second_copy_of_weights(tmp_path: Path) -> None:
    held = [
        {value.data_ptr() for value in training(recipe).model.parameters()}
        for recipe in (preferring(tmp_path), settings(tmp_path, "llama", "lora", task="causal"))
    ]
    assert len(held[0]) == len(held[1])


@pytest.mark.parametrize("loss", ["dpo", pytest.param("ipo", marks=pytest.mark.long), "orpo"])
def test_a_run_learns_what_is_preferred_and_is_scored_alike_again(loss: str, tmp_path: Path) -> None:
    shape = {"batch_size": 4, "accumulate": 1, "save_every": 50, "eval_every": 50}
    done = run(
        preferring(tmp_path, prefer=loss, lr=1e-2, epochs={"dpo": 6, "ipo": 6, "orpo": 3}[loss], **shape)
    )
    before, after = done.summary["before"], done.summary["after"]
    assert after["loss"] < before["loss"] and after["accuracy"] > before["accuracy"]
    if loss == "dpo":
        assert after["accuracy"] > 0.9 and after["margin"] > 0
        assert before == pytest.approx({"loss": 0.693147, "accuracy": 0, "margin": 0}, abs=1e-5)
    again = load_run(tmp_path / "run").eval()
    assert again["tuned"] == pytest.approx(after, abs=1e-5)
    assert isinstance(done.generate("red sun"), str)


def test_a_run_that_is_stopped_and_resumed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    shape = {"max_steps": 2, "save_every": 50}
    run(preferring(tmp_path, out="whole", **shape))
    recipe = preferring(tmp_path, out="parts", **shape)
    with pytest.raises(PetuneError):
        run(recipe, terminate_at(1))
    run(recipe, resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_orpo_trains_every_weight(tmp_path: Path) -> None:
    done = run(preferring(tmp_path, "full", prefer="orpo", max_steps=2))
    assert done.summary["steps"] == 2


def train_in_group(recipe: Mapping[str, Any]) -> None:
    run(recipe)


def go_on_in_group(recipe: Mapping[str, Any]) -> None:
    run(recipe, resume=True)


def short(place: Path, loss: str, **changes: Any) -> dict[str, Any]:
    """Two steps of four pairs, dropout in the model; dpo with logits, ipo without."""
    shape = {"max_steps": 2, "batch_size": 4, "accumulate": 1, "save_every": 50}
    shape["kernels"] = {"dpo": "off", "ipo": "reference"}[loss]
    return preferring(place, {"name": "lora", "r": 2}, prefer=loss, **shape, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of a loss in one process, trained when it is first asked for."""
    return cache(lambda loss: run(short(tmp_path_factory.mktemp(loss), loss)).folder)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("loss", ["dpo", "ipo"])
@pytest.mark.parametrize(  # tp without its vocabulary cut is also under biases, below
    "plan", [pytest.param(plan, marks=pytest.mark.long if plan == "tp" else ()) for plan in PLANS]
)
def test_a_plan_trains_as_one_process_does(
    plan: str, loss: str, tmp_path: Path, alone: Callable[[str], Path]
) -> None:
    recipe = short(tmp_path, loss, parallel=PLANS[plan])
    ranks(2, train_in_group, recipe)
    assert_same_but_for_rounding(tmp_path / "run", alone(loss))


@pytest.mark.parametrize("plan", ["tp", pytest.param("dp sharded", marks=pytest.mark.long)])
def test_biases_are_those_of_the_base_when_a_run_that_goes_on_under_a_plan_asks_it(
    plan: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "llama", "llama", attention_bias=True, mlp_bias=True, dropout=0.1)
    method = {"name": "lora", "r": 2, "bias": "all"}
    recipe = preferring(tmp_path, method, prefer="dpo", batch_size=4, accumulate=1, max_steps=2, lr=0.01)
    run(recipe | {"out": str(tmp_path / "whole")})
    with pytest.raises(PetuneError):
        run(recipe, terminate_at(1))
    ranks(2, go_on_in_group, recipe | {"parallel": PLANS[plan]})
    assert_same_but_for_rounding(tmp_path / "run", tmp_path / "whole")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "full"}, "full fine-tuning overwrites the model that dpo, ipo and kto compare with"),
        ({"method": "lora", "prefer": {"loss": "ipo", "label_smoothing": 0.1}}, "only dpo has it"),
        ({"method": "lora", "task": "causal", "prefer": "ipo"}, "it belongs to task: prefer"),
        ({"method": "lora", "prefer": "sigmoid"}, "prefer.loss does not take this value"),
        ({"method": "lora", "prefer": {"beta": 0.0}}, "prefer.beta is out of range"),
        ({"method": "lora", "data": {"path": "x", "packing": True}}, "packing joins examples of causal"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(preferring(tmp_path, "lora") | changes)


def test_a_reference_that_would_be_lost_is_refused_where_the_task_is_inferred(tmp_path: Path) -> None:
    recipe = preferring(tmp_path, "full")
    del recipe["task"]
    with pytest.raises(UsageError, match="which full fine-tuning overwrites"):
        training(recipe)
    also = preferring(tmp_path, {"name": "lora", "r": 2, "also_train": ["lm_head"]})
    with pytest.raises(UsageError, match="lm_head is trained whole"):
        training(also)
    run(preferring(tmp_path, max_steps=1, out="first"))
    begun = preferring(tmp_path, init_adapter=str(tmp_path / "first" / "tuned"), out="second")
    with pytest.raises(UsageError, match="init_adapter is not part of its base"):
        loop(begun)


# ---------------------------------------------------------------- good and bad answers

JUDGING: dict[str, Any] = {"dp": {"dp": {"shares": [3, 1]}}, "tp": {"tp": {"size": 2, "vocabulary": True}}}


def judging(place: Path, out: str = "run", **changes: Any) -> dict[str, Any]:
    """Three steps of four rows; good answers say "one", bad ones "dog"."""
    shape: dict[str, Any] = {"warmup": 0, "batch_size": 4, "accumulate": 1, "save_every": 50, "lr": 1e-2}
    made = settings(place, "llama", {"name": "lora", "r": 2}, task="prefer", prefer="kto", **shape)
    path = place / "judged.jsonl"
    words = ("red", "blue", "green", "two", "three", "fox", "moon", "star")
    rows = [
        {
            "prompt": f"{words[at % 8]} {words[at // 8]}",
            "completion": ("one", "dog")[bad] + f" {words[at % 5]}",
        }
        | {"label": not bad}
        for at in range(48)
        for bad in [at % 3 == 0]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made | {"data": {"path": str(path), "max_length": 32}, "out": str(place / out)} | changes


def test_a_run_learns_what_is_good_and_is_scored_alike_again(tmp_path: Path) -> None:
    done = run(judging(tmp_path, epochs=2))
    before, after = done.summary["before"], done.summary["after"]
    assert before == pytest.approx({"loss": 0.5, "accuracy": before["accuracy"], "margin": 0}, abs=1e-5)
    assert after["loss"] < before["loss"] and after["margin"] > 0.1
    assert load_run(tmp_path / "run").eval()["tuned"] == pytest.approx(after, abs=1e-5)


@pytest.mark.parametrize("plan", ["dp", pytest.param("tp", marks=pytest.mark.long)])
def test_replicas_tell_together_how_far_the_model_has_moved(plan: str, tmp_path: Path) -> None:
    """Without logits; the mean is of the rows of all replicas, which have three and one."""
    changes = {"max_steps": 2, "kernels": "reference", "prefer": {"loss": "kto", "undesirable_weight": 0.5}}
    run(judging(tmp_path, out="alone", **changes))
    ranks(2, train_in_group, judging(tmp_path, parallel=JUDGING[plan], **changes))
    assert_same_but_for_rounding(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 1}, "there is one row"),
        ({"parallel": {"pp": 2}}, "a pipeline's pieces do not see one another's texts"),
        ({"prefer": {"loss": "dpo", "desirable_weight": 2.0}}, "only kto has it"),
        ({"method": "full"}, "full fine-tuning overwrites"),
    ],
)
def test_a_recipe_of_labelled_answers_that_cannot_be_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(judging(tmp_path) | changes)


def test_a_loss_does_not_learn_from_rows_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dpo does not learn from rows of format judgements"):
        training(judging(tmp_path, prefer="dpo"))
    with pytest.raises(UsageError, match="kto does not learn from rows of format preferences"):
        training(settings(tmp_path, "llama", "lora", task="prefer", prefer="kto"))
