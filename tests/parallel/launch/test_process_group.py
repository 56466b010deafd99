"""Joining a group that somebody else started: what the environment means, who is missing, and how ranks
without petune's launcher end."""

from __future__ import annotations

import errno
import os
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from petune.errors import DataError, DistributedError, MachineError
from petune.parallel.launch import process_group, rendezvous
from petune.parallel.launch.rendezvous import Membership, first_node
from petune.parallel.launch.seal import Sealed
from petune.parallel.placement import refuse_together
from tests.forked_launch import say_to
from tests.group_pool import ends

ROOT = Path(__file__).parents[3]
NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    rendezvous.ERROR_FILE,
    rendezvous.LAUNCHER,
)

WORKER = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from petune.errors import DataError
from petune.parallel.launch import process_group as group

mode, place = sys.argv[1:]
try:
    rank, world = group.join("cpu", timeout_s=4, start_timeout_s=40)
    group.agree({"recipe": "abc"})
    value = torch.full((1,), rank + 1.0)
    dist.all_reduce(value)
    for step in range(20):
        group.at_step(step)
        dist.all_reduce(value)
        if mode == "bad-data" and rank == 1:
            raise DataError("the row is no object", where="rows.jsonl:7")
        if mode == "freeze-0" and rank == 0 and step == 3:
            with open(os.path.join(place, "frozen"), "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.005)
    every = group.gather(f"rank {rank} of {world}")
    group.leave()
    print("; ".join(every), flush=True)
except BaseException as error:
    group.quit_process(group.report(error))
"""


def free_port() -> int:
    """A port nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(**changes: object) -> dict[str, str]:
    """This process's environment without a launcher's, with `changes`."""
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    return (
        kept
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | {name: str(value) for name, value in changes.items()}
    )


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> int:
    """This process is rank 0 of 2 by torchrun's variables; the port."""
    port = free_port()
    for name, value in environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        monkeypatch.setenv(name, value)
    return port


# ------------------------------------------------------------------ what the environment means


def test_a_process_nobody_launched_is_alone() -> None:
    assert process_group.place({}) is None
    assert (
        process_group.place({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None
    )
    # a batch script outside srun
    assert process_group.place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n1"}) is None


def test_torchrun_and_srun_say_the_same_thing_in_other_words() -> None:
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "big1",
        "MASTER_PORT": "29500",
    }
    assert process_group.place(env) == Membership(3, 4, 1, 2, "big1", 29500)
    slurm = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
    }
    ports = {
        process_group.place(slurm | {"SLURM_JOB_ID": "123", "SLURM_PROCID": str(rank)}).port
        for rank in range(4)
    }  # type: ignore[union-attr]
    assert len(ports) == 1
    found = process_group.place(slurm)
    assert found is not None
    assert (found.rank, found.world, found.local_rank, found.host, found.one_machine) == (
        3,
        4,
        1,
        "gpu07",
        False,
    )
    assert process_group.place(slurm | {"SLURM_STEP_NUM_NODES": "1"}).host == "127.0.0.1"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-05,09],big1", "gpu03"), ("r[1-2]n[01,04]-ib", "r1n01-ib")],
)
def test_the_first_node_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("wrong", [{"RANK": "x"}, {"RANK": "2"}, {"MASTER_PORT": "70000"}])
def test_an_environment_without_sense_is_a_distributed_error(wrong: dict[str, str]) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    with pytest.raises(DistributedError, match="makes no sense"):
        process_group.place(env | wrong)


# ------------------------------------------------------------------ who is missing


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named(as_rank: int) -> None:
    with pytest.raises(DistributedError, match="rank 1 of 2 did not start"):
        process_group.join("cpu", start_timeout_s=0.3)


def test_a_port_that_is_taken_is_named(as_rank: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", as_rank))
        other.listen()
        with pytest.raises(
            DistributedError, match=f"port {as_rank} of this machine cannot be used: address already in use"
        ):
            process_group.join("cpu", start_timeout_s=0.3)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_rank_0_that_cannot_be_reached_is_named(
    as_rank: int, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", host)
    with pytest.raises(DistributedError, match=f"rank 1 cannot reach rank 0 at {host}:{as_rank}"):
        process_group.join("cpu", start_timeout_s=0.3)


@pytest.mark.slow
def test_something_else_at_the_rendezvous_is_said_to_be_none(
    as_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with socket.socket() as other:
        other.bind(("127.0.0.1", as_rank))
        other.listen()
        with pytest.raises(DistributedError, match="is no rendezvous"):
            process_group.join("cpu", start_timeout_s=1)


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process may open none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_file_descriptors_are_the_machines_fault_and_no_matter_of_ports(as_rank: int) -> None:
    here = process_group.place()
    assert here is not None
    server = rendezvous.serve("127.0.0.1", as_rank)
    for ask in (
        lambda: rendezvous.serve("127.0.0.1"),
        lambda: rendezvous.connect(here, 0.3),
        lambda: rendezvous.client(here, 2),
    ):
        with no_more_files(), pytest.raises(MachineError, match="too many open files") as caught:
            ask()
        assert "ulimit -n" in str(caught.value) and "MASTER_PORT" not in str(caught.value)
    assert isinstance(
        process_group.explain(RuntimeError("[/pytorch/gloo/tcp.cc:1] socket: Too many open files")),
        MachineError,
    )
    assert isinstance(process_group.explain(OSError(errno.EMFILE, "Too many open files")), MachineError)
    del server


def test_the_limit_of_files_is_raised_to_what_ranks_need_or_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [(256, 4096)]

    def limit(kind: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > wanted[1]:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(rendezvous.os, "listdir", lambda folder: ["0", "1", "2"])  # what is open by now
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", limit)
    rendezvous.make_room(10)
    assert limits == [(256, 4096)], "it is enough"
    rendezvous.make_room(3 * 1024)
    assert limits[-1] == (3 + 3 * 1024 + rendezvous.ROOM, 4096)
    with pytest.raises(MachineError, match="too few files may be open at once") as caught:
        rendezvous.make_room(3 * 2048)
    assert "found 4096" in str(caught.value) and re.search(r"ulimit -n 6211 ", str(caught.value))


def test_a_connection_waits_a_second_for_a_name_server_and_no_longer(
    as_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    store = rendezvous.TCPStore

    def noting(*given: Any, **named: Any) -> Any:
        seen.append(os.environ.get("RES_OPTIONS"))
        return store(*given, **named)

    here = process_group.place()
    assert here is not None
    server = rendezvous.serve("127.0.0.1", as_rank)
    monkeypatch.setattr(rendezvous, "TCPStore", noting)
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    rendezvous.client(here, 5)
    assert "RES_OPTIONS" not in os.environ
    monkeypatch.setenv("RES_OPTIONS", "timeout:3")
    rendezvous.client(here, 5)
    assert seen == ["timeout:1 attempts:1", "timeout:3"]
    del server


# ------------------------------------------------------------------ telling


def test_an_error_of_ones_own_is_told_as_it_is_and_counts_once(
    as_rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_group, "_reported", None)
    assert process_group.report(DataError("bad row", where="a.jsonl:1")) == 3
    assert process_group.report(ValueError("and then")) == 3
    assert capsys.readouterr().err == "rank 0: a.jsonl:1  bad row\n"


def test_only_errors_of_the_group_are_explained() -> None:
    error = RuntimeError("shapes differ")
    assert process_group.explain(error) is error
    gloo = RuntimeError(
        "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2: Connection reset by peer. This is"
        " typically caused by"
    )
    assert (
        str(process_group.explain(gloo))
        == "the process group failed\n   found Read error [127.0.0.1]:2: Connection reset by peer"
    )


# ------------------------------------------------------------------ without petune's launcher


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """The worker as a file."""
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def _as_script(worker: Path, mode: str) -> None:
    """Be the worker, in a fork that need not import torch; what it says goes to files."""
    place, rank = worker.parent, os.environ["RANK"]
    say_to(*(os.open(place / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT) for name in ("out", "err")))
    leave = process_group.quit_process

    def last(code: int) -> None:
        (place / f"end-{rank}").write_text(str(time.time()))
        if (place / "frozen").exists():  # whom the test waits for, too
            os.kill(int((place / "frozen").read_text()), signal.SIGKILL)
        leave(code)

    process_group.quit_process = last  # type: ignore[assignment]  # in this very process, which ends soon
    sys.argv = [str(worker), mode, str(place)]
    runpy.run_path(str(worker), run_name="__main__")


def two(worker: Path, mode: str) -> tuple[list[int], list[str], list[str]]:
    """Codes and words of two ranks with torchrun's variables and nobody above them: rank 0 holds the
    store."""
    found = ends(2, _as_script, worker, mode)
    said = [[(worker.parent / f"{name}-{rank}").read_text() for rank in range(2)] for name in ("out", "err")]
    return [end.code for end in found], said[0], said[1]


def test_ranks_without_a_launcher_meet_and_part(worker: Path) -> None:
    codes, out, _ = two(worker, "well")
    assert out == ["rank 0 of 2; rank 1 of 2\n"] * 2
    assert codes == [0, 0]


def test_ranks_without_a_launcher_tell_which_of_them_failed(worker: Path) -> None:
    codes, _, shown = two(worker, "bad-data")
    assert "rank 1: rows.jsonl:7  the row is no object" in shown[1]
    assert "rank 0: rank 1 failed: rows.jsonl:7  the row is no object" in shown[0]
    assert codes == [6, 3]


def _refuse(how: str) -> None:
    """Refuse together what each rank has; the second is slow to tell the store that it has read."""
    process_group.join("cpu", 30, 30)
    if process_group.started()[0] == 1:
        delete = Sealed.delete_key
        Sealed.delete_key = lambda store, key: (time.sleep(0.3), delete(store, key))[1]  # type: ignore[method-assign]  # in this process, which ends
    if how == "differ":
        process_group.agree({"data": str(process_group.started()[0])})
    refuse_together(["wte"], "base")


@pytest.mark.parametrize(
    ("how", "code", "text"), [("damage", 4, "base: wte  holds"), ("differ", 6, "do not have the same data")]
)
def test_ranks_that_refuse_together_all_say_why_though_one_holds_the_store(
    how: str, code: int, text: str
) -> None:
    found = ends(2, _refuse, how)
    assert [end.code for end in found] == [code, code], found
    assert all(text in str(end.error) for end in found)


@pytest.mark.slow
def test_a_frozen_rank_that_holds_the_store_is_named(worker: Path) -> None:
    codes, _, shown = two(worker, "freeze-0")
    place = worker.parent
    assert "rank 1: rank 0" in shown[1]
    assert "has not answered for" in shown[1]
    assert codes == [-signal.SIGKILL, 6]
    assert float((place / "end-1").read_text()) - (place / "frozen").stat().st_mtime < 4 + 5


@pytest.mark.long
@pytest.mark.parametrize(("mode", "code"), [("well", 0), ("bad-data", 1)])
def test_two_torchruns_of_one_rank_each_make_one_group(worker: Path, mode: str, code: int) -> None:
    port = free_port()
    options = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
    nodes = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(node), str(worker), mode, str(worker.parent)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    shown = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [code, code]
    if code:
        assert "rank 1: rows.jsonl:7  the row is no object" in shown[1][1]
    else:
        assert [out for out, _ in shown] == ["rank 0 of 2; rank 1 of 2\n"] * 2


def test_groups_are_aborted_side_by_side() -> None:
    """One that waits for the device until another is aborted, as NCCL's do, must not keep that one
    waiting."""
    second = threading.Event()

    class Waiting:
        def abort(self) -> None:
            assert second.wait(10)

    class Second:
        def abort(self) -> None:
            second.set()

    process_group._abort_at_once(cast("list[dist.ProcessGroup]", [Waiting(), Second()]))
    assert second.is_set()
