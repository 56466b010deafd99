"""The two boundaries of sub-layers cut across ranks (petune.models.boundary)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from petune.models.boundary import Boundary
from petune.parallel.collectives import COPY, REDUCE, MaybeGroup, Sizes
from petune.parallel.copy_engines import CopyEngines
from petune.parallel.link import Crossing
from petune.rng.context import running


@dataclass(frozen=True)
class _Among(Crossing, Boundary):
    """A boundary among the ranks of `group`. largest: the largest share of all tokens that one of them has
    beyond it."""

    group: MaybeGroup
    first: int = 0
    overlapped: bool = False
    share: float = 1.0
    largest: float = 1.0
    engines: CopyEngines | None = None

    @property
    def split_turns(self) -> bool:
        """See Boundary: terms of a sum are sent, and the sum; two ranks send terms alone."""
        return self.engines is not None and self.link.terms > 1


@dataclass(frozen=True)
class WholeBoundary(_Among):
    """The boundary beyond which hidden states are whole on every rank (Shoeybi et al. 2019,
    arXiv:1909.08053)."""

    connection = "whole"

    def here(self) -> Self:
        return self

    def room_bytes(self, nbytes: int) -> tuple[int, int]:
        """See Boundary. A sum lies beside its terms, but for that of two ranks."""
        beside = nbytes // self.link.ranks if self.link.terms > 1 else 0
        return self.link.room_bytes(nbytes + beside)

    def enter(self, x: Tensor) -> Tensor:
        return COPY.ahead(x, self.group)

    def enter_backward(self, dx: Tensor, own: bool = False) -> Tensor:
        return self.link.all_reduce(dx, own)

    def leave(self, y: Tensor, own: bool = False) -> Tensor:
        return self.link.all_reduce(y, own)

    def leave_backward(self, dy: Tensor) -> Tensor:
        return REDUCE.back(dy, self.group)


@dataclass(frozen=True)
class SequenceBoundary(_Among):
    """The boundary beyond which each rank has some tokens of every row (Korthikanti et al. 2022,
    arXiv:2205.05198).

    sizes: tokens of each rank in the call that it is for."""

    sizes: Sizes = ()
    connection = "sequence"
    split_turns: ClassVar[bool] = True

    def here(self) -> Self:
        return replace(self, sizes=running().sizes)

    def room_bytes(self, nbytes: int) -> tuple[int, int]:
        """See Boundary. Every rank writes to the one with most tokens."""
        return self.link.room_bytes(int(nbytes * self.largest * self.link.terms))

    def enter(self, x: Tensor) -> Tensor:
        return self.link.gather(x, self.sizes)

    def enter_backward(self, dx: Tensor, own: bool = False) -> Tensor:
        return self.link.reduce_scatter(dx, self.sizes)

    def leave(self, y: Tensor, own: bool = False) -> Tensor:
        return self.link.reduce_scatter(y, self.sizes)

    def leave_backward(self, dy: Tensor) -> Tensor:
        return self.link.gather(dy, self.sizes)
