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
        messages = self._messages(x)
        found = x.new_empty(len(x), sum(self.sizes), self.widths[self.index])
        places = found.split(list(self.sizes), 1)
        for rank, pieces in enumerate(self._pieces(x)):
            whole = places[rank] if rank == self.index else messages[rank]
            for there, here in zip(self._beside(whole, rank), pieces, strict=True):
                _copy(there, here)
        self._swap(messages, places)
        return found

    def to_tokens(self, x: Tensor) -> Tensor:
        """[batch, all tokens, own columns] -> [batch, own tokens, all columns]."""
        x = x.contiguous()
        places = x.split(list(self.sizes), 1)
        y = x.new_empty(len(x), self.sizes[self.index], sum(self.widths))
        messages = self._messages(y)
        self._swap(places, messages)
        for rank, pieces in enumerate(self._pieces(y)):
            whole = places[rank] if rank == self.index else messages[rank]
            for there, here in zip(pieces, self._beside(whole, rank), strict=True):
                _copy(there, here)
        return y

    @property
    def widths(self) -> list[int]:
        """Columns of each rank, of all matrices."""
        return [sum(rank) for rank in zip(*self.columns, strict=True)]

    def _messages(self, x: Tensor) -> list[Tensor]:
        """Room for the own tokens of each rank's columns; of none for the own ones, which do not travel."""
        batch, own, _ = x.shape
        return [
            x.new_empty(batch, own, width * (rank != self.index)) for rank, width in enumerate(self.widths)
        ]

    def _pieces(self, x: Tensor) -> Iterator[list[Tensor]]:
        """Views of [batch, own tokens, all columns]: for each rank its columns of each matrix."""
        every = iter(x.split([columns for matrix in self.columns for columns in matrix], -1))
        matrices = [[next(every) for _ in matrix] for matrix in self.columns]
        yield from map(list, zip(*matrices, strict=True))

    def _beside(self, whole: Tensor, rank: int) -> Sequence[Tensor]:
        """Views of a rank's columns, those of each matrix."""
        found: Sequence[Tensor] = whole.split([matrix[rank] for matrix in self.columns], -1)
        return found

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send each other rank its part, in one message, and receive theirs."""
        out, into = self._of_others(sent), self._of_others(received)
        rooms = {rank: _dense(part) for rank, part in into.items()}
        for rank, part in out.items():
            out[rank] = _dense(part)
            if out[rank] is not part:
                _copy(out[rank], part)
        operations = [
            dist.P2POp(does, part, group=self.group, group_peer=rank)
            for does, parts in ((dist.isend, out), (dist.irecv, rooms))
            for rank, part in parts.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for rank, part in into.items():
            if rooms[rank] is not part:
                _copy(part, rooms[rank])

    def _of_others(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """What is there of the parts of other ranks."""
        return {rank: part for rank, part in enumerate(parts) if rank != self.index and part.numel()}


def _dense(part: Tensor) -> Tensor:
    """A part that lies in one piece, or room for one."""
    return part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)


def _copy(there: Tensor, here: Tensor) -> None:
    """Copy columns of a matrix into columns of another, eight bytes at a time where they allow it: a GPU
    copies strided numbers of two bytes at half its bandwidth."""
    wide_there, wide_here = _wide(there), _wide(here)
    if wide_there is None or wide_here is None:
        there.copy_(here)
    else:
        wide_there.copy_(wide_here)


def _wide(x: Tensor) -> Tensor | None:
    """The same memory as numbers of eight bytes; None where it is not made of such."""
    count = 8 // x.element_size()
    edges = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    fits = x.stride(-1) == 1 and not any(edge % count for edge in edges)
    return x.view(torch.int64) if fits else None
