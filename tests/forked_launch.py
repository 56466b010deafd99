"""petune's own launcher with forks of the test's process for the ranks it starts, and for the spare: all is
real but the imports.

`petune.train` starts its ranks then in a tenth of a second, and what a test has patched is patched in them. A
rank that is a Python file of the test's own instead of petune runs in a fork too.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NoReturn

import pytest
import torch

from petune.__main__ import main
from petune.parallel.launch import rank_entry
from petune.parallel.launch.replacing import Replacing


def say_to(out: int, err: int) -> None:
    """What this process says from here on goes to these descriptors, past what pytest captures."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    # they are the process's own, and stay open to its end
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115


class Process:
    """A forked process with what torch's agent and petune's launcher ask of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutExpired("a forked rank", timeout)
            time.sleep(0.005)
        return code


@dataclass
class Handler:
    """What torch's agent holds of a process."""

    proc: Process
    local_rank_id: int

    def close(self, death_sig: signal.Signals | None = None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


@dataclass
class Forks:
    """Every process that was forked: its rank as it was started, whether as a spare, and its id."""

    started: list[tuple[str, bool, int]] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # rank -> the process that holds it now

    def handler(
        self, *, args: Any, env: dict[str, str], stdout: str, local_rank_id: int, **_: Any
    ) -> Handler:
        """A fork in the place of torch's SubprocessHandler."""
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            _become([str(word) for word in args], env, stdout)
        self.started.append((env["RANK"], "PETUNE_SPARE" in env, pid))
        if "PETUNE_SPARE" not in env:
            self.places[local_rank_id] = pid
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # the fork does so too: whoever comes first
        return Handler(Process(pid), local_rank_id)

    def pids(self, rank: int | str, spare: bool = False) -> list[int]:
        """The processes that were started as a rank, or as a spare."""
        return [pid for own, kept, pid in self.started if (own == str(rank) or spare) and kept is spare]


def _become(args: list[str], env: dict[str, str], stdout: str) -> NoReturn:
    """Be the process that the launcher wants."""
    code = 1
    try:
        gc.freeze()  # see tests/pool.py
        with suppress(OSError):
            os.setpgid(0, 0)
        for number, handler in (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        ):
            signal.signal(number, handler)
        for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM", "PETUNE"))]:
            del os.environ[name]
        os.environ |= env | {"TORCH_CPP_LOG_LEVEL": "FATAL"}
        if stdout:
            os.dup2(os.open(stdout, os.O_WRONLY), 1)
            os.dup2(os.open(stdout, os.O_WRONLY), 2)
        torch.set_num_threads(1)
        torch.default_generator.manual_seed(os.getpid())  # see tests/pool.py
        at = next(number for number, word in enumerate(args) if word.endswith("rank_entry.py"))
        sys.argv, os.execvp = args[at:], _call  # type: ignore[assignment]
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115  # not what pytest captures
        rank_entry.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _call(file: str, command: list[str]) -> NoReturn:
    """In the place of exec: petune, or a Python file and its arguments, in an interpreter that has imported
    all there is."""
    code = 0
    try:
        if "petune" in command:
            code = main(command[command.index("petune") + 1 :])
        else:
            sys.argv = command[1:]
            runpy.run_path(command[1], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Forks:
    """Let the launcher fork its processes."""
    made = Forks()
    monkeypatch.setattr("torch.distributed.elastic.multiprocessing.api.get_subprocess_handler", made.handler)
    monkeypatch.setattr("petune.parallel.launch.replacing.get_subprocess_handler", made.handler)
    replace = Replacing.replace

    def noted(self: Replacing, context: Any, lost: list[int]) -> Any:
        found = replace(self, context, lost)
        made.places.update({rank: handler.proc.pid for rank, handler in found.items()})
        return found

    monkeypatch.setattr(Replacing, "replace", noted)
    return made


def note_loads(monkeypatch: pytest.MonkeyPatch, file: Path) -> Callable[[], list[int]]:
    """Note in `file` which process reads a base; their ids, in the order of reading."""
    import petune.run.build

    load = petune.run.build.load_model

    def noted(*args: Any, **named: Any) -> Any:
        with file.open("a") as out:
            out.write(f"{os.getpid()}\n")
        return load(*args, **named)

    monkeypatch.setattr(petune.run.build, "load_model", noted)
    return lambda: [int(line) for line in file.read_text().split()]
