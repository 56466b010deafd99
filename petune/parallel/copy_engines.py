"""What ranks of one host say to one another by the copy engines of their GPUs, while kernels compute.

A collective of NCCL is a kernel: it keeps processors of the GPU busy that products beside it then lack. Here
parts are written into the memory of the other GPUs, or read from it (peer_memory.py), by copies, and streams
wait for one another by numbers in that memory, so that no kernel is launched but the one that adds up.

Every rank has two rooms, used in turns. Whoever fills a room again has met the others since they read it: a
meeting lies between any two turns. A room that is too small is left for one at least twice as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from petune.kernels.block.turns import later
from petune.kernels.dispatch import DTYPES, reference_ops, select
from petune.parallel.cuda_driver import CopySpan
from petune.parallel.linked import Linked
from petune.parallel.peer_memory import aligned

_GRAIN = 2**21  # bytes
NUMBERS = 16  # bytes, at multiples of which numbers of any dtype may begin


class CopyEngines(Linked):
    """Collectives of linked ranks, which call alike, in one order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        # each begins with another one, so not all write to the same; at last this rank itself
        self.ranked = [(self.rank + step) % self.ranks for step in range(1, self.ranks + 1)]
        self.others = self.ranked[:-1]
        self.sides = [(self.driver.stream(), self.driver.event()) for _ in self.others]
        self.ops = select("auto", device, torch.bfloat16) or reference_ops()  # of all of DTYPES
        self.begin, self.before, self.behind = (self.driver.event() for _ in range(3))
        self.stream = self.driver.current()  # on which was spoken last
        self.room_bytes = self.turn = self.meetings = 0
        self.every: Sequence[Tensor] = ()  # rooms of each rank
        self.open: MessageEnd | None = None  # of what was said last, if it waits for who comes back
        self.flags, self.flags_of = self._flags(3 * self.ranks)
        self.met, *self.met_again = (self._meeting(at) for at in range(3))
        self.again: int | None = None  # meetings of the recording that is being made
        self.recordings: list[Sequence[Tensor]] = []  # whose rooms they use

    def _meeting(self, at: int) -> Callable[[int, int], None]:
        """How streams meet by the flags of that number, which all but the first are put back."""
        first = at * self.ranks
        return self.driver.meeting(
            [self.flags_of[rank].data_ptr() + 4 * (first + self.rank) for rank in self.others],
            [self.flags.data_ptr() + 4 * (first + rank) for rank in self.others],
            at > 0,
        )

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """What is said inside is part of a CUDA graph, if one is being captured. All ranks replay theirs in
        the same order.

        Its meetings cannot count, so they put their flags back, and take turns with two: who comes to a
        meeting again has met the others at the next one since, who had put back theirs by then. So their
        number is even. The first and the last keep the rooms apart from those of whatever is said before and
        behind it.
        """
        if not self.driver.capturing():
            yield
            return
        before = self.stream, self.turn
        self.stream, self.again = self.driver.current(), 0
        try:
            self._meet()
            yield
            self._speak_here()
            for _ in range(2 - self.again % 2):
                self._meet()
            if not any(rooms is self.every for rooms in self.recordings):
                self.recordings.append(self.every)
        finally:  # nothing was said yet, and it may have failed on one rank
            (self.stream, self.turn), self.again, self.open = before, None, None

    def all_reduce(self, x: Tensor, own: bool = False) -> Tensor:
        """The sum over the ranks, rounded once; in the place of `x` where it is the caller's `own`."""
        x = x.contiguous()
        found = x if own else torch.empty_like(x)
        if self.ranks == 2:
            return self._add_other(CopySpan(0, x.data_ptr(), x.nbytes), x.nbytes, x, found)
        item, count = x.element_size(), -(-x.numel() // self.ranks)
        step = count * item
        sizes = [max(0, min(count, x.numel() - rank * count)) for rank in range(self.ranks)]
        rooms = self._turn((self.ranks + 1) * step)
        begin, own_term = x.data_ptr(), self.rank * step
        self._copy(CopySpan(rooms[to] + own_term, begin + to * step, sizes[to] * item) for to in self.ranked)
        self._meet()
        terms = self._view((self.ranks + 1, count), x.dtype)[:, : sizes[self.rank]]
        into, total = found.data_ptr(), self.ranks * step

        def gather() -> None:
            self._meet()
            self._copy(CopySpan(into + of * step, rooms[of] + total, sizes[of] * item) for of in self.ranked)

        self.end(partial(self._add, terms[:-1], terms[-1]), gather)
        return found

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """[b, all tokens, ...], one term of a sum -> the own tokens of the sum, which is rounded once. sizes:
        tokens of each rank."""
        x = x.contiguous()
        rows, starts, widths = _columns(x, sizes)
        pitch, start = sum(widths), x.data_ptr()
        own = x.new_empty(rows, sizes[self.rank], *x.shape[2:])
        if self.ranks == 2:
            (other,) = self.others
            sent = CopySpan(0, start + starts[other], widths[other], rows, widths[other], pitch)
            kept = x.narrow(1, sum(sizes[: self.rank]), sizes[self.rank])
            return self._add_other(sent, rows * max(widths), kept, own)
        rooms = self._turn(self.ranks * rows * max(widths))
        before = self.rank * rows
        self._copy(
            CopySpan(rooms[to] + before * widths[to], start + starts[to], widths[to], rows, widths[to], pitch)
            for to in self.ranked
        )
        self._meet()
        terms = self._view((self.ranks, own.numel()), x.dtype)
        self.end(partial(self._add, terms, own.view(-1)))
        return own

    def _add_other(self, sent: CopySpan, most: int, kept: Tensor, found: Tensor) -> Tensor:
        """`found`, the sum, rounded once, of what this rank has kept and the only other one has sent: one
        meeting, and nothing of its own is copied. sent: to wherever it has room; most: bytes of the larger of
        both messages."""
        rooms = self._turn(most)
        self._copy((sent._replace(to=rooms[self.others[0]]),))
        self._meet()
        self.end(partial(torch.add, kept, self._view(kept.shape, kept.dtype), out=found))
        return found

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """[b, own tokens, ...] -> [b, all tokens, ...]. sizes: tokens of each rank."""
        x = x.contiguous()
        whole = x.new_empty(len(x), sum(sizes), *x.shape[2:])
        rows, starts, widths = _columns(whole, sizes)
        pitch, start = sum(widths), whole.data_ptr()
        rooms = self._turn(rows * max(widths))
        self._copy((CopySpan(rooms[self.rank], x.data_ptr(), x.nbytes),))
        self._meet()
        self._copy(
            CopySpan(start + starts[of], rooms[of], widths[of], rows, pitch, widths[of]) for of in self.ranked
        )
        return whole

    def swap(
        self, sent: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype, most: int
    ) -> dict[int, Tensor]:
        """What each other rank has sent, of these shapes; to be read before the next but one is said. sent:
        rows that are dense, wherever they begin. most: bytes of the largest part of any rank, the same on
        all of them."""
        most = aligned(most, NUMBERS)
        rooms, own_part = self._turn(self.ranks * most), self.rank * most
        self._copy(_dense_copy(rooms[to] + own_part, part) for to, part in sent.items())
        self._meet()
        return {of: self._view(shape, dtype, of * most) for of, shape in shapes.items()}

    def fetch(self, parts: Sequence[list[Tensor]], whole: Tensor, sizes: Sequence[int], most: int) -> None:
        """Fill `whole` [b, all tokens, columns] with what each rank has for this one. parts: for each rank
        matrices [b, own tokens, some columns], which it gets side by side. sizes: tokens of each rank; most:
        see `swap`."""
        most = aligned(most, NUMBERS)
        rows, starts, widths = _columns(whole, sizes)
        pitch, start, own_part = sum(widths), whole.data_ptr(), self.rank * most
        rooms = self._turn(self.ranks * most)
        for to, matrices in enumerate(parts):
            columns = sum(matrix.shape[-1] for matrix in matrices)
            room = self._view((rows, sizes[self.rank], columns), whole.dtype, to * most)
            self._pack(matrices, room)
        self._meet()
        self._copy(
            CopySpan(start + starts[of], rooms[of] + own_part, widths[of], rows, pitch, widths[of])
            for of in self.ranked
        )

    def _turn(self, size: int) -> list[int]:
        """Where a room of `size` bytes begins on every rank, behind all that was said on any stream."""
        self._speak_here()
        if self.open is not None:
            self.open.at_once()
            self.open = None
        if size > self.room_bytes:
            self._grow(size)
        self.turn += 1
        return [start + self.turn % 2 * self.room_bytes for start in self.starts]

    def _speak_here(self) -> None:
        """Go on on the stream of the caller, behind all that was said before."""
        stream = self.driver.current()
        if stream != self.stream:
            self.driver.record(self.before, self.stream)
            self.driver.follow(stream, self.before)
            self.stream = stream

    def _view(self, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> Tensor:
        """Numbers in this rank's room of this turn."""
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.own[self.turn % 2 * self.room_bytes + start :][:size].view(dtype).view(shape)

    def _pack(self, matrices: list[Tensor], room: Tensor) -> None:
        """Lay matrices side by side in a room."""
        torch.cat(matrices, -1, out=room)

    def grown(self, size: int) -> int:
        """Bytes of a room once a message has needed so many."""
        if size <= self.room_bytes:
            return self.room_bytes
        return max(aligned(size, _GRAIN), 2 * self.room_bytes)

    def _grow(self, size: int) -> None:
        """Make larger rooms, while nobody reads the former ones, whose memory does not come back."""
        self._together()
        self.room_bytes = self.grown(size)
        self.own, self.every = self._shared(2 * self.room_bytes)
        self.starts = [part.data_ptr() for part in self.every]

    def end(self, work: Callable[[], object], after: Callable[[], None] | None = None) -> None:
        """Do at once what is left of a message, or leave it to who will come back for it."""
        left, end = later(), MessageEnd(self, work, after)
        if left is None:
            end.finish()
        else:
            self.open = end
            left.append(end)

    def _add(self, terms: Tensor, out: Tensor) -> None:
        """Write the sum of [ranks, m] into `out` [m], rounded once."""
        ops = self.ops if out.dtype in DTYPES else reference_ops()
        ops.total(terms, out.dtype, out)

    def _meet(self) -> None:
        """Let the stream wait until those of all ranks have come as far."""
        if self.again is None:
            self.meetings += 1
            self.met(self.stream, self.meetings)
        else:
            self.met_again[self.again % 2](self.stream, 1)
            self.again += 1

    def _copy(self, pieces: Iterable[CopySpan]) -> None:
        """Copies, side by side; the last one on the stream itself. Of two in a recording, whose messages are
        small or hidden, the second takes less time than going apart and coming together."""
        driver, current, every = self.driver, self.stream, list(pieces)
        few = self.again is not None and len(every) == 2
        beside = [] if few else list(zip(every[:-1], self.sides, strict=False))
        if beside:
            driver.record(self.begin, current)
        for piece, (stream, event) in beside:
            driver.follow(stream, self.begin)
            driver.copy(piece, stream)
            driver.record(event, stream)
        for piece in every[len(beside) :]:
            driver.copy(piece, current)
        for _, (_, event) in beside:
            driver.follow(current, event)


class MessageEnd:
    """The end of a message, for which kernels are needed: `work` on what has come, then perhaps more is said.

    Called, it works on the stream of the caller, who has waited for the message, and gives what is to be said
    after it. But before anything else is said it ends where that is said, as rooms are written again.
    """

    def __init__(
        self, engines: CopyEngines, work: Callable[[], object], after: Callable[[], None] | None
    ) -> None:
        self.engines, self.work, self.after, self.ended = engines, work, after, False

    def __call__(self) -> Callable[[], None] | None:
        if self.ended:
            self.engines.driver.follow(self.engines.driver.current(), self.engines.behind)
            return None
        if self.engines.open is self:
            self.engines.open = None
        self.work()
        return self.after

    def at_once(self) -> None:
        """All of it, because something else is to be said. Of two passes that go in turns, one has come back
        for its own before the other's is ended so."""
        self.finish()
        self.ended = True
        self.engines.driver.record(self.engines.behind, self.engines.stream)

    def finish(self) -> None:
        """All of it, on the stream of what is said."""
        self.work()
        if self.after is not None:
            self.after()


class ForetoldEngines(CopyEngines):
    """Those of so many GPUs that need not be here: they say what rooms they would have."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.room_bytes = ranks, 0


def _dense_copy(to: int, part: Tensor) -> CopySpan:
    """To where `part`, of which each row is dense, lies in one piece."""
    size, item = part[:1].nbytes, part.element_size()
    return CopySpan(to, part.data_ptr(), size, len(part), size, part.stride(0) * item)


def _columns(x: Tensor, sizes: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """Rows of [b, all tokens, ...]; where each rank's tokens begin in one and their length, in bytes."""
    token = x.element_size() * x.shape[2:].numel()
    widths = [size * token for size in sizes]
    return len(x), [sum(widths[:rank]) for rank in range(len(widths))], widths
