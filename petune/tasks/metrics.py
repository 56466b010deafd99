"""Metrics as pure functions of whole numbers, and the scorer that gathers what they need batch by batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from petune.errors import DataError
from petune.tasks.loss import trained_positions

METRICS: dict[str, dict[str, str]] = {  # task -> metric -> the better direction
    "classify": {"accuracy": "max", "f1_macro": "max", "matthews": "max", "loss": "min"},
    **{task: {"loss": "min", "perplexity": "min", "token_accuracy": "max"} for task in ("seq2seq", "causal", "chat")},
}


def accuracy(predicted: Sequence[int], gold: Sequence[int]) -> float:
    """The share that is right."""
    return sum(guess == truth for guess, truth in zip(predicted, gold, strict=True)) / len(gold)


def f1_macro(predicted: Sequence[int], gold: Sequence[int]) -> float:
    """The mean over the classes seen or guessed of 2 tp / (2 tp + fp + fn)."""
    right = Counter(truth for guess, truth in zip(predicted, gold, strict=True) if guess == truth)
    guessed, seen = Counter(predicted), Counter(gold)
    classes = guessed.keys() | seen.keys()
    return sum(2 * right[one] / (guessed[one] + seen[one]) for one in classes) / len(classes)


def matthews(predicted: Sequence[int], gold: Sequence[int]) -> float:
    """Matthews' correlation for any number of classes (Gorodkin 2004), -1 to 1; 0 where it is not defined."""
    rows = len(gold)
    right = sum(guess == truth for guess, truth in zip(predicted, gold, strict=True))
    guessed, seen = Counter(predicted), Counter(gold)
    shared = sum(guessed[one] * seen[one] for one in seen)
    spread = (rows**2 - sum(n * n for n in guessed.values())) * (rows**2 - sum(n * n for n in seen.values()))
    return (right * rows - shared) / math.sqrt(spread) if spread else 0.0


def perplexity(loss: float) -> float:
    """e to the mean loss in nats; infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


class Scorer:
    """The metrics of one task over many batches."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.loss = 0.0
        self.count = 0.0
        self.predicted: list[int] = []
        self.gold: list[int] = []
        self.right = 0
        self.tokens = 0

    def add(self, logits: Tensor, labels: Tensor, loss_sum: Tensor | float, count: float) -> None:
        """One batch: its logits and labels as the model had them, its summed loss and what that is to be divided by."""
        chosen, gold = trained_positions(logits.detach(), labels.to(logits.device), self.task)
        guesses = chosen.argmax(-1)
        self.loss += float(loss_sum)
        self.count += count
        if self.task == "classify":
            self.predicted += guesses.tolist()
            self.gold += gold.tolist()
        else:
            self.right += int((guesses == gold).sum())
            self.tokens += len(gold)

    def numbers(self, classes: int) -> list[float]:
        """All it has gathered as numbers that may be added to another scorer's; for classify the table gold x predicted of `classes`."""
        table = Counter(zip(self.gold, self.predicted, strict=True))
        counts = [float(table[gold, predicted]) for gold in range(classes) for predicted in range(classes)]
        return [self.loss, self.count, self.right, self.tokens, *counts]

    @staticmethod
    def of(task: str, numbers: Sequence[float]) -> Scorer:
        """The scorer that has gathered `numbers`."""
        scorer = Scorer(task)
        scorer.loss, scorer.count = numbers[:2]
        scorer.right, scorer.tokens = int(numbers[2]), int(numbers[3])
        classes = math.isqrt(len(numbers) - 4)
        for index, count in enumerate(numbers[4:]):
            gold, predicted = divmod(index, classes)
            scorer.gold += [gold] * int(count)
            scorer.predicted += [predicted] * int(count)
        return scorer

    def result(self) -> dict[str, float]:
        """Every metric of the task. Raises DataError if nothing was scored, which is not the same as a loss of 0."""
        if not self.count:
            raise DataError("no label was scored", remedy="are all labels masked? petune data shows what is trained")
        loss = self.loss / self.count
        if self.task == "classify":
            measures = (accuracy, f1_macro, matthews)
            return {"loss": loss, **{measure.__name__: measure(self.predicted, self.gold) for measure in measures}}
        return {"loss": loss, "perplexity": perplexity(loss), "token_accuracy": self.right / self.tokens}
