"""The SHA-256 of files, by threads that work while something else does; of large ones that are as they were,
from memory; and of blocks.

What was computed for a large file is kept in the user's cache folder with the file's size and times, so an
unchanged one costs a stat. A disk that loses a bit changes no time: only reading everything afresh finds
that, in every file from `REMEMBERED` bytes on.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path
from threading import Event, Lock
from typing import Any

from petune.errors import FileError, PetuneError
from petune.files.given import own_cache
from petune.files.safetensors import read_json, reading, write_json

REMEMBERED = 32 << 20  # bytes; a smaller file is read each time, in some hundredths of a second
BLOCK = 64 << 20  # bytes of a file under one leaf hash
_MOST_THREADS = 16  # for one file: beyond, the disk is slower
_PORTION = 8 << 20  # bytes read and hashed at once, without Python's lock
# a file that changed this shortly ago can change again without another time: not remembered
_SETTLED_NS = 2 * 10**9
_MOST = 4096  # files in the cache

_Seen = tuple[int, ...]  # what changes with a file: its size and times, and which file it is


def number_of_blocks(size: int) -> int:
    """How many leaf hashes a file of `size` bytes has."""
    return -(-size // BLOCK)


def leaf_hashes(file: FileIO, blocks: Sequence[int] | None = None) -> list[str]:
    """The SHA-256 of every 64 MiB of an open file in hexadecimal, the last of what is left, or of some of
    these blocks by number; by several threads."""
    if blocks is None:
        blocks = range(number_of_blocks(os.fstat(file.fileno()).st_size))
    ranges = [(at * BLOCK, (at + 1) * BLOCK) for at in blocks]
    if len(ranges) < 2:
        return [_hash_range(file, *one) for one in ranges]
    with ThreadPoolExecutor(min(len(ranges), os.cpu_count() or 1, _MOST_THREADS), "petune-hash") as threads:
        return list(threads.map(lambda one: _hash_range(file, *one), ranges))


def _hash_range(file: FileIO, begin: int, end: int) -> str:
    """Of the bytes from `begin` to before `end`, or to the end of a file that is shorter; the place the file
    is read at stays."""
    length = min(end, os.fstat(file.fileno()).st_size) - begin
    digest, portion = hashlib.sha256(), _room(length)
    while begin < end and (count := os.preadv(file.fileno(), [portion[: end - begin]], begin)):
        digest.update(portion[:count])
        begin += count
    return digest.hexdigest()


def _room(length: int) -> memoryview:
    """Where to read so many bytes, a portion at a time: to make room costs more than to read a small file."""
    return memoryview(bytearray(min(_PORTION, max(1, length))))


class FileHashes:
    """Hashes `files` (name: path) from the moment it is made, on half the machine's cores; leaving the block
    ends what still runs.

    A file that has several names is read once. Unless `afresh`, a large file that has not changed since its
    hash was computed, in this process or an earlier one of the same user, is not read.
    """

    def __init__(self, files: Mapping[str, Path], *, afresh: bool = True) -> None:
        self._leave = Event()
        self._threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "petune-hash")
        started: dict[_Seen, Future[str]] = {}
        self._hashes: dict[str, Future[str]] = {}
        self._sizes: dict[str, int] = {}
        for name, path in files.items():
            with reading(path):
                seen = _look(path.stat())
            if seen not in started:
                known = None if afresh else _cache.find(path, seen)
                started[seen] = (
                    self._threads.submit(self._hash, path, seen) if known is None else _done(known)
                )
            self._hashes[name], self._sizes[name] = started[seen], seen[2]

    def __enter__(self) -> FileHashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._threads.shutdown(cancel_futures=True)
        _cache.write()

    def result(self) -> dict[str, str]:
        """The hashes in hexadecimal by name, waited for. Raises FileError for a file that went, or changed
        since this was made."""
        return {name: future.result() for name, future in self._hashes.items()}

    def entries(self) -> dict[str, dict[str, Any]]:
        """{name: {"size": bytes, "sha256": hexadecimal}}, as manifests hold it. Waits and raises as
        `result`."""
        return {name: {"size": self._sizes[name], "sha256": value} for name, value in self.result().items()}

    def _hash(self, path: Path, seen: _Seen) -> str:
        digest, portion = hashlib.sha256(), _room(seen[2])
        with reading(path), FileIO(path) as file:
            while not self._leave.is_set() and (count := file.readinto(portion)):
                digest.update(portion[:count])
            now = _look(os.fstat(file.fileno()))
        if now != seen:
            raise FileError(
                "has changed while it was hashed",
                where=str(path),
                remedy="let no other program write it, then try again",
            )
        if not self._leave.is_set():
            _cache.add(path, seen, digest.hexdigest())
        return digest.hexdigest()


def differing(
    files: Mapping[str, Path], expected: Mapping[str, str], *, afresh: bool = False
) -> dict[str, str]:
    """{name: hash found} of the `files` whose SHA-256 is not the one `expected` of that name. Raises
    FileError for a missing file.

    A remembered hash is never what a file is refused for: it is read again first.
    """
    with FileHashes(files, afresh=afresh) as hashes:
        found = {name: value for name, value in hashes.result().items() if value != expected[name]}
    if afresh or not found:
        return found
    return differing({name: files[name] for name in found}, expected, afresh=True)


def _look(seen: os.stat_result) -> _Seen:
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def _done(value: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(value)
    return future


class _Cache:
    """The hashes of large files by path, in memory and, where the user's cache folder can be written, in one
    file there."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: dict[str, tuple[_Seen, str]] = {}
        self._unwritten = False
        self._read_from: Path | None = None

    def find(self, path: Path, seen: _Seen) -> str | None:
        """The hash of the file at `path` when it last looked like `seen`; None where that is not known."""
        with self._lock:
            self._read()
            before, value = self._known.get(str(path.resolve()), ((), None))
        return value if before == seen else None

    def add(self, path: Path, seen: _Seen, value: str) -> None:
        """Remember the hash of a large file that has not changed just now."""
        if seen[2] >= REMEMBERED and max(seen[3:]) < time.time_ns() - _SETTLED_NS:
            with self._lock:
                self._known[str(path.resolve())] = seen, value
                self._unwritten = True

    def write(self) -> None:
        """Write what is new; a cache that cannot be written is none, and no error."""
        with self._lock, suppress(PetuneError, OSError):
            if not self._unwritten:
                return
            self._unwritten = False
            new, self._read_from = dict(self._known), None
            self._read()  # what other processes have found meanwhile
            self._known = dict([*(self._known | new).items()][-_MOST:])
            place = own_cache() / "file_hashes.json"
            place.parent.mkdir(parents=True, exist_ok=True)
            write_json(place, {path: [*seen, value] for path, (seen, value) in self._known.items()})

    def _read(self) -> None:
        place = own_cache() / "file_hashes.json"
        if place == self._read_from:
            return
        self._read_from, self._known = place, {}
        with suppress(PetuneError, OSError, ValueError):  # a damaged cache is an empty one
            for path, row in read_json(place).items():
                *seen, value = row
                self._known[path] = tuple(map(int, seen)), str(value)


_cache = _Cache()
