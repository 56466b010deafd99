"""A stage of a pipeline whose neighbours are linked GPUs: what travels is copied by copy engines.

A kernel of NCCL that waits for a message keeps processors of the GPU busy meanwhile, and torch's schedules
wait for every message before the next pass. Here the sender leaves a message in its own memory and says its
number in the receiver's; the receiver's stream waits for that number where the stage reads the message, and
fetches it then (figures: benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from petune.errors import PetuneError
from petune.parallel.collectives import all_max_
from petune.parallel.cuda_driver import CopySpan
from petune.parallel.linked import Linked
from petune.parallel.peer_memory import aligned

# messages of a channel that may lie there; schedules run no further ahead than ranks (see the tests)
SLOTS = 4


class Transfers(Linked):
    """What stages send, over all ranks of a pipeline: stage s lies on rank s % ranks. Each stage has a
    channel to the next one and one back, whose messages are received in order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, stages: int) -> None:
        super().__init__(group, device)
        self.channels, self.room_bytes, self.slots = 2 * stages, 0, max(SLOTS, self.ranks)
        self.sent, self.received = Counter[int](), Counter[int]()
        # (stage that sends, back, micro-batch): where a message is to lie that is not there yet
        self.due: dict[tuple[int, bool, int], list[Tensor]] = {}
        # at the receiver how many of a channel are there, at the sender how many are taken
        self.flags, self.flags_of = self._flags(2 * self.channels)

    def reserve(self, size: int) -> None:
        """Have room for messages of at most so many bytes on any rank. All ranks call it together, where
        nothing is on its way."""
        wanted = torch.tensor([size], device=self.device)
        all_max_([wanted], self.group)
        if int(wanted) > self.room_bytes:  # at least twice as large, as the memory left does not come back
            self._together()
            self.room_bytes = max(int(wanted), 2 * self.room_bytes)
            size = rooms_of(self.channels // 2, self.ranks, self.room_bytes)
            self.own, self.every = self._shared(size)

    def settle(self) -> None:
        """Raise PetuneError where a stage was to read a message and has not."""
        if self.due:
            stage, back, piece = min(self.due)
            way = "back" if back else "on"
            what = f"stage {stage} of the pipeline sent micro-batch {piece} {way}, and nobody has read it"
            remedy = "use a version of torch that petune is tested with"
            raise PetuneError(what, found=f"torch {torch.__version__}", remedy=remedy)

    def send(self, stage: int, back: bool, tensors: Sequence[Tensor]) -> None:
        """Leave a message of `stage` to the one before it or behind it."""
        channel, to = 2 * stage + back, (stage - 1 if back else stage + 1) % self.ranks
        self.sent[channel] += 1
        number, stream = self.sent[channel], self.driver.current()
        if number > self.slots:  # the slot is free
            self.driver.wait(stream, self._flag(self.rank, channel, taken=True), number - self.slots)
        start = self._slot(self.rank, channel, number)
        for value, place in placed(tensors):
            value = value.contiguous()
            self.driver.copy(CopySpan(start + place, value.data_ptr(), value.nbytes), stream)
        self.driver.write(stream, self._flag(to, channel), number)

    def receive(self, stage: int, back: bool, tensors: Sequence[Tensor]) -> None:
        """Fetch the next message of `stage` into `tensors`, which are dense."""
        channel, of = 2 * stage + back, stage % self.ranks
        self.received[channel] += 1
        number, stream = self.received[channel], self.driver.current()
        self.driver.wait(stream, self._flag(self.rank, channel), number)
        start = self._slot(of, channel, number)
        for value, place in placed(tensors):
            self.driver.copy(CopySpan(value.data_ptr(), start + place, value.nbytes), stream)
        self.driver.write(stream, self._flag(of, channel, taken=True), number)

    def _flag(self, rank: int, channel: int, taken: bool = False) -> int:
        return self.flags_of[rank].data_ptr() + 4 * (channel + self.channels * taken)

    def _slot(self, rank: int, channel: int, number: int) -> int:
        stage, back = divmod(channel, 2)
        own = 2 * (stage // self.ranks) + back
        return self.every[rank].data_ptr() + (own * self.slots + number % self.slots) * self.room_bytes


def rooms_of(stages: int, ranks: int, message: int) -> int:
    """Bytes of a rank's memory in which messages of `message` bytes lie."""
    return 2 * -(-stages // ranks) * max(SLOTS, ranks) * message


def placed(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Each with where it begins in its message."""
    ends = accumulate((aligned(value.nbytes) for value in tensors), initial=0)
    return zip(tensors, ends, strict=False)


def message_bytes(tensors: Sequence[Tensor]) -> int:
    """Of a message of these."""
    return sum(aligned(value.nbytes) for value in tensors)


class LinkedStage(PipelineStage):
    """torch's stage, whose schedules are given nothing to send: what they ask for is done by `transfers`."""

    def __init__(self, transfers: Transfers, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.transfers = transfers

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send what the stage has made."""
        return self._send(False, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of what came in."""
        return self._send(True, super().get_bwd_send_ops(bwd_chunk_id))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Note where what comes in is to lie."""
        return self._expect(False, fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Note where gradients are to lie."""
        return self._expect(True, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._fetch(False, fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._fetch(True, bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _send(self, back: bool, operations: Sequence[dist.P2POp]) -> list[dist.P2POp]:
        if operations:
            self.transfers.send(self.stage_index, back, [one.tensor.detach() for one in operations])
        return []

    def _expect(self, back: bool, piece: int, operations: Sequence[dist.P2POp]) -> list[dist.P2POp]:
        if operations:
            self.transfers.due[self._source(back), back, piece] = [one.tensor.detach() for one in operations]
        return []

    def _fetch(self, back: bool, piece: int) -> None:
        source = self._source(back)
        if (tensors := self.transfers.due.pop((source, back, piece), None)) is not None:
            self.transfers.receive(source, back, tensors)

    def _source(self, back: bool) -> int:
        """The stage that sends it gradients, or what comes in."""
        return self.stage_index + (1 if back else -1)
