"""The loss as a sum and the count to divide it by, kept apart.

A step of several forwards (or ranks) must divide by the number of trained tokens of all of them, which no
forward knows: so `count` is read from the labels before the first forward, and `loss_sum` never divides. Only
trained positions are turned to fp32, which saves memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from petune.errors import UsageError, did_you_mean
from petune.rng.context import chosen, on_host
from petune.tasks.examples import MASKED, Example


def count(batch: Mapping[str, Tensor], class_weights: Tensor | None = None, texts: int = 1) -> float:
    """What the loss of this batch is divided by: its trained tokens; its rows for classify, or the sum of
    their class weights; its examples where one is several `texts`."""
    labels = on_host(batch["labels"])
    if texts > 1:
        return len(labels) / texts
    if labels.dim() == 1:
        rows = len(labels) if class_weights is None else class_weights.to(labels.device)[labels].sum()
        return float(rows)
    return float((labels != MASKED).sum())


def loss_sum(logits: Tensor, batch: Mapping[str, Tensor], task: str) -> tuple[Tensor, float]:
    """The summed cross-entropy in nats (a scalar, fp32 or wider) and its `count`.

    logits: [batch, classes] (classify) or [batch, sequence, vocabulary]; a decoder's are shifted here.
    A batch without a trained label gives 0 with gradients of 0.
    """
    return cross_entropy_sum(logits, batch, task), count(batch)


def cross_entropy_sum(
    logits: Tensor, batch: Mapping[str, Tensor], task: str, class_weights: Tensor | None = None
) -> Tensor:
    """The sum of `loss_sum`, without the count, for which a host may have to wait. class_weights:
    [classes]."""
    trained, gold = trained_positions(logits, batch["labels"].to(logits.device), task)
    wide = trained if trained.dtype == torch.float64 else trained.float()
    weights = None if class_weights is None else class_weights.to(device=wide.device, dtype=wide.dtype)
    return cross_entropy(wide, gold, weight=weights, reduction="sum")


def trained_positions(logits: Tensor, labels: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """The logits [n, classes or vocabulary] and labels [n] that count, a decoder's shifted by one."""
    if labels.dim() == 1:
        return logits, labels
    trained = on_host(labels) != MASKED
    if task in ("causal", "chat", "prefer"):
        logits, labels, trained = logits[:, :-1], labels[:, 1:], trained[:, 1:]
    logits, labels = chosen(trained, logits, labels)
    return logits, labels


def class_weights(
    spec: str | Mapping[str, float], examples: Sequence[Example], labels: Sequence[str]
) -> list[float] | None:
    """Weights in the order of the classes: None for "none", inverse to their frequency (mean 1 over the rows)
    for "balanced", or as given.

    Raises UsageError for a name that is no class; classes not named weigh 1.
    """
    if spec == "none":
        return None
    if any(not isinstance(example.labels, int) for example in examples):
        what = "only classes have weights"
        raise UsageError(what, where="class_weights", expected="none", remedy="they belong to task: classify")
    if spec == "balanced":
        rows = Counter(example.labels for example in examples if isinstance(example.labels, int))
        return [
            len(examples) / (len(labels) * rows[index]) if rows[index] else 1.0
            for index in range(len(labels))
        ]
    if isinstance(spec, str):
        what = f"class_weights {spec!r} is unknown"
        raise UsageError(what, where="class_weights", expected="none, balanced, or {class: weight}")
    for name in spec:
        if name not in labels:
            what = f"class_weights.{name} is not a class"
            where = "class_weights"
            raise UsageError(what, where=where, expected=", ".join(labels), remedy=did_you_mean(name, labels))
    return [float(spec.get(label, 1.0)) for label in labels]
