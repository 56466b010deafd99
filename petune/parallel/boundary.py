"""The two boundaries of sub-layers cut across ranks (petune.models.boundary), made of the pairs of functions
that the autograd functions of petune.parallel.collectives are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from petune.models.boundary import Connection
from petune.parallel.collectives import COPY, GATHER_SEQ, REDUCE, REDUCE_SCATTER_SEQ, Group, Sizes, least_of
from petune.rng.context import running


@dataclass(frozen=True)
class _Among:
    """Among the ranks of `group`. A copy of the model has the same one, as a process group cannot be
    copied."""

    group: Group
    first: int = 0
    overlapped: bool = False
    share: float = 1.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def least(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """See Boundary."""
        return least_of(numbers, device, self.group)


@dataclass(frozen=True)
class WholeBoundary(_Among):
    """The boundary beyond which hidden states are whole on every rank (Shoeybi et al. 2019,
    arXiv:1909.08053)."""

    connection: ClassVar[Connection] = "whole"

    def here(self) -> Self:
        """See Boundary."""
        return self

    def enter(self, x: Tensor) -> Tensor:
        """See Boundary."""
        return COPY.ahead(x, self.group)

    def enter_backward(self, dx: Tensor, own: bool = False) -> Tensor:
        """See Boundary."""
        return COPY.back(dx, self.group, own)

    def leave(self, y: Tensor, own: bool = False) -> Tensor:
        """See Boundary."""
        return REDUCE.ahead(y, self.group, own)

    def leave_backward(self, dy: Tensor) -> Tensor:
        """See Boundary."""
        return REDUCE.back(dy, self.group)


@dataclass(frozen=True)
class SequenceBoundary(_Among):
    """The boundary beyond which each rank has some tokens of every row (Korthikanti et al. 2022,
    arXiv:2205.05198).

    sizes: tokens of each rank in the call that it is for."""

    sizes: Sizes = ()
    connection: ClassVar[Connection] = "sequence"

    def here(self) -> Self:
        """See Boundary."""
        return replace(self, sizes=running().sizes)

    def enter(self, x: Tensor) -> Tensor:
        """See Boundary."""
        return GATHER_SEQ.ahead(x, self.sizes, self.group)

    def enter_backward(self, dx: Tensor, own: bool = False) -> Tensor:
        """See Boundary."""
        return GATHER_SEQ.back(dx, self.sizes, self.group)

    def leave(self, y: Tensor, own: bool = False) -> Tensor:
        """See Boundary."""
        return REDUCE_SCATTER_SEQ.ahead(y, self.sizes, self.group)

    def leave_backward(self, dy: Tensor) -> Tensor:
        """See Boundary."""
        return REDUCE_SCATTER_SEQ.back(dy, self.sizes, self.group)
