from __future__ import annotations

import math

import pytest
import torch

from petune.errors import DataError
from petune.tasks import METRICS, TASKS, Scorer
from petune.tasks.metrics import accuracy, f1_macro, matthews, perplexity

GOLD, GUESS = [0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2]


def test_the_figures_are_those_worked_out_by_hand() -> None:
    assert accuracy(GUESS, GOLD) == 4 / 6
    # class 0: 2*2/(2+3); class 1: 2*1/(2+2); class 2: 2*1/(2+1)
    assert f1_macro(GUESS, GOLD) == pytest.approx((4 / 5 + 2 / 4 + 2 / 3) / 3)
    # (4*6 - (2*3 + 2*2 + 2*1)) / sqrt((36 - 12) * (36 - 14))
    assert matthews(GUESS, GOLD) == pytest.approx(12 / math.sqrt(24 * 22))


def test_two_class_matthews_is_the_usual_one() -> None:
    # tp 1, tn 2, fp 1, fn 1
    assert matthews([1, 0, 1, 0, 0], [1, 1, 0, 0, 0]) == pytest.approx(
        (1 * 2 - 1 * 1) / math.sqrt(2 * 2 * 3 * 3)
    )


def test_a_constant_guess_has_no_correlation() -> None:
    assert matthews([0, 0, 0], [0, 1, 0]) == 0.0
    assert f1_macro([0, 0, 0], [0, 1, 0]) == pytest.approx(0.8 / 2)


def test_perplexity_is_the_exponential_and_may_be_infinite() -> None:
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e4) == math.inf


def test_a_classifier_is_scored_over_batches() -> None:
    scorer = Scorer("classify")
    scorer.add(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]), 3.0, 2)
    scorer.add(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), 0.0, 1)
    assert scorer.result() == {
        "loss": 1.0,
        "accuracy": 2 / 3,
        "f1_macro": pytest.approx(0.4),
        "matthews": 0.0,
    }


def test_a_decoder_is_scored_on_the_next_token() -> None:
    labels = torch.tensor([[-100, 1, 2, -100]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 0, 2, 2]]), 3).float()
    scorer = Scorer("causal")
    scorer.add(logits, labels, 2.0, 2)
    assert scorer.result() == {"loss": 1.0, "perplexity": pytest.approx(math.e), "token_accuracy": 0.5}


def test_scoring_nothing_is_an_error_not_a_loss_of_zero() -> None:
    with pytest.raises(DataError, match="no label was scored"):
        Scorer("causal").result()


def test_every_task_has_its_default_metric_in_the_table() -> None:
    for name, task in TASKS.items():
        assert METRICS[name][task.metric] == task.direction
