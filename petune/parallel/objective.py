"""The objective of a task, as a plan's runner asks it: forward pass, loss, and what trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

Batch = dict[str, Tensor]


class Outputs(Protocol):
    """What a model's forward pass gives: Hugging Face's ModelOutput, or anything else with logits."""

    logits: Tensor


def rows_of(outputs: Outputs, rows: Tensor) -> Outputs:
    """The same outputs with the logits of some rows; `rows` is a mask or indices of the first dimension."""
    chosen = copy.copy(outputs)
    chosen.logits = outputs.logits[rows]
    return chosen


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every tensor of `model` that requires a gradient, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def _no_select(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("a vocabulary cut across ranks needs Objective.select")


@dataclass(frozen=True)
class RowChunks:
    """How a batch whose rows are compared with one another goes through the model, so many `rows` at a time.

    give: (outputs, those rows) -> what is compared of each, [rows, ...]. loss: (that of all rows, batch) ->
    what `Objective.loss` would give.
    """

    rows: int
    give: Callable[[Outputs, Batch], Tensor]
    loss: Callable[[Tensor, Batch], Tensor]


@dataclass(frozen=True)
class Objective:
    """forward: (model, batch) -> outputs, whose logits are [b, s, V] or [b, classes]. loss: (outputs, batch)
    -> the summed loss of all rows, a scalar.

    select: (outputs with logits [b, s, any width], batch) -> the logits [n, width] of the positions that
    count and their labels [n], for a vocabulary cut across ranks; finish: (the cross-entropies [n] of those,
    outputs, batch) -> what `loss` would give. texts: rows of a batch that belong together, which no pipeline
    parts.
    fused_loss: (model, batch, labels that count at most) -> what `loss` would give, for a model that makes it
    without logits, or None for one that does not. pieces: see RowChunks; None for batches that are not cut.
    meets: replicas tell one another something in every pass. tuned: what trains in a model, by name.
    autocast: entered around every forward.
    """

    forward: Callable[[nn.Module, Batch], Outputs]
    loss: Callable[[Outputs, Batch], Tensor]
    select: Callable[[Outputs, Batch], tuple[Tensor, Tensor]] = _no_select
    finish: Callable[[Tensor, Outputs, Batch], Tensor] = lambda losses, outputs, batch: losses.sum()
    texts: int = 1
    fused_loss: Callable[[nn.Module, Batch, int], Tensor | None] = lambda model, batch, trained: None
    tuned: Callable[[nn.Module], Mapping[str, nn.Parameter]] = trainable
    pieces: RowChunks | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    meets: bool = False
