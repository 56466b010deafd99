"""How the ranks that share a block talk inside it: through their group, or by the copy engines of their GPUs.

Copy engines are faster between two GPUs, and for messages that every rank writes to every other one. Among
more, sums and gathers go through rings of NCCL's as fast, and copy engines pay where other work is to hide
what is said (figures: benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from petune.kernels.block.turns import then
from petune.models.boundary import SharedByCopies
from petune.parallel.collectives import GATHER_SEQ, REDUCE, REDUCE_SCATTER_SEQ, MaybeGroup, Sizes, least_of
from petune.parallel.copy_engines import CopyEngines
from petune.parallel.launch.lasting import LastingGroup

LARGE = 2**20  # bytes of a message from which copy engines pay


class Crossing(SharedByCopies):
    """What boundaries and exchanges have in common (see petune.models.boundary, petune.models.exchange)."""

    group: MaybeGroup
    overlapped: bool
    engines: CopyEngines | None

    @property
    def link(self) -> Link:
        """How they talk inside fused blocks."""
        return Link(self.group, self.engines, self.overlapped)

    def least(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """The least of each number among the ranks, on all of them."""
        return least_of(numbers, device, self.group)

    @property
    def recordable(self) -> bool:
        """Whether what is said may be part of a recording, which knows a group as it is now: not where ranks
        may be replaced."""
        return not isinstance(self.group, LastingGroup)

    def recorded(self) -> AbstractContextManager[None]:
        """What is said inside may become part of a recording, which all ranks replay in the same order."""
        return nullcontext() if self.engines is None else self.engines.recorded()


@dataclass(frozen=True)
class Link:
    """Among the ranks of `group`. hidden: other work hides what is said. What is small goes through the group
    in any case; how large a message is, is reckoned so that all ranks find the same."""

    group: MaybeGroup
    engines: CopyEngines | None = None
    hidden: bool = False

    @property
    def ranks(self) -> int:
        """Of the group, or foretold ones."""
        if self.engines is not None:
            return self.engines.ranks
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def terms(self) -> int:
        """Of a sum, those that copy engines bring to one rank: of two ranks the other's alone."""
        return self.ranks if self.ranks > 2 else 1

    def all_reduce(self, x: Tensor, own: bool = False) -> Tensor:
        """The sum over the ranks; in the place of `x` where that is the caller's `own`."""
        engines = self._engines(x.nbytes)
        return REDUCE.ahead(x, self.group, own) if engines is None else engines.all_reduce(x, own)

    def gather(self, x: Tensor, sizes: Sizes) -> Tensor:
        """[b, own tokens, ...] -> [b, all tokens, ...]."""
        engines = self._engines(len(x) * sum(sizes) * x.shape[2:].numel() * x.element_size())
        return GATHER_SEQ.ahead(x, sizes, self.group) if engines is None else engines.gather(x, sizes)

    def reduce_scatter(self, x: Tensor, sizes: Sizes) -> Tensor:
        """[b, all tokens, ...], one term of a sum -> the sum's own tokens."""
        if (engines := self._engines(x.nbytes)) is None:
            return REDUCE_SCATTER_SEQ.ahead(x, sizes, self.group)
        return engines.reduce_scatter(x, sizes)

    def swap(
        self,
        sent: Mapping[int, Tensor],
        shapes: Mapping[int, Sequence[int]],
        dtype: torch.dtype,
        room: Callable[[int], Tensor],
        most: int,
        put: Callable[[Mapping[int, Tensor]], object],
    ) -> None:
        """Send each other rank its part, in one message, and receive theirs, of these shapes: in the `room`
        of each rank, or where the next but one message of the ranks lies, for `put` to read. Each row of a
        part is dense; most: bytes of the largest of any rank."""
        if (engines := self.trading(most)) is not None:
            engines.end(partial(put, engines.swap(sent, shapes, dtype, most)))
            return
        rooms = {rank: room(rank) for rank in shapes}
        sent = {rank: part.contiguous() for rank, part in sent.items()}
        operations = [
            dist.P2POp(does, part, group=self.group, group_peer=rank)
            for does, parts in ((dist.isend, sent), (dist.irecv, rooms))
            for rank, part in parts.items()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        then(partial(put, rooms))

    def trading(self, most: int) -> CopyEngines | None:
        """Those by which parts of at most so many bytes go from each rank to each other."""
        return self.engines if most >= LARGE else None

    def room_bytes(self, size: int, swapped: bool = False) -> tuple[int, int]:
        """Bytes that stand for messages which need so many, and bytes to come for them. swapped: they are
        those of `swap`."""
        engines = self.engines if swapped else self._engines(LARGE)
        if engines is None:
            return 0, 0
        stand, grown = engines.room_bytes, engines.grown(size)
        return 2 * stand, 2 * grown * (grown > stand)

    def _engines(self, size: int) -> CopyEngines | None:
        """Those by which a sum or a gather of so many bytes goes."""
        found = self.engines
        return found if found is not None and size >= LARGE and (self.hidden or found.ranks == 2) else None
