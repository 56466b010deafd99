"""A folder on a disk that fails: `python -m tests.failing_mount SOURCE MOUNT ORDERS` mounts SOURCE at MOUNT
through FUSE (fuse3 and mfusepy) and does what the file ORDERS says, read anew at every call.

ORDERS holds JSON: "calls" are the names below that fail with EIO, "from" a part of a path at which that
begins, and "delay" the seconds that every call takes.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from mfusepy import FUSE, FuseOSError, Operations


def ordered(work: Callable[..., Any]) -> Callable[..., Any]:
    """A call that does what is ordered: late, or not at all."""

    @wraps(work)
    def call(disk: Disk, path: str, *given: Any) -> Any:
        disk.heed(work.__name__, path)
        try:
            return work(disk, disk.source + path, *given)
        except OSError as error:
            raise FuseOSError(error.errno) from None

    return call


class Disk(Operations):
    """Hands every call on to the folder `source`."""

    use_ns = True

    def __init__(self, source: str, orders: Path) -> None:
        self.source, self.orders, self.failing = source, orders, False

    def heed(self, name: str, path: str) -> None:
        """Wait as long as is ordered; raise where this call is to fail."""
        wanted = json.loads(self.orders.read_text())
        time.sleep(wanted.get("delay", 0))
        calls = wanted.get("calls", ())
        self.failing = bool(calls) and (self.failing or (name in calls and wanted.get("from", "") in path))
        if self.failing and name in calls:
            raise FuseOSError(errno.EIO)

    @ordered
    def getattr(self, path: str, handle: int | None = None) -> dict[str, Any]:
        found = os.lstat(path)
        whole = ("gid", "mode", "nlink", "size", "uid")
        times = {f"st_{name}time": getattr(found, f"st_{name}time_ns") for name in "acm"}
        return {f"st_{name}": getattr(found, f"st_{name}") for name in whole} | times

    @ordered
    def readdir(self, path: str, handle: int) -> list[str]:
        return [".", "..", *os.listdir(path)]

    @ordered
    def readlink(self, path: str) -> str:
        return os.readlink(path)

    @ordered
    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags)

    @ordered
    def create(self, path: str, mode: int, info: Any = None) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT, mode)

    @ordered
    def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
        return os.pread(handle, size, offset)

    @ordered
    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        return os.pwrite(handle, data, offset)

    @ordered
    def truncate(self, path: str, length: int, handle: int | None = None) -> None:
        os.truncate(path, length)

    @ordered
    def fsync(self, path: str, only_data: int, handle: int) -> None:
        os.fsync(handle)

    @ordered
    def release(self, path: str, handle: int) -> None:
        os.close(handle)

    @ordered
    def chmod(self, path: str, mode: int) -> None:
        os.chmod(path, mode)

    @ordered
    def rename(self, old: str, new: str) -> None:
        os.rename(old, self.source + new)

    @ordered
    def unlink(self, path: str) -> None:
        os.unlink(path)

    @ordered
    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    @ordered
    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    @ordered
    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(path, ns=times)

    @ordered
    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(path)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}


if __name__ == "__main__":
    disk = Disk(sys.argv[1], Path(sys.argv[3]))
    FUSE(disk, sys.argv[2], foreground=True, nothreads=True, attr_timeout=0, entry_timeout=0)
