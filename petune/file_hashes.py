"""The SHA-256 of large files by threads: of whole ones while something else works, of an open one and its blocks at once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from threading import Event
from types import TracebackType

from petune.errors import FileError
from petune.tensorfile import reading

BLOCK = 64 << 20  # bytes of a file under one leaf hash
_PORTION = 8 << 20  # bytes read and hashed at once, without Python's lock


def number_of_blocks(size: int) -> int:
    """How many leaf hashes a file of `size` bytes has."""
    return -(-size // BLOCK)


def leaf_hashes(file: FileIO) -> list[str]:
    """The SHA-256 of every 64 MiB of an open file in hexadecimal, the last of what is left; by several threads."""
    return _in_ranges(file, [(at, at + BLOCK) for at in range(0, os.fstat(file.fileno()).st_size, BLOCK)])


def whole_and_leaf_hashes(file: FileIO) -> tuple[str, list[str]]:
    """The SHA-256 of an open file, and `leaf_hashes` of it. A file of one block is read once, a larger one twice, at the same time."""
    size = os.fstat(file.fileno()).st_size
    if size <= BLOCK:
        whole = _hash_range(file, 0, size)
        return whole, [whole] * number_of_blocks(size)
    whole, *leaves = _in_ranges(file, [(0, size), *((at, at + BLOCK) for at in range(0, size, BLOCK))])
    return whole, leaves


def _in_ranges(file: FileIO, ranges: Sequence[tuple[int, int]]) -> list[str]:
    if len(ranges) < 2:
        return [_hash_range(file, *one) for one in ranges]
    with ThreadPoolExecutor(min(len(ranges), max(1, (os.cpu_count() or 1) // 2)), "petune-hash") as threads:
        return list(threads.map(lambda one: _hash_range(file, *one), ranges))


def _hash_range(file: FileIO, begin: int, end: int) -> str:
    """Of the bytes from `begin` to before `end`, or to the end of a file that is shorter; the place the file is read at stays."""
    digest, portion = hashlib.sha256(), memoryview(bytearray(min(_PORTION, end - begin)))
    while begin < end and (count := os.preadv(file.fileno(), [portion[: end - begin]], begin)):
        digest.update(portion[:count])
        begin += count
    return digest.hexdigest()


class FileHashes:
    """Hashes `files` (name: path) from the moment it is made, on half the machine's cores; leaving the block ends what still runs.

    A file that has several names is read once.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._leave = Event()
        self._threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "petune-hash")
        started: dict[tuple[int, int], Future[str]] = {}
        self._hashes: dict[str, Future[str]] = {}
        for name, path in files.items():
            with reading(path):
                seen = path.stat()
            place = seen.st_dev, seen.st_ino
            if place not in started:
                started[place] = self._threads.submit(self._hash, path, seen)
            self._hashes[name] = started[place]

    def __enter__(self) -> FileHashes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave.set()
        self._threads.shutdown(cancel_futures=True)

    def result(self) -> dict[str, str]:
        """The hashes in hexadecimal by name, waited for. Raises FileError for a file that went, or changed since this was made."""
        return {name: future.result() for name, future in self._hashes.items()}

    def _hash(self, path: Path, seen: os.stat_result) -> str:
        digest, portion = hashlib.sha256(), memoryview(bytearray(_PORTION))
        with reading(path), FileIO(path) as file:
            while not self._leave.is_set() and (count := file.readinto(portion)):
                digest.update(portion[:count])
            now = os.fstat(file.fileno())
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (seen.st_ino, seen.st_size, seen.st_mtime_ns):
            raise FileError("has changed while it was hashed", where=str(path), remedy="let no other program write it, then try again")
        return digest.hexdigest()
