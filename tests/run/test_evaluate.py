"""Scores over batches equal scores over all rows at once, and the control is a head that really was trained
on frozen features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5GemmaConfig, T5GemmaForSequenceClassification

from petune.errors import TrainingFault
from petune.methods import without_tuning
from petune.methods.targets import head_modules
from petune.models import family_of
from petune.run import evaluate
from petune.run.evaluate import (
    Batch,
    batches,
    forward,
    head_only,
    scorer_of,
    scoring,
    shortcomings,
    undecided,
)
from petune.run.step import OptimizerStep
from petune.tasks import Example, Scorer, pad_token_id
from tests.methods.more_models import T5GEMMA
from tests.methods.zoo import batch
from tests.small_runs import TASK, settings, training, write_model


def scored(made: OptimizerStep, size: int) -> dict[str, float]:
    with scoring(made.model):
        scorer = scorer_of(made.recipe, made.prepared.task, made.prepared.rows.labels or ())
        return evaluate.scored(made.runner.logits, made.batches(made.held_out, size), scorer).result()


def plain(made: OptimizerStep, rows: Sequence[Example], size: int) -> Iterator[Batch]:
    return batches(rows, size, made.prepared.task.name, pad_token_id(made.prepared.tokenizer))


@pytest.mark.parametrize("family", TASK)
def test_scores_do_not_depend_on_the_batch_size(family: str, tmp_path: Path):
    made = training(settings(tmp_path, family))
    assert scored(made, 9) == pytest.approx(scored(made, 1), abs=1e-5)
    assert scored(made, 4) == pytest.approx(scored(made, 1), abs=1e-5)


def test_a_head_that_says_itself_that_there_is_no_cache_is_not_told_so() -> None:
    model = T5GemmaForSequenceClassification(T5GemmaConfig(**T5GEMMA)).eval()
    inputs = batch("t5gemma-seq2seq")
    labels = torch.zeros(len(inputs["input_ids"]), dtype=torch.long)
    assert forward(model, inputs | {"labels": labels}).shape == (len(labels), 3)


@pytest.mark.parametrize("family", ["bart", "t5", "llama"])
def test_the_loss_is_the_mean_over_tokens_and_perplexity_its_exponential(family: str, tmp_path: Path):
    made = training(settings(tmp_path, family))
    made.model.eval()
    summed = tokens = 0.0
    with torch.no_grad():
        for example in made.prepared.encoded.eval:
            assert isinstance(example.labels, list)
            theirs = made.model(
                input_ids=torch.tensor([example.input_ids]), labels=torch.tensor([example.labels])
            ).loss
            summed, tokens = summed + float(theirs) * example.trained, tokens + example.trained
    scores = scored(made, 4)
    assert scores["loss"] == pytest.approx(summed / tokens, abs=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(summed / tokens), rel=1e-4)


def test_accuracy_is_the_share_of_right_rows(tmp_path: Path):
    made = training(settings(tmp_path, "bert"))
    made.model.eval()
    rows = made.prepared.encoded.eval
    with torch.no_grad():
        right = sum(
            int(made.model(input_ids=torch.tensor([row.input_ids])).logits.argmax()) == row.labels
            for row in rows
        )
    assert scored(made, 4)["accuracy"] == right / len(rows)


@pytest.mark.parametrize("training_mode", [True, False])
def test_dropout_is_off_meanwhile_and_the_mode_is_put_back(training_mode: bool, tmp_path: Path):
    made = training(settings(tmp_path))
    made.model.train(training_mode)
    before = torch.get_rng_state()
    assert scored(made, 3) == scored(made, 3)
    assert made.model.training is training_mode
    assert torch.equal(before, torch.get_rng_state())
    assert not any(value.grad is not None for value in made.model.parameters())


def test_the_mode_is_put_back_when_a_stop_is_asked_for(tmp_path: Path):
    made = training(settings(tmp_path))
    made.model.train()

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), scoring(made.model):
        assert not made.model.training
        evaluate.scored(made.runner.logits, made.batches(made.held_out, 2), Scorer("causal"), check=stop)
    assert made.model.training


def test_a_loss_that_is_not_finite_is_a_fault(tmp_path: Path):
    made = training(settings(tmp_path))
    with torch.no_grad():
        made.model.get_parameter("model.norm.weight").fill_(math.nan)
    with pytest.raises(TrainingFault, match="not finite") as caught:
        scored(made, 2)
    assert caught.value.code == 7


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_control_learns_what_the_frozen_features_hold_and_touches_nothing(family: str, tmp_path: Path):
    """The class is the first word: a head on a bidirectional model can see it, the majority is a third."""
    write_model(tmp_path / family, family)
    made = training(settings(tmp_path, family, "lora", task="classify"))
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    state = torch.get_rng_state()
    heads = head_modules(made.model, family_of(made.model), "auto")
    rows = made.prepared.encoded

    def accuracy() -> float | None:
        with without_tuning(made.model):
            sides = plain(made, rows.train, 5), plain(made, rows.train, 5)
            return head_only(made.model, heads[0], sides, made.runner.logits, lambda: None, seed=0, epochs=60)

    first = accuracy()
    assert first is not None and first > 0.6
    assert accuracy() == first
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert not made.model.training


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_features_of_the_control_do_not_depend_on_padding(family: str, tmp_path: Path):
    """The pooled token of each (a decoder's is its last) and the mean over the tokens, padding left out."""
    made = training(settings(tmp_path, family, "lora", task="classify"))
    head = head_modules(made.model, family_of(made.model), "auto")[0]
    from petune.run.evaluate import _features

    examples: list[Example] = made.prepared.encoded.train[:5]
    found = _features(made.model, head, plain(made, examples, 5), made.runner.logits, lambda: None)
    alone = [
        _features(made.model, head, plain(made, [example], 1), made.runner.logits, lambda: None)
        for example in examples
    ]
    assert set(found) == {"pooled", "mean", "labels"}
    for kind, values in found.items():
        assert torch.allclose(values, torch.cat([one[kind] for one in alone]), atol=1e-5), kind
    assert found["labels"].tolist() == [example.labels for example in examples]
    # and what it reads is what the model itself classifies by
    with torch.no_grad():
        module: nn.Module = made.model.get_submodule(head)
        batch = next(iter(plain(made, examples, 5)))
        assert torch.allclose(module(found["pooled"]), forward(made.model, batch), atol=1e-5)


GOOD: dict[str, Any] = {
    **{
        "task": "classify",
        "metric": "accuracy",
        "direction": "max",
        "lr": 0.5,
        "loss": [2.0, 0.5],
        "head_only": 0.8,
    },
    **{
        "before": {"accuracy": 0.4, "loss": 1.5},
        "after": {"accuracy": 0.9, "loss": 0.6},
        "last": {"accuracy": 0.9, "loss": 0.6},
    },
}
WORSE = {"accuracy": 0.3, "loss": 4.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"head_only": 0.9}, []),
        ({"head_only": None}, []),
        ({"head_only": 0.95}, ["a head alone on the frozen base does better: accuracy 0.9500, tuned 0.9000"]),
        (
            {"after": {"accuracy": 0.4, "loss": 0.6}, "head_only": None},
            ["no better than the untouched base: accuracy 0.4000 -> 0.4000"],
        ),
        ({"loss": [0.5, 0.9]}, []),  # one noisy batch: the held-out loss fell
        ({"last": WORSE}, []),  # overfitting after the best step: the training loss fell
        (
            {"loss": [4.55, 7.93], "last": WORSE},
            ["training diverged: loss 4.5500 -> 7.9300, held out 1.5000 -> 4.0000; lower lr (it was 0.5)"],
        ),
        (
            {"loss": [4.55, 7.93], "last": WORSE, "after": WORSE},
            ["training diverged", "untouched base: accuracy 0.4000 -> 0.3000", "a head alone"],
        ),
        ({"metric": "loss", "direction": "min"}, []),
        (
            {"metric": "loss", "direction": "min", "after": {"accuracy": 0.9, "loss": 1.6}},
            ["untouched base: loss 1.5000 -> 1.6000"],
        ),
    ],
)
def test_a_run_that_is_no_success_is_said_with_its_numbers(changes: dict[str, Any], said: list[str]):
    lines = shortcomings(GOOD | changes)
    assert len(lines) == len(said) and all(part in line for part, line in zip(said, lines, strict=True)), (
        lines
    )


def test_rows_that_cannot_show_a_difference_are_said_and_no_failure():
    def accuracy(value: float) -> dict[str, float]:
        return {"accuracy": value, "loss": 0.6}

    perfect = GOOD | {"before": accuracy(1.0), "after": accuracy(1.0), "head_only": 1.0}
    for rows, said in (
        (1, "1 row held out cannot show a difference"),
        (450, "base is right already (accuracy 1.0000): the 450 rows"),
    ):
        (line,) = undecided(perfect | {"held_out": rows})
        assert said in line and shortcomings(perfect | {"held_out": rows}) == []
    few = GOOD | {"held_out": 10, "before": accuracy(0.5), "after": accuracy(0.4), "head_only": 0.5}
    assert "some hundreds are wanted" in undecided(few)[0] and shortcomings(few) == []
    assert len(shortcomings(few | {"held_out": 100})) == 2 and undecided(few | {"held_out": 100}) == []
    # five rows of ten are no chance
    assert len(shortcomings(few | {"before": accuracy(0.9), "head_only": 0.9})) == 2
    assert (
        shortcomings(perfect | {"held_out": 450, "after": accuracy(0.9)})
        and undecided(GOOD | {"held_out": 450}) == []
    )
    assert undecided(GOOD | {"metric": "loss", "direction": "min", "held_out": 1}) == []  # a loss is no count


def test_the_summary_of_an_earlier_release_is_judged_too():
    old = {name: value for name, value in GOOD.items() if name not in ("direction", "lr", "last")}
    assert shortcomings(old) == []
    (line,) = shortcomings(old | {"loss": [1.0, 2.0], "after": {"accuracy": 0.9, "loss": 2.0}})
    assert "lower lr or raise warmup" in line
