"""The SHA-256 of large files, each read once, by threads that work while something else does."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from threading import Event
from types import TracebackType

from petune.errors import FileError
from petune.tensorfile import reading

_PORTION = 8 << 20  # bytes read and hashed at once, without Python's lock


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
