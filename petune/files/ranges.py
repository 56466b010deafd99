"""Boxes of tensors, read as ranges of safetensors files into memory that is there already.

A box is a part of a tensor that is narrowed along any of its dims: where it begins, and its size. Files are
read and never mapped: a file that changes after its header was read is an error, no SIGBUS. Where a box takes
the tensor's rows whole, its bytes lie one behind the other; where it takes a part of each row, short parts
cost less in whole rows than by a read each. Beside what it fills, a read holds one portion.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from petune.errors import FileError
from petune.files.safetensors import Header, bytes_of, open_regular, reading, refuse_no_truths

PORTION = 4 << 20  # bytes that are read at once where they cannot go where they belong
LONG_RUN = 16 << 10  # bytes of a row from which on a read for each row costs less than whole rows

_WILL_NEED: Any = getattr(os, "posix_fadvise", None)  # which only Linux has

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that is a whole tensor of a file: `source` there, `size` from `at` on here."""

    source: str
    at: Sizes
    size: Sizes


@dataclass(frozen=True)
class SharedBox:
    """What a box and a piece share, `size` of it: from `inside` on in the box, from `there` on in the
    source."""

    inside: Sizes
    there: Sizes
    size: Sizes


def overlap(piece: Piece, start: Sequence[int], size: Sequence[int]) -> SharedBox | None:
    """What the box of `size` from `start` on shares with a piece of the same tensor; None for nothing."""
    if start and not start[0] - piece.size[0] < piece.at[0] < start[0] + size[0]:
        return None  # as almost all of many experts
    low = [max(own, at) for own, at in zip(start, piece.at, strict=True)]
    ends = zip(start, size, piece.at, piece.size, strict=True)
    shared = tuple(min(own + n, at + m) - first for first, (own, n, at, m) in zip(low, ends, strict=True))
    if any(count <= 0 for count in shared):
        return None
    inside = tuple(first - own for first, own in zip(low, start, strict=True))
    return SharedBox(inside, tuple(first - at for first, at in zip(low, piece.at, strict=True)), shared)


@dataclass(frozen=True)
class RowSpan:
    """Where a box lies in a tensor of rows: `count` rows of `width` elements, of which [first, first +
    taken) are its own, the first row beginning at element `offset` of the tensor."""

    offset: int
    count: int
    width: int
    first: int
    taken: int


def runs(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[RowSpan]:
    """The box of `size` from `start` on in a tensor of `shape`, as few runs of rows in the order of its
    elements."""
    dims = list(zip(shape, start, size, strict=True))
    width = 1
    while dims and dims[-1][0] == dims[-1][2]:  # taken whole: part of a longer row
        width *= dims.pop()[0]
    if not dims:
        yield RowSpan(0, 1, width, 0, width)
        return
    whole, first, taken = (width * part for part in dims.pop())
    if not dims:
        yield RowSpan(first, 1, taken, 0, taken)
        return
    _, row, count = dims.pop()
    before = [length for length, _, _ in dims]
    for at in _places(before, [range(begin, begin + number) for _, begin, number in dims]):
        yield RowSpan((at * shape[len(before)] + row) * whole, count, whole, first, taken)


def _places(lengths: Sequence[int], ranges: Sequence[range]) -> Iterator[int]:
    """The flat numbers of all places in `ranges`, a range for each dim of these lengths, in order."""
    if not ranges:
        yield 0
        return
    inner = math.prod(lengths[1:])
    for number in ranges[0]:
        for rest in _places(lengths[1:], ranges[1:]):
            yield number * inner + rest


@dataclass(frozen=True)
class TensorSource:
    """A tensor of a file: dtype, shape, and its first and last byte in the file."""

    path: Path
    dtype: torch.dtype
    shape: Sizes
    begin: int
    end: int


def sources(headers: Mapping[Path, Header]) -> dict[str, TensorSource]:
    """Every tensor of these files by its name; of two with one name, that of the later file."""
    return {
        name: TensorSource(
            path, entry.dtype, entry.shape, header.start + entry.begin, header.start + entry.end
        )
        for path, header in headers.items()
        for name, entry in header.tensors.items()
    }


class RangeReader:
    """Reads boxes of the tensors of some files, which stay open as long as the block lasts.

    Raises FileError for a file that is not the one whose header was read, or that becomes shorter meanwhile,
    and for a truth value that is neither 0 nor 1; MachineError when the system refuses.
    """

    def __init__(self, found: Mapping[str, TensorSource]) -> None:
        self.sources = found
        self._files: dict[Path, FileIO] = {}
        self._room = bytearray(0)
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        self._files, self._room = {}, bytearray(0)

    def read(self, name: str, out: Tensor, start: Sequence[int], by: torch.dtype | None = None) -> None:
        """Fill `out`, of any dtype and device, with the box of its shape that begins at `start`.

        by: the dtype that values are rounded to on their way.
        """
        source = self.sources[name]
        if not out.numel():
            return
        if not out.is_contiguous():
            made = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self.read(name, made, start, by)
            out.copy_(made)
            return
        flat, at = out.detach().view(-1), 0
        for run in runs(source.shape, start, out.shape):
            self._run(source, name, run, flat[at : at + run.count * run.taken], by)
            at += run.count * run.taken

    def expect(self, name: str) -> None:
        """Tell the system that this tensor is read next, so that its disk is busy meanwhile."""
        source = self.sources[name]
        if _WILL_NEED is not None:
            begin, length = source.begin, source.end - source.begin
            _WILL_NEED(self._file(source.path).fileno(), begin, length, os.POSIX_FADV_WILLNEED)

    def _run(
        self, source: TensorSource, name: str, run: RowSpan, out: Tensor, by: torch.dtype | None
    ) -> None:
        """Fill `out`, flat, with a run: at once where it can be, else in portions of rows, or of a long
        row."""
        item = source.dtype.itemsize
        begin = source.begin + run.offset * item
        if run.taken < run.width and run.taken * item >= LONG_RUN:
            for row in range(run.count):
                own = out[row * run.taken : (row + 1) * run.taken]
                self._flat(source, name, begin + (row * run.width + run.first) * item, own, by)
        elif run.taken < run.width:
            rows = max(1, PORTION // (run.width * item))
            into = out.view(run.count, run.taken)
            for row in range(0, run.count, rows):
                count = min(rows, run.count - row) * run.width
                held = self._held(source, name, begin + row * run.width * item, count)
                _put(into[row : row + rows], held.view(-1, run.width).narrow(1, run.first, run.taken), by)
        else:
            self._flat(source, name, begin, out, by)

    def _flat(self, source: TensorSource, name: str, begin: int, out: Tensor, by: torch.dtype | None) -> None:
        """Fill `out` with elements that lie one behind the other."""
        if out.dtype == source.dtype and out.device.type == "cpu" and by in (None, out.dtype):
            self._fill(source, name, begin, bytes_of(out))
            return
        item = source.dtype.itemsize
        count = PORTION // item
        for at in range(0, len(out), count):
            held = self._held(source, name, begin + at * item, min(count, len(out) - at))
            _put(out[at : at + count], held, by)

    def _held(self, source: TensorSource, name: str, begin: int, count: int) -> Tensor:
        """`count` elements of the file, in memory that the next call takes again."""
        size = count * source.dtype.itemsize
        if len(self._room) < size:
            self._room = bytearray(size)
        self._fill(source, name, begin, memoryview(self._room)[:size])
        return torch.frombuffer(self._room, dtype=source.dtype, count=count)

    def _fill(self, source: TensorSource, name: str, begin: int, rest: memoryview) -> None:
        file, flags = self._file(source.path), rest
        with reading(source.path):
            while rest:
                count = os.preadv(file.fileno(), [rest], begin)
                if not count:
                    raise _changed(source.path, "became shorter while it was read")
                rest, begin = rest[count:], begin + count
        if source.dtype is torch.bool:
            refuse_no_truths(torch.frombuffer(flags, dtype=torch.uint8), f"{source.path}  {name}")

    def _file(self, path: Path) -> FileIO:
        if path not in self._files:
            file = self._closing.enter_context(open_regular(path, links=True))
            with reading(path):
                size = os.fstat(file.fileno()).st_size
            if size != max(one.end for one in self.sources.values() if one.path == path):
                raise _changed(path, "changed while it was read")
            self._files[path] = file
        return self._files[path]


def _put(out: Tensor, held: Tensor, by: torch.dtype | None) -> None:
    """Copy `held` into `out`, rounded to `by` on the way."""
    out.copy_(held if by is None else held.to(by))


def _changed(path: Path, what: str) -> FileError:
    return FileError(what, where=str(path), remedy="let no other program write it, then try again")
