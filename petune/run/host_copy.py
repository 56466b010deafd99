"""A state in host memory: where its tensors lie in one buffer, and the copy that fills it beside the device's
work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from petune.errors import MachineError
from petune.kernels.memory.offload import pin

_ALIGN = 64  # bytes: where a tensor begins in a buffer
_SMALL = 1 << 20  # bytes of a tensor that is gathered with others first


def aligned(value: Tensor) -> int:
    """Bytes that a tensor takes in a buffer."""
    return -(-value.nbytes // _ALIGN) * _ALIGN


class BufferLayout:
    """Where each tensor of a state lies in one buffer of bytes: first the small ones of a GPU, then all
    others.

    The small ones are gathered on the GPU, in `packed`, and leave it in one copy: a thousand copies of their
    own would take the host longer to begin than the device to make.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.seen = dict(tensors)  # those that are still these need not be looked at
        self.kinds = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        self.small = [name for name, value in tensors.items() if value.is_cuda and value.nbytes <= _SMALL]
        self.large = [name for name, value in tensors.items() if not value.is_cuda or value.nbytes > _SMALL]
        self.begins, self.end = {}, 0
        sizes = {name: aligned(value) for name, value in tensors.items()}
        for name in (*self.small, *self.large):
            self.begins[name] = self.end
            self.end += sizes[name]
        self.small_end = sum(sizes[name] for name in self.small)
        self.packed = torch.empty(self.small_end, dtype=torch.uint8, device=device)
        inside = self.views(self.packed, self.small)
        kinds = {value.dtype for value in inside.values()}  # one launch takes tensors of one dtype
        self.gathers = [
            {name: value for name, value in inside.items() if value.dtype is kind} for kind in kinds
        ]

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are tensors of the same names, shapes and dtypes."""
        return tensors.keys() == self.kinds.keys() and all(
            value is self.seen.get(name) or (value.shape, value.dtype) == self.kinds[name]
            for name, value in tensors.items()
        )

    def forget(self) -> None:
        """Let go of the tensors that it was made of: a state that is put back has others."""
        self.seen = {}

    def views(self, buffer: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Each of `names` as a tensor inside a buffer of bytes."""
        found = {}
        for name in names:
            (shape, dtype), begin = self.kinds[name], self.begins[name]
            found[name] = buffer[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        return found

    def gather(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the small ones to `packed`."""
        for inside in self.gathers:
            torch._foreach_copy_(list(inside.values()), [tensors[name] for name in inside])


class HostCopy:
    """One state in host memory, pinned where it comes from a GPU and the host allows it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self.layout: BufferLayout | None = None
        self.buffer: Tensor | None = None
        self.copied: torch.cuda.Event | None = None
        self.tensors: Mapping[str, Tensor] = {}

    @torch.no_grad()
    def fill(
        self, tensors: Mapping[str, Tensor], layout: BufferLayout, ready: torch.cuda.Event | None
    ) -> None:
        """Begin to copy; on a GPU this returns at once, and `tensors`, which are `ready` then, stay until
        `copied` has happened."""
        if layout is not self.layout:
            self._make_room(layout)
        large = [self.room[name] for name in layout.large], [tensors[name] for name in layout.large]
        self.tensors = self.room
        if self.stream is None:
            torch._foreach_copy_(*large)
            return
        assert ready is not None
        self.stream.wait_event(ready)
        with torch.cuda.stream(self.stream):
            layout.gather(tensors)
            assert self.buffer is not None
            self.buffer[: layout.small_end].copy_(layout.packed, non_blocking=True)
            if layout.large:
                torch._foreach_copy_(*large, non_blocking=True)
        self.copied = self.stream.record_event()

    def settle(self) -> None:
        """Let the device wait, before it changes what is copied, until that is whole."""
        if self.copied is not None and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.copied)

    def wait(self) -> None:
        """Wait, in this thread, until the copy is whole."""
        if self.copied is not None:
            self.copied.synchronize()

    def reserve(self, size: int) -> None:
        """Make room for a state of `size` bytes: one buffer, as torch pins memory in powers of two."""
        buffer = torch.empty(size, dtype=torch.uint8).zero_()  # written to, or the host gives none of it yet
        if self.stream is not None:
            try:
                pin(buffer)
            except MachineError as error:
                self._unpinned(size, error)
        self.buffer = buffer

    def _make_room(self, layout: BufferLayout) -> None:
        if self.buffer is None or len(self.buffer) < layout.end:
            self.reserve(layout.end)
        assert self.buffer is not None
        self.room = layout.views(self.buffer, layout.kinds)
        self.layout = layout

    def _unpinned(self, size: int, error: MachineError) -> None:
        """Go on, with slower copies, where the host locks no more memory."""
