"""Boxes of tensors, written by several ranks as ranges of one safetensors file, which has its size already.

`write_tensors` makes that file, with room for what is on the meta device; then each rank opens it and writes
the boxes that it holds. Its bytes are those that one process would write, and say nothing of the ranks. That
all have written, no size tells: a manifest that is written after them does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from petune.errors import FileError
from petune.files.ranges import PORTION, runs, sources
from petune.files.safetensors import bytes_of, read_header, refuse_not_finite, writing


def _alone(text: str) -> list[str]:
    return [text]


@dataclass(frozen=True)
class Crew:
    """The ranks that write files together. meet: what every rank gives, by rank, when all have given it."""

    rank: int = 0
    world: int = 1
    meet: Callable[[str], Sequence[str]] = _alone

    def tell(self, value: Any = None) -> Any:
        """What the first rank gives, as JSON, on every rank, when all are here."""
        return json.loads(self.meet("" if self.rank else json.dumps(value))[0])


ALONE = Crew()


class RangeWriter:
    """Writes boxes of the tensors of a file that has its header and its size; when the block ends without an
    error, they are on the disk.

    Raises FileError for a file that this machine does not see or whose header is damaged, MachineError when
    the system refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            remedy = "let `out` be on a file system that the machines of all ranks share"
            what = "this rank does not see what the first one has begun"
            raise FileError(what, where=str(path), remedy=remedy)
        self.sources = sources({path: read_header(path)})

    def __enter__(self) -> Self:
        with writing(self.path):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with writing(self.path):
                    os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def write(self, name: str, value: Tensor, start: Sequence[int]) -> None:
        """Write the box of the shape of `value`, on any device, that begins at `start`. Raises TrainingFault
        for a NaN or an infinity."""
        source = self.sources[name]
        if value.dtype != source.dtype:
            raise ValueError(f"{self.path}: {name} is {source.dtype} there and {value.dtype} here")
        if not value.numel():
            return
        refuse_not_finite(value, f"{self.path}  {name}")
        flat, item, at = value.detach().contiguous().view(-1), source.dtype.itemsize, 0
        for run in runs(source.shape, start, value.shape):
            own = flat[at : at + run.count * run.taken]
            at += len(own)
            begin = source.begin + (run.offset + run.first) * item
            if run.count == 1:
                self._flat(own, begin)
            else:
                self._rows(own.view(run.count, run.taken), begin, run.width * item)

    def _flat(self, values: Tensor, begin: int) -> None:
        """Write values that lie one behind the other, in portions."""
        for portion in values.split(PORTION):
            held = bytes_of(portion.cpu())
            self._put(held, begin)
            begin += len(held)

    def _rows(self, rows: Tensor, begin: int, stride: int) -> None:
        """Write rows that begin `stride` bytes one after the other, each by itself: what lies between is
        another rank's."""
        size = rows[0].nbytes
        for portion in rows.split(max(1, PORTION // size)):
            held = bytes_of(portion.cpu().view(-1))
            for at in range(0, len(held), size):
                self._put(held[at : at + size], begin)
                begin += stride

    def _put(self, rest: memoryview, begin: int) -> None:
        with writing(self.path):
            while rest:
                count = os.pwrite(self._fd, rest, begin)
                rest, begin = rest[count:], begin + count
