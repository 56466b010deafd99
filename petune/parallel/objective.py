"""What a task knows and a plan does not: how a model is asked, what its answers cost, which tensors train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Batch = dict[str, Tensor]


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def _no_select(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("a vocabulary cut across ranks needs Work.select")


def _no_sum(model: nn.Module, batch: Batch, trained: int) -> Tensor | None:
    return None


@dataclass(frozen=True)
class Work:
    """forward: (model, batch) -> logits [b, s, V] or [b, classes]. loss: (logits, batch) -> the summed loss of all rows, a scalar.

    select: (logits [b, s, any width], batch) -> the logits [n, width] of the positions that count and their labels [n], for a vocabulary
    cut across ranks. summed: (model, batch, labels that count at most) -> what `loss` would give, for a model that makes it without logits,
    or None for one that does not. tuned: what trains in a model, by name. autocast: entered around every forward.
    """

    forward: Callable[[nn.Module, Batch], Tensor]
    loss: Callable[[Tensor, Batch], Tensor]
    select: Callable[[Tensor, Batch], tuple[Tensor, Tensor]] = _no_select
    summed: Callable[[nn.Module, Batch, int], Tensor | None] = _no_sum
    tuned: Callable[[nn.Module], Mapping[str, nn.Parameter]] = _trainable
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
