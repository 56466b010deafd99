"""Kills of a process at every call that changes the file system: real ones in forks of the warm test process,
or what they would leave.

A kill loses nothing of what the system was told, so what it leaves is what the folder holds at that call:
`left_by_kills` copies that at every call of a single fork, where real kills need a fork for each.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGING = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.chmod",
    "os.truncate",
    "os.link",
    "os.symlink",
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def killed_at(call: int, work: Callable[[], Any]) -> bool:
    """Do `work` in a fork that SIGKILL ends right before its `call`-th change of the file system (from 1); of
    a write, half is done.

    False when the work ended before. An error of its own fails the test.
    """
    status = _forked(lambda: arm(call), work)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"call {call}: the work failed by itself"
    return False


def left_by_kills(folder: Path, work: Callable[[], Any], copies: Path) -> int:
    """Do `work` in a fork that copies `folder` to `copies`/N right before its N-th change of the file system,
    from 1; how many there were.

    Of a write, half is done by then. Where there was no folder at a call, there is no copy.
    """
    assert os.WEXITSTATUS(_forked(lambda: _copy_at_every_call(folder, copies), work)) == 0, (
        "the work failed by itself"
    )
    return int((copies / "calls").read_text())


def _forked(prepare: Callable[[], Any], work: Callable[[], Any]) -> int:
    """The status with which a fork ended that did `work`."""
    child = os.fork()
    if child == 0:
        try:
            prepare()
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def arm(call: int) -> None:
    """Let SIGKILL end this process right before its `call`-th change of the file system from here on."""
    made = 0

    def now() -> bool:
        nonlocal made
        made += 1
        return made == call

    _watch(now, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _copy_at_every_call(folder: Path, copies: Path) -> None:
    made, copying = 0, False

    def now() -> bool:
        return not copying

    def copy() -> None:
        nonlocal made, copying
        made, copying = made + 1, True
        if folder.exists():
            shutil.copytree(folder, copies / str(made), symlinks=True)
        (copies / "calls").write_text(str(made))
        copying = False

    _watch(now, copy)


def _watch(now: Callable[[], bool], act: Callable[[], None]) -> None:
    """At every change of the file system of this process for which `now` holds, `act` comes before it, in the
    midst of a write."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if (
            event in CHANGING or (event == "open" and isinstance(args[2], int) and args[2] & WRITES)
        ) and now():
            act()

    def writing(plain: Callable[..., int], moves: bool) -> Callable[..., int]:
        def half(fd: int, content: Any, *rest: Any) -> int:
            if fd <= 2 or not now():
                return plain(fd, content, *rest)
            done = plain(fd, content[: len(content) // 2], *rest)
            act()
            return done + plain(fd, content[done:], *([rest[0] + done] if moves else rest))

        return half

    def flushing(fd: int, plain: Callable[[int], None] = os.fsync) -> None:
        if now():
            act()
        plain(fd)

    os.write, os.pwrite, os.fsync = writing(os.write, False), writing(os.pwrite, True), flushing  # type: ignore[assignment]
    sys.addaudithook(hook)
