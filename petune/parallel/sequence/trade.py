"""Tokens traded for columns: of a matrix that is cut by tokens every rank gets all tokens of some columns
(Jacobs et al. 2023, arXiv:2309.14509), and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petune.parallel.collectives import Sizes
from petune.parallel.link import Link


@dataclass(frozen=True)
class AllToAll:
    """Tokens of each rank, and of the matrices that lie side by side the columns of each by rank. A trade
    only moves elements, so its adjoint is the way back."""

    sizes: Sizes
    columns: Sequence[Sizes]
    link: Link
    index: int

    def to_heads(self, x: Tensor) -> Tensor:
        """[batch, own tokens, all columns] -> [batch, all tokens, own columns]."""
        wide, by = self._wide(x)
        pieces = self._pieces(wide, by)
        whole = wide.new_empty(len(x), sum(self.sizes), self.widths[self.index] // by)
        most = self._most(whole, by)
        if (engines := self.link.trading(most)) is not None:
            engines.fetch(pieces, whole, self.sizes, most)
            return whole.view(x.dtype)
        places = whole.split(list(self.sizes), 1)
        sent = {rank: torch.cat(part, -1) for rank, part in enumerate(pieces) if rank != self.index}
        torch.cat(pieces[self.index], -1, out=places[self.index])

        def put(come: Mapping[int, Tensor]) -> None:
            for rank, part in come.items():
                if part is not places[rank]:
                    places[rank].copy_(part)

        shapes = [place.shape for place in places]
        self._swap(sent, shapes, wide.dtype, lambda rank: _dense(places[rank]), most, put)
        return whole.view(x.dtype)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[batch, all tokens, own columns] -> [batch, own tokens, all columns]."""
        wide, by = self._wide(x.contiguous())
        places = wide.split(list(self.sizes), 1)
        shapes = [torch.Size((len(x), self.sizes[self.index], width // by)) for width in self.widths]
        sent = {rank: place for rank, place in enumerate(places) if rank != self.index}
        columns = [[matrix[rank] // by for matrix in self.columns] for rank in range(len(places))]
        whole = wide.new_empty(*shapes[self.index][:2], sum(map(sum, columns)))

        def put(come: Mapping[int, Tensor]) -> None:
            found = {self.index: places[self.index], **come}
            beside = [
                (found[rank] if rank in found else wide.new_empty(shape)).split(columns[rank], -1)
                for rank, shape in enumerate(shapes)
            ]
            torch.cat([of_rank[at] for at in range(len(self.columns)) for of_rank in beside], -1, out=whole)

        room, most = lambda rank: wide.new_empty(shapes[rank]), self._most(wide, by)
        self._swap(sent, shapes, wide.dtype, room, most, put)
        return whole.view(x.dtype)

    @property
    def widths(self) -> list[int]:
        """Columns of each rank, of all matrices."""
        return [sum(rank) for rank in zip(*self.columns, strict=True)]

    def _most(self, x: Tensor, by: int) -> int:
        """Bytes of the largest part that any rank has for another one, of rows of x."""
        return len(x) * max(self.sizes) * (max(self.widths) // by) * x.element_size()

    def _pieces(self, x: Tensor, by: int) -> list[list[Tensor]]:
        """Views of [batch, own tokens, all columns]: for each rank its columns of each matrix."""
        every = iter(x.split([columns // by for matrix in self.columns for columns in matrix], -1))
        matrices = [[next(every) for _ in matrix] for matrix in self.columns]
        return list(map(list, zip(*matrices, strict=True)))

    def _swap(
        self,
        sent: Mapping[int, Tensor],
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        room: Callable[[int], Tensor],
        most: int,
        put: Callable[[Mapping[int, Tensor]], None],
    ) -> None:
        """Have each other rank's part `put`, of these shapes, from its room or where the link has it; in one
        message. Who has no tokens or no columns is not talked to."""
        out = {rank: part for rank, part in sent.items() if part.numel()}
        into = {rank: shape for rank, shape in enumerate(shapes) if rank != self.index and shape.numel()}
        self.link.swap(out, into, dtype, room, most, put)

    def _wide(self, x: Tensor) -> tuple[Tensor, int]:
        """The same memory as numbers of eight bytes, and how many of x's own these are: a GPU copies strided
        numbers of two bytes at half its bandwidth. x itself where it is not made of such."""
        by = 8 // x.element_size()
        edges = (x.storage_offset(), *x.stride()[:-1], *(one for matrix in self.columns for one in matrix))
        fits = x.stride(-1) == 1 and not any(edge % by for edge in edges)
        return (x.view(torch.int64), by) if fits and by > 1 else (x, 1)


def _dense(part: Tensor) -> Tensor:
    """A part that lies in one piece, or room for one."""
    return part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
