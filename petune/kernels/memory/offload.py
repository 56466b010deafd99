"""Kept tensors in pinned host memory between forward and backward pass, copied beside the computation.

Blocks park tensors in the order of the forward pass and fetch them in the reverse order, so fetching one
block's starts the copy of the next one's: two blocks' tensors are on the device at most, and copies hide
behind a block's work. Of several passes that are on the way at once each has an order of its own, and the
last fetch of one starts the first copy of the pass that goes back after it. Host buffers are pinned at their
exact size (torch's own pinned allocator rounds up to a power of two) and used again by later steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petune.errors import MachineError
from petune.log import human
from petune.rng.context import running


@dataclass(frozen=True, eq=False)
class Passing:
    """One of several passes that are on the way at once, as `running().passing` names it.

    follower: the pass that goes back after it, None for the last; standing: bytes on the device before the
    first of them began; late: where blocks leave products of weights for a pass of their own
    (petune.kernels.block.rows.Late), None where their backward pass makes them.
    """

    follower: Passing | None = None
    standing: int = 0
    late: list[Any] | None = None


class Parked:
    """Tensors of one block on the host, and back on the device once they are needed."""

    def __init__(self, store: Store, host: dict[str, Tensor], like: Mapping[str, Tensor]) -> None:
        self.store, self.host, self.passing = store, host, running().passing
        self.shapes = {name: (value.shape, value.dtype) for name, value in like.items()}
        self.copied: torch.cuda.Event | None = None
        self.back: dict[str, Tensor] | None = None

    def __del__(self) -> None:
        self.store.give_back(self)


class Store:
    """Where the blocks of one device park what they keep. On a CPU it holds copies, so that the order can be
    tested.

    limit: bytes of host memory to pin at most, None for as much as the host gives.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device, self.limit = device, limit
        self.waiting: dict[Passing | None, list[weakref.ref[Parked]]] = {}
        self.free: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self.pinned = 0  # bytes
        cuda = device.type == "cuda"
        self.out, self.into = (torch.cuda.Stream(device) if cuda else None for _ in range(2))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins empty: streams and pinned memory are those of the blocks they serve."""
        return Store, (self.device, self.limit)

    def park(self, tensors: Mapping[str, Tensor]) -> Parked:
        """Begin to copy `tensors` to the host; they may be dropped at once."""
        parked = Parked(self, {name: self._buffer(value.nbytes) for name, value in tensors.items()}, tensors)
        if self.out is not None:
            self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            for name, value in tensors.items():
                parked.host[name][: value.nbytes].copy_(
                    value.reshape(-1).view(torch.uint8), non_blocking=True
                )
                if self.out is not None:
                    value.record_stream(self.out)
            parked.copied = self._event(self.out)
        alive = {passing: self._waiting(passing) for passing in self.waiting}
        alive.setdefault(parked.passing, []).append(parked)
        self.waiting = {passing: list(map(weakref.ref, order)) for passing, order in alive.items() if order}
        return parked

    def fetch(self, parked: Parked) -> dict[str, Tensor]:
        """The tensors on the device again, once; begins to bring back those of the block before, in this pass
        or, at its first block, in the pass that goes back next."""
        passing = parked.passing
        order = self._waiting(passing)
        at = order.index(parked)
        self.waiting[passing] = [weakref.ref(other) for other in order if other is not parked]
        if not self.waiting[passing]:
            del self.waiting[passing]
        self._bring(parked)
        found, parked.back = parked.back, None
        assert found is not None
        if self.into is not None:
            torch.cuda.current_stream(self.device).wait_event(parked.copied)  # type: ignore[arg-type]  # there is one where there is a stream
        following = self._waiting(passing.follower) if passing is not None and not at else []
        for ahead in order[:at][-1:] + following[-1:]:
            self._bring(ahead)
        return found

    def _waiting(self, passing: Passing | None) -> list[Parked]:
        """What waits of one pass, in the order in which it was parked."""
        return [parked for ref in self.waiting.get(passing, ()) if (parked := ref()) is not None]

    def _bring(self, parked: Parked) -> None:
        """Begin to copy to the device. Its memory may have been in use until now, so the copy waits for the
        computing stream."""
        if parked.back is not None:
            return
        parked.back = {
            name: torch.empty(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in parked.shapes.items()
        }
        if self.into is not None:
            self.into.wait_stream(torch.cuda.current_stream(self.device))
            self.into.wait_event(parked.copied)  # type: ignore[arg-type]  # there is one where there is a stream
        with torch.cuda.stream(self.into):
            for name, value in parked.back.items():
                value.view(-1).view(torch.uint8).copy_(parked.host[name][: value.nbytes], non_blocking=True)
            parked.copied = self._event(self.into)

    def give_back(self, parked: Parked) -> None:
        """Let later blocks have the host buffers, once the last copy is through."""
        if self.into is not None:
            for value in (parked.back or {}).values():
                value.record_stream(self.into)  # brought back for a backward pass that never came
        self.free += [(buffer, parked.copied) for buffer in parked.host.values()]

    def _buffer(self, size: int) -> Tensor:
        """A host buffer of `size` bytes or more: the smallest free one up to twice as large, or a new one."""
        sizes = ((buffer.nbytes, at) for at, (buffer, _) in enumerate(self.free))
        fitting = [(held, at) for held, at in sizes if size <= held <= 2 * size]
        if fitting:
            buffer, event = self.free.pop(min(fitting)[1])
            if event is not None and self.out is not None:
                self.out.wait_event(event)
            return buffer
        step = 1 << max(0, size.bit_length() - 4)  # batches of unequal length find buffers of each other's
        size = -(-size // step) * step
        if self.limit is not None and self.pinned + size > self.limit:
            self._forget(self.pinned + size - self.limit)
        buffer = torch.empty(size, dtype=torch.uint8)
        if self.device.type == "cuda" and size:
            pin(buffer)
        self.pinned += size
        return buffer

    def _forget(self, size: int) -> None:
        """Drop free buffers of at least `size` bytes. Raises MachineError where there are not as many."""
        while size > 0 and self.free:
            buffer, event = self.free.pop()
            if event is not None:
                event.synchronize()
            self.pinned -= buffer.nbytes
            size -= buffer.nbytes
        if size > 0:
            found = f"{human(self.pinned)} pinned, {human(size)} more needed"
            remedy = "set memory.host higher, or memory: {offload: none}"
            raise MachineError(
                "offloaded activations need more host memory than they may have", found=found, remedy=remedy
            )

    @staticmethod
    def _event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        return None if stream is None else stream.record_event()


def pin(buffer: Tensor) -> None:
    """Page-lock a host tensor in place until it is freed. Raises MachineError where no more can be."""
    runtime = torch.cuda.cudart()
    address = buffer.data_ptr()
    if int(runtime.cudaHostRegister(address, buffer.nbytes, 0)) != 0:
        remedy = "set memory.host lower, or memory: {offload: none}"
        raise MachineError(
            f"the host could not lock {human(buffer.nbytes)} of memory to copy to and from", remedy=remedy
        )
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)
