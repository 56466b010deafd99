"""Runs of the tasks tokens and mlm: the loss is transformers', the end is the same however the rows are
shared out, and both are asked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer

from petune.errors import Stopped, UsageError
from petune.run.train import load_run
from petune.tasks import collate, loss_sum
from tests.group_pool import assert_same_but_for_rounding, ranks
from tests.small_runs import assert_same_run, run, settings, terminate_at, training

pytestmark = pytest.mark.usefixtures("no_picture", "no_network")
TASKS = ("tokens", "mlm")


def recipe(place: Path, task: str, **changes: Any) -> dict[str, Any]:
    """Two steps of four rows of a small BERT, whose tokenizer has a mask token."""
    made = settings(place, "bert", "lora", task=task, max_steps=2, warmup=0, save_every=50, **changes)
    tokenizer = AutoTokenizer.from_pretrained(place / "bert")
    tokenizer.mask_token = "<|im_start|>"
    tokenizer.save_pretrained(place / "bert")
    return made


@pytest.fixture(scope="module", params=TASKS)
def alone(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The task, and a folder with model, data and the run of one process, unfused as on every CPU."""
    place = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("petune.run.folder.draw_loss", lambda metrics, picture: False)
        run(recipe(place, request.param))
    return request.param, place


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    for task in TASKS:
        made = training(recipe(tmp_path, task, out=f"loss-{task}"))
        made.model.eval()
        batch = collate(made.prepared.encoded.eval, task, 0)
        theirs = made.model(**batch)
        total, number = loss_sum(theirs.logits, batch, task)
        assert (total / number).item() == pytest.approx(theirs.loss.item(), rel=1e-5)


def test_accumulated_steps_are_those_of_one_batch(alone: tuple[str, Path]) -> None:
    task, place = alone
    run(recipe(place, task, batch_size=4, accumulate=1, out=str(place / "whole")))
    assert_same_but_for_rounding(place / "whole", place / "run")


def test_a_run_that_was_stopped_ends_as_one_that_was_not(alone: tuple[str, Path]) -> None:
    task, place = alone
    again = recipe(place, task, out=str(place / "stopped"))
    with pytest.raises(Stopped):
        run(again, terminate_at(1))
    run(again, resume=True)
    assert_same_run(place / "stopped", place / "run")


def train_in_group(made: dict[str, Any]) -> None:
    """What every rank calls."""
    run(made)


PLANS: dict[str, Any] = {
    "dp": {"dp": {"shares": [3, 1]}},
    "tp": {"tp": {"size": 2}},
    "sp": {"sp": {"size": 2}},
    "galaxy": {"galaxy": {"size": 2}},
    "pp": {"pp": {"size": 2, "microbatches": 2}},
}


@pytest.mark.crossed(1)
@pytest.mark.parametrize(  # galaxy is tp and sp at once
    "plan", [pytest.param(plan, marks=pytest.mark.long if plan == "galaxy" else ()) for plan in PLANS]
)
def test_every_plan_ends_as_one_process_does(plan: str, alone: tuple[str, Path]) -> None:
    task, place = alone
    ranks(2, train_in_group, recipe(place, task, parallel=PLANS[plan], out=str(place / plan)))
    assert_same_but_for_rounding(place / plan, place / "run")


def test_a_fused_run_ends_as_an_unfused_one(alone: tuple[str, Path]) -> None:
    task, place = alone
    run(recipe(place, task, kernels="reference", out=str(place / "reference")))
    assert_same_but_for_rounding(place / "reference", place / "run")


def test_a_finished_run_is_scored_asked_and_merged(alone: tuple[str, Path], tmp_path: Path) -> None:
    task, place = alone
    # the run itself stays as it is for the other tests, in whatever order they come
    loaded = load_run(shutil.copytree(place / "run", tmp_path / "run"))
    scores = loaded.eval()
    assert scores["tuned"] == pytest.approx(loaded.summary["after"], abs=1e-6)
    if task == "tokens":
        lines = [line.split("\t") for line in loaded.generate("red sun moon").splitlines()]
        assert [word for word, _ in lines] == ["red", "sun", "moon"]
        assert {tag for _, tag in lines} <= {"B-COLOR", "I-COLOR", "B-NUMBER", "O"}
        auto = AutoModelForTokenClassification
    else:
        answer = loaded.generate("red [MASK] moon").split()
        assert (answer[0], answer[-1]) == ("red", "moon") and "[MASK]" not in answer
        with pytest.raises(UsageError, match="no mask to fill in"):
            loaded.generate("red sun moon")
        auto = AutoModelForMaskedLM
    with pytest.raises(UsageError, match="no generation options"):
        loaded.generate("red [MASK]", max_new_tokens=3)
    assert auto.__name__ in (place / "run" / "README.md").read_text()
    merged = auto.from_pretrained(loaded.merge(), dtype=torch.float32).eval()
    ids = torch.tensor([[9, 12, 15]])
    with torch.no_grad():
        assert torch.allclose(
            merged(input_ids=ids).logits, loaded.speaker.model(input_ids=ids).logits, atol=1e-5
        )


@pytest.mark.parametrize(("family", "task"), [("t5", "tokens"), ("bart", "mlm"), ("llama", "mlm")])
def test_a_family_that_a_task_does_not_fit_is_refused_by_name(family: str, task: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"task {task} does not fit a model of kind"):
        training(settings(tmp_path, family, task=task))


def test_a_decoder_tags_words_too(tmp_path: Path) -> None:
    finished = run(settings(tmp_path, "llama", "lora", task="tokens", max_steps=1, warmup=0))
    assert set(finished.summary["after"]) == {"loss", "precision", "recall", "f1", "accuracy"}


def test_masks_change_with_the_step_and_the_seed(tmp_path: Path) -> None:
    drawn = []
    for seed in (0, 1):
        made = training(recipe(tmp_path, "mlm", seed=seed, out=f"seed-{seed}"))
        made.units = [max(made.units, key=lambda example: len(example.input_ids))] * len(made.units)
        drawn += [[example.labels for example in made.rows_of(step)] for step in (0, 1)]
    assert all(one != other for at, one in enumerate(drawn) for other in drawn[:at])
