"""The lock of a run folder: one run at a time, and nobody waits for one that has ended."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from petune.errors import MachineError
from petune.files.lock import RunLock


def hold(folder: Path, orphan: bool = False) -> tuple[int, int]:
    """A process that holds the lock until it is killed, and the number of the one that says so: itself, or a
    child of its own, once that has let go of what it inherited."""
    read, write = os.pipe()
    if (holder := os.fork()) == 0:
        try:
            with RunLock(folder):
                if not orphan or os.fork() == 0:
                    os.write(write, f"{os.getpid()}\n".encode())
                time.sleep(60)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as said:
        return holder, int(said.readline())


@pytest.mark.forks
def test_a_second_run_is_refused_and_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    holder, said = hold(tmp_path)
    try:
        assert said == holder
        with (
            pytest.raises(MachineError, match=f"process {holder} on {socket.gethostname()}"),
            RunLock(tmp_path),
        ):
            pass
        assert (tmp_path / ".lock").exists()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert (tmp_path / ".lock").exists()
    with RunLock(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()
        with pytest.raises(MachineError, match="another run"), RunLock(tmp_path):
            pass
    assert os.listdir(tmp_path) == []


@pytest.mark.forks
def test_a_killed_runs_orphan_does_not_hold_its_lock(tmp_path: Path) -> None:
    holder, orphan = hold(tmp_path, orphan=True)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        with RunLock(tmp_path):
            os.kill(orphan, 0)  # it is there, and in nobody's way
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_lock_deleted_by_hand_is_given_back_without_complaint(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        lock.path.unlink()
    assert os.listdir(tmp_path) == []


def test_without_flock_the_owner_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for owner, free in (
        (f"process {ended.pid} on {socket.gethostname()}\n", True),
        (f"process {os.getpid()} on {socket.gethostname()}\n", False),
        (f"process 1 on {socket.gethostname()}\n", False),
        ("process 5 on another-host\n", False),
        ("nonsense", False),
        ("", True),
    ):
        (tmp_path / ".lock").write_text(owner)
        if free:
            with RunLock(tmp_path):
                pass
        else:
            with pytest.raises(MachineError, match=r"delete .*\.lock"), RunLock(tmp_path):
                pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(MachineError, match="ELOOP"), RunLock(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "x"
