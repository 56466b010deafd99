"""Calls of CUDA's driver that torch has no form of, or one that takes the host ten times as long: streams
that write numbers into memory and wait for them, copies of rows that lie apart, events.

Streams, events and addresses are the driver's own numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from petune.errors import PetuneError


class CopySpan(NamedTuple):
    """What one copy moves: rows of `width` bytes that begin so many bytes apart."""

    to: int
    of: int
    width: int
    rows: int = 1
    to_pitch: int = 0
    of_pitch: int = 0


class CudaDriver:
    """The driver of NVIDIA's GPUs. Raises PetuneError where a call fails."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.library = device, ctypes.CDLL("libcuda.so.1")
        self.held: list[torch.cuda.Stream] = []
        number, address, word = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
        for name, kinds in {
            "cuEventCreate": (ctypes.POINTER(number), word),
            "cuEventRecord": (number, number),
            "cuStreamWaitEvent": (number, number, word),
            "cuStreamWriteValue32_v2": (number, address, word, word),
            "cuStreamWaitValue32_v2": (number, address, word, word),
            "cuStreamBatchMemOp_v2": (number, word, ctypes.POINTER(_Word), word),
            "cuMemcpyAsync": (address, address, ctypes.c_size_t, number),
            "cuMemcpy2DAsync_v2": (ctypes.POINTER(_Rows), number),
        }.items():
            getattr(self.library, name).argtypes = kinds

    def current(self) -> int:
        """The stream that torch launches on."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def stream(self) -> int:
        """A new stream, which lives as long as this."""
        self.held.append(torch.cuda.Stream(self.device))
        return self.held[-1].cuda_stream

    def event(self) -> int:
        """A new event, without a time."""
        made = ctypes.c_void_p()
        self._check(self.library.cuEventCreate(ctypes.byref(made), 2))  # CU_EVENT_DISABLE_TIMING
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        """The event is what was launched on the stream until now."""
        self._check(self.library.cuEventRecord(event, stream))

    def follow(self, stream: int, event: int) -> None:
        """The stream waits for the event as it is now."""
        self._check(self.library.cuStreamWaitEvent(stream, event, 0))

    def write(self, stream: int, address: int, number: int) -> None:
        """Write 32 bits once the stream has come here, behind what it wrote before."""
        self._check(self.library.cuStreamWriteValue32_v2(stream, address, number % 2**32, 0))

    def wait(self, stream: int, address: int, number: int) -> None:
        """The stream waits until this number is there, or a later one."""
        self._check(self.library.cuStreamWaitValue32_v2(stream, address, number % 2**32, 0))

    def capturing(self) -> bool:
        """Whether what is launched becomes part of a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def meeting(
        self, writes: Sequence[int], waits: Sequence[int], back: bool = False
    ) -> Callable[[int, int], None]:
        """A function of a stream and a number, which writes the number to the addresses `writes` and waits
        until it is at `waits`, as `write` and `wait` do, in one call. back: then it writes 0 to `waits`."""
        said = [(_WRITE, one) for one in writes] + [(_WAIT, one) for one in waits]
        every = said + [(_WRITE, one) for one in waits if back]
        words = (_Word * len(every))(*(_Word(operation=does, address=one) for does, one in every))
        spoken, call = range(len(said)), self.library.cuStreamBatchMemOp_v2

        def meet(stream: int, number: int) -> None:
            for at in spoken:
                words[at].value = number % 2**32
            self._check(call(stream, len(words), words, 0))

        return meet

    def copy(self, piece: CopySpan, stream: int) -> None:
        """Copy between memories that the device can reach."""
        to, of, width, rows, to_pitch, of_pitch = piece
        if not width * rows:
            return
        if rows == 1 or to_pitch == of_pitch == width:
            self._check(self.library.cuMemcpyAsync(to, of, width * rows, stream))
            return
        if max(to_pitch, of_pitch) > _PITCH:
            for row in range(rows):
                self.copy(CopySpan(to + row * to_pitch, of + row * of_pitch, width), stream)
            return
        found = _Rows(
            srcMemoryType=_UNIFIED,
            srcDevice=of,
            srcPitch=of_pitch,
            dstMemoryType=_UNIFIED,
            dstDevice=to,
            dstPitch=to_pitch,
            WidthInBytes=width,
            Height=rows,
        )
        self._check(self.library.cuMemcpy2DAsync_v2(ctypes.byref(found), stream))

    def _check(self, status: int) -> None:
        if status:
            name = ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(name))
            said = (name.value or b"an unknown error").decode()
            raise PetuneError(f"CUDA's driver refuses to let GPUs talk by copy engines: {said}")


_PITCH = 2**31 - 1  # bytes that rows of one copy may lie apart
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says which device
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32


class _Word(ctypes.Structure):
    """CUstreamBatchMemOpParams of 32 bits: wait until a number or a later one is there, or write it."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )
