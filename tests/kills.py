"""Kills of a process, real ones, at every call that changes the file system: a fork of the warm test process costs little."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

CHANGING = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "os.link", "os.symlink"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def killed_at(call: int, work: Callable[[], Any]) -> bool:
    """Do `work` in a fork that SIGKILL ends right before its `call`-th change of the file system (from 1); of a write, half is done.

    False when the work ended before. An error of its own fails the test.
    """
    child = os.fork()
    if child == 0:
        try:
            arm(call)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"call {call}: the work failed by itself"
    return False


def arm(call: int) -> None:
    """Let SIGKILL end this process right before its `call`-th change of the file system from here on."""
    made = 0

    def count() -> bool:
        nonlocal made
        made += 1
        return made == call

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if (event in CHANGING or (event == "open" and isinstance(args[2], int) and args[2] & WRITES)) and count():
            die()

    def writing(plain: Callable[..., int]) -> Callable[..., int]:
        def half(fd: int, content: Any, *rest: Any) -> int:
            if fd > 2 and count():
                plain(fd, content[: len(content) // 2], *rest)
                die()
            return plain(fd, content, *rest)

        return half

    def flushing(fd: int, plain: Callable[[int], None] = os.fsync) -> None:
        if count():
            die()
        plain(fd)

    os.write, os.pwrite, os.fsync = writing(os.write), writing(os.pwrite), flushing  # type: ignore[assignment]
    sys.addaudithook(hook)
