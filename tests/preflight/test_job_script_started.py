"""Jobs for Slurm and torchrun, started (`make test-system`): they train, stop when they are told to, and go
on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from petune.preflight.job_script import ClusterJob, script
from petune.recipe import load_recipe
from tests.small_runs import as_yaml, settings

pytestmark = [pytest.mark.system, pytest.mark.forks, pytest.mark.timeout(900)]
STEPS = 150


def recipe_in(folder: Path, **more: Any) -> Path:
    """A recipe for two ranks that takes some seconds."""
    changes = {"parallel": "dp", "device": "cpu", "max_steps": STEPS, "epochs": 1000, "save_every": 1000}
    return as_yaml(folder / "mine.yaml", settings(folder, **changes | {"eval_every": 1000} | more))


def free_port() -> int:
    """A port nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def steps(folder: Path) -> list[int]:
    """The steps that a run has written, in order."""
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [record["step"] for line in lines if "loss" in (record := json.loads(line))]


def until(true: Callable[[], bool], seconds: float = 300) -> None:
    """Wait for it; a machine that others use too is slow."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def whole(folder: Path) -> bool:
    """Whether the run is finished, each step done once."""
    return (folder / "run" / "summary.json").exists() and steps(folder) == list(range(1, STEPS + 1))


def agents(folder: Path, file: Path, job: ClusterJob) -> list[subprocess.Popen[bytes]]:
    """torchrun of a job, an agent a node, all on this machine."""
    text = script("torchrun", str(file), load_recipe(file), [], job, folder)
    (folder / "job.sh").write_text(text)
    environment = os.environ | {"PETUNE_SECRET": "of this test", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, roots()))
    words = ["bash", str(folder / "job.sh"), "127.0.0.1", str(free_port())]
    return [subprocess.Popen(words, env=environment, start_new_session=True) for _ in range(job.nodes)]


@pytest.mark.parametrize("then", [ClusterJob(2, 1), ClusterJob(1, 3)], ids=["two", "one of three ranks"])
def test_two_agents_of_torchrun_stop_and_go_on_on_other_nodes(then: ClusterJob, tmp_path: Path) -> None:
    file = recipe_in(tmp_path, batch_size=3, accumulate=1)
    started = agents(tmp_path, file, ClusterJob(2, 1))
    try:
        until(lambda: len(steps(tmp_path)) > 3)
        for agent in started:
            agent.send_signal(signal.SIGTERM)
        assert all(agent.wait(120) != 0 for agent in started)
        assert 3 < len(steps(tmp_path)) < STEPS
        started = agents(tmp_path, file, then)
        assert [agent.wait(600) for agent in started] == [0] * then.nodes
    finally:
        for agent in started:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert whole(tmp_path)
    ranks = json.loads((tmp_path / "run" / "summary.json").read_text())["memory"]
    assert len(ranks) == then.nodes * then.ranks
    logs = list((tmp_path / "run-logs").glob("*/*/attempt_0/*/stderr.log"))
    assert len(logs) == 2 + then.nodes * then.ranks, "those of both starts"


def roots() -> tuple[Path, Path]:
    """Where petune and its command line are."""
    root = Path(__file__).parent.parent.parent
    return root, root / "cli"


CONF = """
ClusterName=petune
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
SlurmdTimeout=8
ReturnToService=2
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Slurm with two nodes, both on this machine; the process of each node's daemon."""
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        pytest.skip("needs root and Debian's slurmctld, slurmd, slurm-client and munge")
    with tempfile.TemporaryDirectory(prefix="slurm-") as place:
        folder = Path(place)
        ports = [free_port() for _ in range(3)]
        (folder / "slurm.conf").write_text(CONF.format(host=os.uname().nodename, folder=folder, ports=ports))
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        names = {
            "key-file": "key",
            "socket": "munge.sock",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        munge = [f"--{option}={folder / name}" for option, name in names.items()]
        commands = [["munged", "--force", "--foreground", *munge], ["slurmctld", "-c", "-D"]]
        daemons, nodes = [], {}
        try:
            for command in commands:
                with (folder / f"{len(daemons)}.out").open("w") as log:
                    daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
                time.sleep(1.5)
            for node in ("n1", "n2"):
                nodes[node] = node_daemon(node)
                time.sleep(1.5)
            until(lambda: " idle" in ask("sinfo", "-h"))
            yield nodes
        finally:
            subprocess.run(["scancel", "--full", "--user=root"], check=False)
            for daemon in (*nodes.values(), *reversed(daemons)):
                daemon.terminate()
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(60)
                daemon.kill()
                daemon.wait(60)


def node_daemon(node: str) -> subprocess.Popen[bytes]:
    """Start what a node of Slurm is."""
    return subprocess.Popen(
        ["slurmd", "-N", node, "-D"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def kill_node(node: str, daemon: subprocess.Popen[bytes]) -> int:
    """Let a node fall dead: its daemon, and all that ran on it; how many processes those were."""
    found = set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if f"SLURMD_NODENAME={node}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.add(int(process.name))
                above = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if "slurmstepd" in Path(f"/proc/{above}/comm").read_text():
                    found.add(above)
    daemon.kill()
    for number in found:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    daemon.wait(20)
    return len(found)


def ask(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def submitted(folder: Path, file: Path) -> str:
    """The number of a job of two nodes that was handed to Slurm."""
    (folder / "job.sh").write_text(
        script("slurm", str(file), load_recipe(file), [], ClusterJob(2, 1), folder)
    )
    (folder / "run-logs").mkdir()
    # both nodes are this machine: the name of the first is no address
    exported = f"--export=ALL,MASTER_ADDR=127.0.0.1,PYTHONPATH={os.pathsep.join(map(str, roots()))}"
    job = ask("sbatch", "--parsable", exported, str(folder / "job.sh")).strip()
    assert job.isdecimal()
    return job


@pytest.mark.usefixtures("slurm")
def test_a_job_of_slurm_that_is_told_to_stop_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    job = submitted(tmp_path, recipe_in(tmp_path))
    until(lambda: len(steps(tmp_path)) > 3)
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    until(lambda: "Restarts=1" in ask("scontrol", "show", "job", job))
    assert 3 < len(steps(tmp_path)) < STEPS
    until(lambda: "JobState=COMPLETED" in ask("scontrol", "show", "job", job))
    assert whole(tmp_path)
    assert (tmp_path / "run-logs" / "rank-1.log").exists()


def test_a_job_of_slurm_whose_node_dies_is_queued_again_and_goes_on(
    slurm: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    job = submitted(tmp_path, recipe_in(tmp_path, save_every=10))
    until(lambda: len(steps(tmp_path)) > 25)
    assert kill_node("n2", slurm["n2"]) >= 2, "the rank and the step that started it"
    until(lambda: "Restarts=1" in ask("scontrol", "show", "job", job))
    assert len(steps(tmp_path)) < STEPS
    slurm["n2"] = node_daemon("n2")
    until(lambda: "JobState=COMPLETED" in ask("scontrol", "show", "job", job))
    assert whole(tmp_path)
    assert "resumed from" in (tmp_path / "run" / "run.log").read_text()
