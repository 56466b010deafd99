"""Rows of numbers on disk under keys of 16 bytes: written once, by several processes side by side, read by
all.

    NAME.W.index           header, then one record a row: key, where its bytes lie, its tokens, checksums
    NAME.W.S.safetensors   bytes of rows, one after the other, as one tensor; sparse behind the last

Each writing process takes the first number W whose index nobody has locked, so writers never meet. A row is
there once its record is whole: what a killed process has left half is dropped, and so is a row whose bytes do
not have the checksum of its record. Data is read, never mapped: a file that shrinks is an error, no SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from petune.errors import FileError
from petune.files.safetensors import header_bytes, writing

SEGMENT = 1 << 30  # bytes of rows in one file, but for a longer row
_MAGIC = b"petune rows v1  "
_HEADER = struct.Struct("<16sI32sI")  # magic, bytes a token, what they are, checksum
_RECORD = struct.Struct("<16sQIIII")  # key, first byte, segment, tokens, stamp, checksum of the bytes
_CHECK = struct.Struct("<I")
_RECORD_SIZE = _RECORD.size + _CHECK.size


@dataclass
class RowPlace:
    """Where the bytes of a row lie. tokens: of the row; trusted: its checksum was seen to be right, or it was
    written here."""

    path: Path
    offset: int
    tokens: int
    checksum: int
    trusted: bool = False


class RowStore:
    """The rows NAME of a folder.

    token_bytes: of one token of a row; kind: what they are, in at most 32 letters. Both stand in every index,
    and opening raises FileError for rows of another kind. writes: whether this process adds rows. phase: that
    rows added from now on belong to; None: all that is there counts, see `look`.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        token_bytes: int,
        kind: str,
        writes: bool = True,
        phase: int | None = None,
    ) -> None:
        self.folder, self.name, self.token_bytes, self.kind = folder, name, token_bytes, kind
        self.places: dict[bytes, RowPlace] = {}
        self.later: dict[bytes, tuple[int, RowPlace]] = {}  # of rows that count from a later phase on
        self.read_until: dict[Path, int] = {}
        self.added: set[bytes] = set()  # by this process
        self.damaged = 0
        self._open: dict[Path, int] = {}
        self._opening = threading.Lock()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            claimed: tuple[int | None, int] = self._claim() if writes else (None, -1)
            self.index, self.number = claimed
        self.segment, self.end = self._last_segment(), SEGMENT  # a new one: what lies there may be half a row
        self.look(phase)

    @classmethod
    def kind_in(cls, folder: Path, name: str) -> str | None:
        """What the rows NAME of a folder are, None where there are none."""
        for path in sorted(folder.glob(f"{name}.*.index")):
            with open(path, "rb", buffering=0) as file:
                header = file.read(_HEADER.size)
            if len(header) == _HEADER.size and header[: len(_MAGIC)] == _MAGIC:
                found: bytes = _HEADER.unpack(header)[2]
                return found.rstrip().decode(errors="replace")
        return None

    # ------------------------------------------------------------ who writes where

    def _claim(self) -> tuple[int, int]:
        """(descriptor of an index that no other process writes, its number)."""
        number = 0
        while True:
            path = self.folder / f"{self.name}.{number}.index"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                number += 1
                continue
            self._mend(fd, path)
            return fd, number

    def _mend(self, fd: int, path: Path) -> None:
        """Write the header of a new index, or cut what is no whole record off the end of an old one."""
        size = os.fstat(fd).st_size
        if size < _HEADER.size:
            os.ftruncate(fd, 0)
            os.pwrite(fd, self._header(), 0)
            return
        self._check_header(os.pread(fd, _HEADER.size, 0), path)
        whole = _HEADER.size + (size - _HEADER.size) // _RECORD_SIZE * _RECORD_SIZE
        os.ftruncate(fd, whole)

    def _header(self) -> bytes:
        fields = _MAGIC, self.token_bytes, self.kind.encode().ljust(32)
        return _HEADER.pack(*fields, zlib.crc32(b"%b%d%b" % fields))

    def _check_header(self, found: bytes, path: Path) -> None:
        if found == self._header():
            return
        magic, token_bytes, kind, _ = _HEADER.unpack(found)
        said = f"{token_bytes} bytes a token of {kind.rstrip().decode(errors='replace')}"
        raise FileError(
            "holds rows of another kind",
            where=str(path),
            expected=f"{self.token_bytes} bytes a token of {self.kind}",
            found=said if magic == _MAGIC else "no index of rows",
            remedy="name another folder, or delete this one",
        )

    def _last_segment(self) -> int:
        """The highest number of a segment of this writer; -1 where it has none."""
        found = self.folder.glob(f"{self.name}.{self.number}.*.safetensors")
        return max((int(path.name.rsplit(".", 2)[1]) for path in found), default=-1)

    # ------------------------------------------------------------ what is there

    def look(self, phase: int | None) -> None:
        """Read what was added to the indexes, by this process and others, and begin `phase`.

        Rows added in a phase count from a later one on; with None those of any phase count now, which is for
        moments at which nobody writes. So processes that look at the same moments know the same rows.
        """
        self.phase = phase or 0
        for path in sorted(self.folder.glob(f"{self.name}.*.index")):
            self._read_index(path)
        for key, (stamp, place) in list(self.later.items()):
            if phase is None or stamp < phase:
                self.places.setdefault(key, place)
                del self.later[key]

    def _read_index(self, path: Path) -> None:
        """Take up the records behind those that were read before."""
        number = int(path.name.rsplit(".", 2)[1])
        begin = self.read_until.get(path, _HEADER.size)
        with open(path, "rb", buffering=0) as file:
            if begin == _HEADER.size and len(header := file.read(_HEADER.size)) == _HEADER.size:
                self._check_header(header, path)
            file.seek(begin)
            text = file.read()
        for at in range(0, len(text) - _RECORD_SIZE + 1, _RECORD_SIZE):
            record = text[at : at + _RECORD.size]
            (check,) = _CHECK.unpack_from(text, at + _RECORD.size)
            begin += _RECORD_SIZE
            if check != zlib.crc32(record):
                continue
            key, offset, segment, tokens, stamp, checksum = _RECORD.unpack(record)
            place = RowPlace(self._path(number, segment), offset, tokens, checksum, key in self.added)
            if key not in self.places:
                self.later.setdefault(key, (stamp, place))
        self.read_until[path] = begin

    def _path(self, number: int, segment: int) -> Path:
        return self.folder / f"{self.name}.{number}.{segment}.safetensors"

    @property
    def nbytes(self) -> int:
        """Of all rows that are known."""
        return sum(place.tokens for place in self.places.values()) * self.token_bytes

    def find(self, key: bytes) -> RowPlace | None:
        """Where the row of `key` lies, None where it is not there or its bytes are not those that were
        written."""
        place = self.places.get(key)
        if place is None or place.trusted:
            return place
        size = place.tokens * self.token_bytes
        with suppress(OSError):
            if zlib.crc32(os.pread(self._descriptor(place.path), size, place.offset)) == place.checksum:
                place.trusted = True
                return place
        self.damaged += 1
        del self.places[key]
        return None

    def _descriptor(self, path: Path) -> int:
        with self._opening:  # several threads read
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            return self._open[path]

    # ------------------------------------------------------------ reading and writing

    def read(self, place: RowPlace, into: Sequence[memoryview]) -> None:
        """Fill `into`, one after the other, with the bytes of a row. Raises FileError for a file that has
        become shorter."""
        wanted = sum(view.nbytes for view in into)
        if os.preadv(self._descriptor(place.path), into, place.offset) != wanted:
            raise FileError(
                "ends before a row that its index names",
                where=str(place.path),
                remedy="delete the folder, it is made again",
            )

    def write(self, key: bytes, tokens: int, pieces: Sequence[memoryview]) -> None:
        """Add the row of `key`, its bytes in `pieces`; one that this process has added stays as it is. Raises
        MachineError where the disk is full."""
        assert self.index is not None, "this process only reads"
        if key in self.added:
            return
        size = tokens * self.token_bytes
        if self.end + size > SEGMENT:
            self._begin_segment(size)
        path, check = self._path(self.number, self.segment), 0
        for piece in pieces:
            check = zlib.crc32(piece, check)
        with writing(path):
            if os.pwritev(self._own, pieces, self.end) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            record = _RECORD.pack(key, self.end, self.segment, tokens, self.phase, check)
            place = os.lseek(self.index, 0, os.SEEK_END)
            os.pwrite(self.index, record + _CHECK.pack(zlib.crc32(record)), place)
        self.added.add(key)
        self.end += size

    def _begin_segment(self, least: int) -> None:
        """A new file whose header is that of one tensor of bytes, as long as a segment may become."""
        self.segment += 1
        path = self._path(self.number, self.segment)
        size = max(SEGMENT, least)
        beginning = header_bytes({"rows": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
        with writing(path):
            self._own = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
            os.pwrite(self._own, beginning, 0)
            os.ftruncate(self._own, len(beginning) + size)
        self._open[path], self.end = self._own, len(beginning)

    def close(self) -> None:
        """Give back descriptors and the lock."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        if self.index is not None:
            os.close(self.index)
            self.index = None
