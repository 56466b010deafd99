"""Metrics as pure functions of whole numbers, and the scorer that gathers what they need batch by batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from petune.errors import DataError
from petune.tasks.examples import MASKED
from petune.tasks.loss import loss_sum, trained_positions

READABLE = 40  # classes of a table of confusions that a person can still read


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


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Kind, first and last word of every entity, by the rules of conlleval (Tjong Kim Sang and Buchholz
    2000), as in seqeval.

    B begins an entity, I goes on with one or, where there is none of its kind, begins it, E (or L) ends it, S
    (or U) is one. A tag without such a letter is a kind by itself: a run of it is one entity. O is outside.
    """
    found: set[tuple[str, int, int]] = set()
    start, last, kind = -1, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        letter, own = _split_tag(tag)
        if start >= 0 and (letter in "BSO" or last in "ES" or own != kind):
            found.add((kind, start, place - 1))
            start = -1
        if start < 0 and letter != "O":
            start = place
        last, kind = letter, own
    return found


def _split_tag(tag: str) -> tuple[str, str]:
    """The letter of a tag, one of B I E S O, and its kind."""
    if tag[:2] in ("B-", "I-", "E-", "S-", "L-", "U-"):
        return {"L": "E", "U": "S"}.get(tag[0], tag[0]), tag[2:]
    return ("O", "") if tag == "O" else ("I", tag)


def share(part: float, whole: float) -> float:
    """`part` of `whole`, 0 of nothing."""
    return part / whole if whole else 0.0


def perplexity(loss: float) -> float:
    """e to the mean loss in nats; infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


class Scores(Protocol):
    """What gathers the metrics of a task, batch by batch; that of several ranks is made of their sums."""

    def look(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Count one batch in."""

    def numbers(self) -> Sequence[float]:
        """All it has gathered, as numbers that may be added to another's."""

    def whole(self, numbers: Sequence[float]) -> Scores:
        """The same that has gathered `numbers`."""

    def confusion(self) -> list[list[int]] | None:
        """How many rows of each class (outer) were taken for each (inner); None without classes."""
        return None

    def result(self) -> dict[str, float]:
        """Every metric of the task. Raises DataError if nothing was scored."""


class Scorer(Scores):
    """The metrics of one task over many batches. `labels` are the classes or tags in the order of their ids,
    where the task has any."""

    def __init__(self, task: str, labels: Sequence[str] = ()) -> None:
        self.task, self.labels = task, labels
        self.loss = 0.0
        self.count = 0.0
        self.predicted: list[int] = []
        self.gold: list[int] = []
        self.right = 0
        self.tokens = 0
        self.entities = [0, 0, 0]  # found and true, found, true

    def look(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        total, number = loss_sum(logits, batch, self.task)
        self.add(logits, batch["labels"], total, number)

    def whole(self, numbers: Sequence[float]) -> Scorer:
        return Scorer.of(self.task, self.labels, numbers)

    def add(self, logits: Tensor, labels: Tensor, loss_sum: Tensor | float, count: float) -> None:
        """One batch: its logits and labels as the model had them, its summed loss and what that is to be
        divided by."""
        labels = labels.to(logits.device)
        chosen, gold = trained_positions(logits.detach(), labels, self.task)
        guesses = chosen.argmax(-1)
        self.loss += float(loss_sum)
        self.count += count
        if self.task == "classify":
            self.predicted += guesses.tolist()
            self.gold += gold.tolist()
            return
        self.right += int((guesses == gold).sum())
        self.tokens += len(gold)
        if self.task == "tokens":
            words = (labels != MASKED).sum(-1).tolist()
            for said, truth in zip(guesses.split(words), gold.split(words), strict=True):
                self._add_words(
                    [self.labels[tag] for tag in said.tolist()], [self.labels[tag] for tag in truth.tolist()]
                )

    def _add_words(self, said: Sequence[str], truth: Sequence[str]) -> None:
        """The entities of one row."""
        found, true = entities(said), entities(truth)
        for place, number in enumerate((len(found & true), len(found), len(true))):
            self.entities[place] += number

    def numbers(self) -> list[float]:
        """All it has gathered as numbers that may be added to another scorer's; for classify the table gold x
        predicted."""
        table = Counter(zip(self.gold, self.predicted, strict=True))
        classes = range(len(self.labels) if self.task == "classify" else 0)
        counts = [float(table[gold, predicted]) for gold in classes for predicted in classes]
        return [self.loss, self.count, self.right, self.tokens, *self.entities, *counts]

    def confusion(self) -> list[list[int]] | None:
        """How many rows of each class (outer) were taken for each (inner); None for tasks without classes,
        and of more than READABLE."""
        if self.task != "classify" or len(self.labels) > READABLE:
            return None
        table, classes = Counter(zip(self.gold, self.predicted, strict=True)), range(len(self.labels))
        return [[table[gold, predicted] for predicted in classes] for gold in classes]

    @staticmethod
    def of(task: str, labels: Sequence[str], numbers: Sequence[float]) -> Scorer:
        """The scorer that has gathered `numbers`."""
        scorer = Scorer(task, labels)
        scorer.loss, scorer.count = numbers[:2]
        scorer.right, scorer.tokens, *scorer.entities = (int(number) for number in numbers[2:7])
        for index, count in enumerate(numbers[7:]):
            gold, predicted = divmod(index, len(labels))
            scorer.gold += [gold] * int(count)
            scorer.predicted += [predicted] * int(count)
        return scorer

    def result(self) -> dict[str, float]:
        """Every metric of the task. Raises DataError if nothing was scored, which is not the same as a loss
        of 0."""
        if not self.count:
            raise DataError(
                "no label was scored", remedy="are all labels masked? petune data shows what is trained"
            )
        loss = self.loss / self.count
        if self.task == "classify":
            measures = (accuracy, f1_macro, matthews)
            return {"loss": loss} | {one.__name__: one(self.predicted, self.gold) for one in measures}
        right = self.right / self.tokens
        if self.task == "tokens":
            both, found, true = self.entities
            scores = {
                "precision": share(both, found),
                "recall": share(both, true),
                "f1": share(2 * both, found + true),
            }
            return {"loss": loss, **scores, "accuracy": right}
        return {"loss": loss, "perplexity": perplexity(loss), "token_accuracy": right}
