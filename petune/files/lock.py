"""One run at a time in a folder: a lock that the kernel holds, and drops however the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
import weakref
from pathlib import Path
from typing import NoReturn, Self

from petune.errors import MachineError
from petune.files.safetensors import writing
from petune.log import warn

WAIT_S = 0.1  # between two looks at a lock that is waited for


class FileLock:
    """A file that this process locks until the block ends; a forked child (a data worker) lets it go."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def _keep(self, fd: int) -> None:
        self._fd = fd
        _held.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            try:
                # while it is still locked: nobody can have taken this very file
                self.path.unlink(missing_ok=True)
            except OSError as refused:
                warn(f"{self.path} could not be removed: {refused}")
            os.close(self._fd)
            self._fd = None
            _held.discard(self)


class RunLock(FileLock):
    """One run at a time in a folder: `with RunLock(folder): ...`. The file names process and host.

    The kernel holds the lock (flock) and drops it when the process ends, however it ends, so a killed run's
    lock is simply taken over. On a file system without flock, a lock is respected if its process lives on
    this host or is of another host. Raises MachineError.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / ".lock")

    def __enter__(self) -> Self:
        with writing(self.path):
            while self._fd is None:
                fd = os.open(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644
                )
                try:
                    self._claim(fd)
                except BaseException:
                    os.close(fd)
                    raise
        return self

    def is_held(self) -> bool:
        """Whether a process that lives holds the lock now; asking leaves everything as it is."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            owner = os.pread(fd, 400, 0).decode(errors="replace").strip()
            return bool(owner) and not _has_ended(owner)
        finally:
            os.close(fd)
        return False

    def _claim(self, fd: int) -> None:
        """Keep `fd` if it is locked now; leave `_fd` None when the file was removed meanwhile by the run that
        ended."""
        owner = os.pread(fd, 400, 0).decode(errors="replace").strip()
        try:
            alone = _locked(fd)
        except BlockingIOError:
            self._refuse(owner)
        if not alone and owner and not _has_ended(owner):
            self._refuse(owner)
        if not _is_at(fd, self.path):
            os.close(fd)
            return
        if owner:
            warn(f"the run of {owner} in {self.path.parent} ended without saying so: taking over")
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._keep(fd)

    def _refuse(self, owner: str) -> NoReturn:
        remedy = f"wait for it, end it, or give another `out`; if it cannot be running, delete {self.path}"
        raise MachineError(
            f"another run is using this folder: {owner or 'unknown process'}",
            where=str(self.path.parent),
            remedy=remedy,
        )


class WaitingLock(FileLock):
    """A lock that whoever comes later waits for: `take` it or `wait`, then `with lock: ...`. The kernel drops
    it when the process ends.

    On a file system without flock nobody waits. Raises MachineError.
    """

    def take(self) -> bool:
        """Take the lock if nobody holds it; whether it is ours now."""
        with writing(self.path):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                _locked(fd)
            except BlockingIOError:
                os.close(fd)
                return False
            except OSError:
                os.close(fd)
                raise
            if not _is_at(fd, self.path):
                os.close(fd)  # whoever held it has removed it meanwhile
                return False
        self._keep(fd)
        return True

    def wait(self) -> None:
        """Take the lock as soon as it is free. Signals are heard meanwhile."""
        while not self.take():
            time.sleep(WAIT_S)


def _locked(fd: int) -> bool:
    """Lock an open file; False on a file system without flock. Raises BlockingIOError for one that is locked
    already."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
            raise
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one at `path` still."""
    return os.path.lexists(path) and os.path.samestat(os.fstat(fd), os.lstat(path))


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _let_go() -> None:
    """A forked child (a data worker) shares the parent's lock until it closes its copy: a killed run must not
    be held up by an orphan."""
    for lock in list(_held):
        if lock._fd is not None:
            os.close(lock._fd)
            lock._fd = None
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def _has_ended(owner: str) -> bool:
    match = re.fullmatch(r"process ([0-9]{1,9}) on (.+)", owner)
    return bool(match and match[2] == socket.gethostname() and not lives(int(match[1])))


def lives(pid: int) -> bool:
    """Whether a process of this host, or one that has taken its number since, runs."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        pass
    return True
