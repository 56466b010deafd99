"""Rows of the activation cache that stay on the device: what was computed or read there once is not read
again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petune.kernels.memory.private_pools import private_bytes
from petune.methods.row_keys import BatchRow

_WORDS = (torch.int64, torch.int32, torch.int16)


class CacheRoom:
    """The bytes of a device that rows of all stacks of a cache may take, all of them or none: a share, from 0
    to 1, of what is free when the first ones come, or of what somebody says, for whom it waits.

    Closed for good where not all rows fit: a few that stay would spare no batch its reading.
    """

    def __init__(self, share: float) -> None:
        self.share, self.taken = share, 0
        self.most: int | None = None
        self.closed, self.waits = not share, False

    def on(self, device: torch.device) -> bool:
        """Whether rows may stay on this device. On the CPU none do: the system keeps files in memory."""
        if self.waits:
            return False
        if self.most is None and not self.closed:
            free = free_bytes(device)
            self.most = None if free is None else int(self.share * free)
            self.closed = free is None
        return not self.closed

    def open(self, free: int) -> None:
        """Let rows stay from now on, in the share of `free` bytes."""
        self.most, self.waits = int(self.share * free), False

    def take(self, size: int) -> bool:
        """Whether rows of `size` bytes more fit; where they do not the room closes."""
        self.closed = self.closed or self.most is None or self.taken + size > self.most
        self.taken = 0 if self.closed else self.taken + size
        return not self.closed


def free_bytes(device: torch.device) -> int | None:
    """Of a device, what its allocator has in reserve included; None for the CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    granted = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
    idle = torch.cuda.memory_reserved(device) - allocated - private_bytes(device)
    return min(granted, free + idle)


def passing_bytes(device: torch.device) -> int:
    """The most that this process has allocated at once on a GPU, beyond what it holds now: what a step takes
    and leaves again, once there was one."""
    return int(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))


class HeldLevels:
    """The rows of one stack that stay on the device, by their keys: each as words [levels, tokens, words], of
    its values and, where it has some, of its scales. Copies of single bytes would be slow on a GPU."""

    def __init__(self, room: CacheRoom) -> None:
        self.room = room
        self._rows: dict[bytes, list[Tensor]] = {}

    def has(self, rows: Sequence[BatchRow]) -> bool:
        """Whether all of `rows` are here."""
        if self.room.closed:
            self._rows.clear()
        return all(row.key in self._rows for row in rows)

    def put(self, rows: Sequence[BatchRow], parts: Sequence[Tensor]) -> None:
        """Keep `rows` of a batch, uint8 [levels, batch, seq, bytes] on the device, while there is room."""
        if not self.room.on(parts[0].device):
            return
        words = [in_words(part) for part in parts]
        for at, row in enumerate(rows):
            if row.key in self._rows or self.room.closed:
                continue
            own = [part[:, at, row.first : row.first + row.tokens] for part in words]
            if self.room.take(sum(part.numel() * part.itemsize for part in own)):
                self._rows[row.key] = [part.clone(memory_format=torch.contiguous_format) for part in own]
        if self.room.closed:
            self._rows.clear()

    def get(self, rows: Sequence[BatchRow], shape: tuple[int, int]) -> list[Tensor]:
        """A batch [batch, seq] = `shape` of rows that are here, as `put` was given it, by one operation;
        zeros for padding."""
        found = [self._rows[row.key] for row in rows]
        gaps = [(row.first, shape[1] - row.first - row.tokens) for row in rows]
        batch = []
        for own in zip(*found, strict=True):
            levels, _, words = own[0].shape
            zeros = own[0].new_zeros((levels, max(map(max, gaps)), words))
            pieces = (
                (zeros[:, :before], part, zeros[:, :after])
                for part, (before, after) in zip(own, gaps, strict=True)
            )
            made = torch.cat([piece for three in pieces for piece in three if piece.shape[1]], 1)
            batch.append(made.view(levels, *shape, words).view(torch.uint8))
        return batch


def in_words(part: Tensor) -> Tensor:
    """uint8 [..., bytes] as the widest whole numbers that it can be seen as."""
    return part.view(next((one for one in _WORDS if part.shape[-1] % one.itemsize == 0), torch.uint8))


def blank_padding_(batch: Tensor, rows: Sequence[BatchRow]) -> None:
    """Zeros for what is no token of `rows`, in [levels, batch, seq, ...]."""
    for at, row in enumerate(rows):
        end = row.first + row.tokens
        for gap in (slice(0, row.first), slice(end, batch.shape[2])):
            if gap.start < gap.stop:
                batch[:, at, gap] = 0
