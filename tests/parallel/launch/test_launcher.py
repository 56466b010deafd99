"""Ranks that end well, fail, are killed, frozen, stopped: what the user reads, which code it has, and that
nothing is left running.

Ranks are of a small worker, whose behaviour its first argument says; `launch` runs in the test's own process,
as it does in the command. Processes are real ones where a test is about what they print, listen at, inherit
or do before they listen; else forks, without imports.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from petune.errors import DataError, DistributedError, MachineError, PetuneError, Stopped, UsageError
from petune.parallel.launch.host_memory import HostMemory
from petune.parallel.launch.launcher import Report, judge, launch
from tests.forked_launch import Forks
from tests.forked_launch import forks as forks

ROOT = Path(__file__).parents[3]

WORKER = '''
import os, signal, sys, time
from pathlib import Path

mode, place = sys.argv[1].removeprefix("gpu-"), Path(sys.argv[2])
device = "cuda" if sys.argv[1].startswith("gpu-") else "cpu"
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(place / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))

import torch
import torch.distributed as dist
from petune.errors import DataError, Stopped
from petune.parallel.launch import process_group as group

asked = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))

def sockets():
    """Addresses this process listens at."""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in links}

def die(number):
    os.kill(os.getpid(), number)
    time.sleep(60)

def work():
    group.join(device, timeout_s=4, start_timeout_s=30)
    group.agree({"recipe": "abc", "data": "one" if mode != "differ" or rank == 0 else "two"})
    value = torch.ones(1, device=device)
    for step in range(1, 1000000):
        group.at_step(step)
        (place / f"step-{rank}").write_text(str(step))
        dist.all_reduce(value)
        value.item()  # a GPU is waited for here
        if mode == "well" and step == 3:
            print(f"rank {rank} says", sys.argv[3], sorted(sockets()))
            if rank == 0:
                time.sleep(1)  # what rank 0 does alone
            group.barrier()
            return group.leave()
        if mode == "bad-data" and step == 3 and rank == 1:
            raise DataError("the row is no object", where="rows.jsonl:7", remedy="mend it")
        if mode == "apart" and step == 3 and rank == 1:
            time.sleep(60)
        if mode == "bug" and step == 3 and rank == 1:
            raise ValueError("shapes differ")
        if mode == "starve-1" and step == 3 and rank == 1:
            (place / "cgroup" / "memory.events").write_text("oom_kill 1")
            die(signal.SIGKILL)
        if mode in ("kill-0", "kill-1") and attempt == 0 and step == 3 and rank == int(mode[-1]):
            die(signal.SIGKILL)
        if mode == "kill-1" and attempt == 1 and step == 3:
            return group.leave()
        if mode in ("freeze", "freeze-alone") and step == 3 and rank == 1:
            time.sleep(1.5)  # a beat tells the others of this step
            (place / "frozen").touch()
            die(signal.SIGSTOP)
        if mode == "freeze-alone" and step == 3 and rank == 0:
            while True:  # no collective tells the main thread
                time.sleep(0.1)
        if mode == "stop":
            flag = torch.tensor([float(bool(asked))], device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag.item():
                if rank == 0:
                    time.sleep(4)  # longer than the launcher waits after a failure
                    (place / "saved").write_text(str(step))
                raise Stopped(f"stopped by {asked[0]} at step {step}; saved", remedy="go on")
        time.sleep(0.01)

try:
    work()
except BaseException as error:
    group.quit_process(group.report(error))
'''


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the worker; afterwards nothing of it may run or listen."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = listening()
    yield tmp_path
    assert [path.name for path in tmp_path.glob("pid-*") if alive(int(path.read_text()))] == []
    assert listening() - before == set()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening() -> set[str]:
    """Sockets of this process that listen."""
    links = {f"{os.readlink(path)}" for path in Path("/proc/self/fd").iterdir() if path.exists()}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in links}


def start(folder: Path, mode: str, *words: str, **settings: object) -> list[str]:
    """Launch two ranks of the worker; the lines said through on_line."""
    said: list[str] = []
    command = [sys.executable, str(folder / "worker.py"), mode, str(folder), *words]
    launch(command, 2, log_folder=folder / "logs", on_line=said.append, **settings)  # type: ignore[arg-type]
    return said


def after(seconds_or_file: Path, *numbers: int, pause: float = 0.0) -> threading.Thread:
    """Once a file is there, send this process signals."""

    def send() -> None:
        while not seconds_or_file.exists():
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


# ------------------------------------------------------------------ real ranks


def test_ranks_that_end_well_are_quiet_and_listen_only_to_this_machine(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(run, "well", "out=a$$b${local_rank}") == []
    shown = capfd.readouterr()
    assert shown.out == "rank 0 says out=a$$b${local_rank} ['0100007F']\n"
    assert shown.err == ""
    assert "rank 1 says" in (run / "logs" / "rank-1.log").read_text()


def test_an_error_in_one_rank_is_told_first_with_its_code_and_not_retried(
    run: Path, forks: Forks, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        start(run, "bad-data", restarts=2)
    assert str(caught.value) == "rank 1: rows.jsonl:7  the row is no object\n   mend it"
    assert caught.value.code == 3
    assert capfd.readouterr() == ("", "")
    assert not (run / "pid-1-0").exists()
    assert time.monotonic() - began < 30


def test_rank_0_killed_is_named(run: Path, forks: Forks, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DistributedError, match=r"^rank 0 was killed by SIGKILL"):
        start(run, "kill-0")
    assert capfd.readouterr() == ("", "")


def test_a_rank_killed_starts_all_anew_as_often_as_restarts_allow(run: Path, forks: Forks) -> None:
    said = start(run, "kill-1", restarts=1)
    assert len(said) == 1
    assert said[0].startswith("rank 1 was killed by SIGKILL")
    assert said[0].endswith("restart 1 of 1")
    assert (run / "pid-1-0").exists()


def test_a_rank_that_the_kernel_killed_for_memory_ends_the_run_with_the_numbers(
    run: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker counts its own kill in the fake cgroup, as the kernel would."""
    cgroup, proc = run / "cgroup", run / "proc"
    for file, content in (
        (proc / "self" / "cgroup", "0::/\n"),
        (cgroup / "memory.events", "oom_kill 0\n"),
        (cgroup / "memory.max", str(3 << 30)),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    monkeypatch.setattr("petune.parallel.launch.launcher.HostMemory", lambda: HostMemory(cgroup, proc))
    with pytest.raises(MachineError) as caught:
        start(run, "starve-1", restarts=2)
    text = str(caught.value)
    assert caught.value.code == 5 and "the host's memory ran out: rank 1 was killed by SIGKILL" in text
    assert (
        "at most 3 GiB" in text
        and "for want of memory: 1" in text
        and "batch_size" in text
        and "--resume" in text
    )
    assert not (run / "pid-1-0").exists(), "it would only run out again"


def test_a_frozen_rank_is_named_within_its_timeout_and_killed(run: Path, forks: Forks) -> None:
    with pytest.raises(DistributedError, match=r"^rank 1 has not answered for \d+ s \(last seen at step 3\)"):
        start(run, "freeze")
    assert time.time() - (run / "frozen").stat().st_mtime < 4 + 5


def test_sigterm_reaches_every_rank_and_what_is_being_saved_is_waited_for(run: Path, forks: Forks) -> None:
    after(run / "step-1", signal.SIGTERM)
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM at step") as caught:
        start(run, "stop", restarts=1)
    assert caught.value.code == 75
    assert (run / "saved").exists()


def test_ranks_that_differ_are_refused_by_all_of_them(run: Path, forks: Forks) -> None:
    with pytest.raises(DistributedError) as caught:
        start(run, "differ", restarts=1)
    assert str(caught.value).startswith(
        "the ranks do not have the same data\n   expected one (rank 0), found two (rank 1)"
    )
    assert not (run / "pid-1-0").exists()


@pytest.mark.slow
def test_a_frozen_rank_is_found_when_no_collective_fails(run: Path, forks: Forks) -> None:
    with pytest.raises(DistributedError, match=r"^rank 1 has not answered"):
        start(run, "freeze-alone")
    assert time.time() - (run / "frozen").stat().st_mtime < 4 + 5


@pytest.mark.slow
def test_ranks_that_live_but_do_not_meet_are_told_apart_by_their_steps(run: Path, forks: Forks) -> None:
    with pytest.raises(
        DistributedError,
        match=r"the ranks are alive but did not meet within 4 s\n   found rank 0 at step 4, rank 1 at step 3",
    ):
        start(run, "apart", restarts=1)
    assert not (run / "pid-1-0").exists()


@pytest.mark.slow
def test_an_internal_error_is_told_in_a_line_and_its_traceback_kept(run: Path, forks: Forks) -> None:
    with pytest.raises(PetuneError, match=r"^rank 1: internal error: ValueError: shapes differ") as caught:
        start(run, "bug")
    assert caught.value.code == 1
    assert "worker.py" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_second_interrupt_ends_ranks_that_do_not_heed_the_first(run: Path, forks: Forks) -> None:
    after(run / "step-1", signal.SIGINT, signal.SIGINT, pause=0.5)
    with pytest.raises(KeyboardInterrupt):
        start(run, "never")


@pytest.mark.slow
def test_a_stop_before_the_ranks_listen_ends_the_run_as_stopped(run: Path) -> None:
    after(run / "pid-0-1", signal.SIGTERM)
    with pytest.raises(Stopped, match="before training began"):
        start(run, "stop")


def num_gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 2, reason="two GPUs are needed")
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("bad-data", r"^rank 1: rows.jsonl:7  the row is no object"),
        ("kill-0", r"^rank 0 was killed by SIGKILL"),
        ("freeze", r"^rank 1 has not answered for \d+ s \(last seen at step 3\)"),
        ("stop", r"^stopped by SIGTERM at step"),
    ],
)
def test_ranks_on_gpus_end_as_others_do(
    run: Path, mode: str, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    if mode == "stop":
        after(run / "step-1", signal.SIGTERM)
    with pytest.raises(PetuneError, match=expected):
        start(run, f"gpu-{mode}")
    if mode == "freeze":
        assert time.time() - (run / "frozen").stat().st_mtime < 4 + 5
    assert time.monotonic() - began < 60
    assert capfd.readouterr().err == ""


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 2, reason="two GPUs are needed")
def test_ranks_on_gpus_meet_part_and_listen_only_to_this_machine(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(run, "gpu-well", "x") == []
    assert capfd.readouterr() == ("rank 0 says x ['0100007F']\n", "")


def test_a_launcher_that_is_killed_leaves_no_rank(run: Path) -> None:
    command = [sys.executable, str(run / "worker.py"), "never", str(run)]
    code = f"from petune.parallel.launch.launcher import launch\nlaunch({command!r}, 2, log_folder=None)"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    pids = wait_for(run / "step-1")
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    time.sleep(0.2)
    assert pids


def wait_for(file: Path) -> bool:
    """Wait up to half a minute for a file."""
    until = time.monotonic() + 30
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return file.exists()


# ------------------------------------------------------------------ which error is the cause


def told(rank: int, code: int, text: str, kind: str = "own", at: float = 0.0) -> Report:
    """A report a rank wrote."""
    return Report(rank, code, kind, text, "", at)


def cause(
    bad: dict[int, int],
    reports: list[Report],
    stops: list[int] | None = None,
    again: bool = False,
    words: str | None = None,
    begun: bool = True,
) -> str:
    """Class and text of the error that `judge` chooses."""
    error, retry = judge(bad, bad, reports, stops or [], lambda rank: words, begun=begun)
    assert retry is again
    return f"{type(error).__name__}: {error}"


LOST = told(0, 6, "the connection to another rank broke", "consequence")


@pytest.mark.parametrize(
    ("bad", "reports", "stops", "again", "expected"),
    [
        ({1: 3}, [LOST, told(1, 3, "bad row", at=9)], [], False, "DataError: rank 1: bad row"),
        ({0: 6}, [LOST, told(1, 3, "bad row", at=9)], [], False, "DataError: rank 1: bad row"),
        ({0: 6, 1: -9}, [LOST], [], True, "DistributedError: rank 1 was killed by SIGKILL"),
        ({0: 1, 1: -9}, [LOST], [], True, "DistributedError: rank 1 was killed by SIGKILL"),
        ({0: 2, 1: 2}, [told(0, 2, "no"), told(1, 2, "no")], [], False, "UsageError: no"),
        ({0: 7, 1: 7}, [told(1, 7, "nan"), told(0, 7, "inf", at=1)], [], False, "TrainingFault: rank 1: nan"),
        ({}, [told(0, 75, "saved"), told(1, 75, "saved here", at=1)], [15], False, "Stopped: saved"),
        (
            {1: 5},
            [told(0, 75, "saved"), told(1, 5, "disk full", at=1)],
            [15],
            False,
            "MachineError: rank 1: disk full",
        ),
        (
            {1: -15},
            [LOST],
            [15],
            False,
            "Stopped: stopped by SIGTERM outside training\n   go on from the last checkpoint with --resume",
        ),
        ({1: -15}, [LOST], [], True, "DistributedError: rank 1 was killed by SIGTERM"),
        ({0: 130}, [told(0, 130, "interrupted")], [2], False, "KeyboardInterrupt: "),
        (
            {0: 6},
            [told(0, 6, "rank 1 has not answered", "lost")],
            [],
            True,
            "DistributedError: rank 1 has not answered",
        ),
        ({0: 6}, [LOST], [], False, "DistributedError: the connection to another rank broke"),
        ({1: 9}, [], [], False, "PetuneError: rank 1 ended with exit code 9 and did not say why"),
    ],
)
def test_the_cause_is_found_among_all_that_happened(
    bad: dict[int, int], reports: list[Report], stops: list[int], again: bool, expected: str
) -> None:
    assert cause(bad, reports, stops, again).startswith(expected)


@pytest.mark.parametrize(
    ("bad", "reports", "stops", "expected"),
    [
        (
            {0: -15},
            [],
            [],
            "Stopped: stopped by SIGTERM before training began; nothing was written\n   start",
        ),
        ({0: -15}, [LOST], [], "Stopped: stopped by SIGTERM before training began"),
        ({0: 130, 1: 130}, [], [2], "Stopped: stopped by SIGINT before training began"),
        ({0: 130}, [told(0, 130, "interrupted")], [2], "Stopped: stopped by SIGINT before training began"),
        ({0: 1}, [], [2], "Stopped: stopped by SIGINT before training began"),
        ({0: 130}, [told(1, 2, "no such key", at=1)], [2], "UsageError: rank 1: no such key"),
        ({0: 130}, [], [2, 2], "KeyboardInterrupt: "),
    ],
)
def test_whoever_sends_a_signal_before_ranks_have_met_stops_them(
    bad: dict[int, int], reports: list[Report], stops: list[int], expected: str
) -> None:
    assert cause(bad, reports, stops, begun=False).startswith(expected)


def test_a_rank_killed_otherwise_before_ranks_have_met_is_worth_a_restart() -> None:
    found = cause({1: -9}, [], again=True, begun=False)
    assert found.startswith("DistributedError: rank 1 was killed by SIGKILL")


def test_what_a_rank_printed_last_stands_in_for_a_missing_message() -> None:
    assert (
        cause({1: 2}, [], words="unknown option")
        == f"{UsageError.__name__}: rank 1 ended with exit code 2 and did not say why\n   found unknown"
        " option"
    )
