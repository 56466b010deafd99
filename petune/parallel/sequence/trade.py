"""Tokens traded for columns: of a matrix that is cut by tokens every rank gets all tokens of some columns
(Jacobs et al. 2023, arXiv:2309.14509), and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from petune.parallel.collectives import Group, Sizes


@dataclass(frozen=True)
class Trade:
    """Tokens of each rank, and of the matrices that lie side by side the columns of each by rank. A trade
    only moves elements, so its adjoint is the way back."""

    sizes: Sizes
    columns: Sequence[Sizes]
    group: Group
    index: int

    def to_heads(self, x: Tensor) -> Tensor:
        """[batch, own tokens, all columns] -> [batch, all tokens, own columns]."""
        batch, own = len(x), self.widths[self.index]
        sent = [batch * self.sizes[self.index] * width for width in self.widths]
        flat = x.new_empty(sum(sent))
        for there, here in self._pieces(flat, x):
            there.copy_(here)
        found = self._swapped(flat, sent, [batch * size * own for size in self.sizes])
        if batch == 1:
            return found.view(1, -1, own)
        parts = found.split([batch * size * own for size in self.sizes])
        shapes = [(batch, size, own) for size in self.sizes]
        return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], 1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[batch, all tokens, own columns] -> [batch, own tokens, all columns]."""
        batch, own = len(x), self.widths[self.index]
        parts = [x] if batch == 1 else x.split(list(self.sizes), 1)
        flat = torch.cat([part.reshape(-1) for part in parts]) if batch > 1 else x.reshape(-1)
        received = [batch * self.sizes[self.index] * width for width in self.widths]
        found = self._swapped(flat, [batch * size * own for size in self.sizes], received)
        y = x.new_empty(batch, self.sizes[self.index], sum(self.widths))
        for there, here in self._pieces(found, y):
            here.copy_(there)
        return y

    @property
    def widths(self) -> list[int]:
        """Columns of each rank, of all matrices."""
        return [sum(rank) for rank in zip(*self.columns, strict=True)]

    def _pieces(self, flat: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the same elements of a message, rank after rank, and of x [batch, own tokens, all]."""
        batch, own, _ = x.shape
        every = iter(x.split([columns for matrix in self.columns for columns in matrix], -1))
        pieces = [[next(every) for _ in matrix] for matrix in self.columns]
        parts = flat.split([batch * own * width for width in self.widths])
        for rank, (part, width) in enumerate(zip(parts, self.widths, strict=True)):
            inside = part.view(batch, own, width).split([matrix[rank] for matrix in self.columns], -1)
            yield from zip(inside, (matrix[rank] for matrix in pieces), strict=True)

    def _swapped(self, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        found = flat.new_empty(sum(received))
        dist.all_to_all_single(found, flat, received, sent, group=self.group)
        return found
