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
from pathlib import Path

import pytest

from petune.preflight.job_script import Job, script
from petune.recipe import load_recipe
from tests.small_runs import as_yaml, settings

pytestmark = [pytest.mark.system, pytest.mark.forks]
STEPS = 150


def recipe_in(folder: Path) -> Path:
    """A recipe for two ranks that takes some seconds."""
    changes = {"parallel": "dp", "device": "cpu", "max_steps": STEPS, "epochs": 1000, "save_every": 1000}
    return as_yaml(folder / "mine.yaml", settings(folder, **changes, eval_every=1000))


def free_port() -> int:
    """A port nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def steps(folder: Path) -> list[int]:
    """The steps that a run has written, in order."""
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [record["step"] for line in lines if "loss" in (record := json.loads(line))]


def until(true: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def whole(folder: Path) -> bool:
    """Whether the run is finished, each step done once."""
    return (folder / "run" / "summary.json").exists() and steps(folder) == list(range(1, STEPS + 1))


def test_two_agents_of_torchrun_stop_and_go_on(tmp_path: Path) -> None:
    file = recipe_in(tmp_path)
    text = script("torchrun", str(file), load_recipe(file), [], Job(2, 1), tmp_path)
    (tmp_path / "job.sh").write_text(text)
    environment = os.environ | {
        "PETUNE_SECRET": "of this test",
        "PYTHONPATH": os.pathsep.join(map(str, roots())),
    }

    def start() -> list[subprocess.Popen[bytes]]:
        words = ["bash", str(tmp_path / "job.sh"), "127.0.0.1", str(free_port())]
        return [subprocess.Popen(words, env=environment, start_new_session=True) for _ in range(2)]

    agents = start()
    try:
        until(lambda: len(steps(tmp_path)) > 3)
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        assert all(agent.wait(60) != 0 for agent in agents)
        assert 3 < len(steps(tmp_path)) < STEPS
        agents = start()
        assert [agent.wait(120) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert whole(tmp_path)
    logs = list((tmp_path / "run-logs").glob("*/*/attempt_0/*/stderr.log"))
    assert len(logs) == 4, "two starts of two ranks"


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
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slurm with two nodes, both on this machine."""
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
        commands += [["slurmd", "-N", node, "-D"] for node in ("n1", "n2")]
        daemons = []
        try:
            for command in commands:
                with (folder / f"{len(daemons)}.out").open("w") as log:
                    daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
                time.sleep(1.5)
            until(lambda: " idle" in ask("sinfo", "-h"), 30)
            yield
        finally:
            subprocess.run(["scancel", "--full", "--user=root"], check=False)
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(20)


def ask(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


@pytest.mark.usefixtures("slurm")
def test_a_job_of_slurm_that_is_told_to_stop_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    file = recipe_in(tmp_path)
    (tmp_path / "job.sh").write_text(script("slurm", str(file), load_recipe(file), [], Job(2, 1), tmp_path))
    (tmp_path / "run-logs").mkdir()
    # both nodes are this machine: the name of the first is no address
    exported = f"--export=ALL,MASTER_ADDR=127.0.0.1,PYTHONPATH={os.pathsep.join(map(str, roots()))}"
    job = ask("sbatch", "--parsable", exported, str(tmp_path / "job.sh")).strip()
    assert job.isdecimal()
    until(lambda: len(steps(tmp_path)) > 3)
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    until(lambda: "Restarts=1" in ask("scontrol", "show", "job", job))
    assert 3 < len(steps(tmp_path)) < STEPS
    until(lambda: "JobState=COMPLETED" in ask("scontrol", "show", "job", job), 180)
    assert whole(tmp_path)
    assert (tmp_path / "run-logs" / "rank-1.log").exists()
