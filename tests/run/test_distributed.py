"""`petune train` starting its own processes, for real: how it ends when all is well, when one fails, is
killed, freezes or is told to stop.

Each launch costs seconds, as every rank imports torch anew, so most are in the long part; the numbers of
parallel runs are checked with forked ranks in tests/run/test_rank.py, and here a killed rank is a fork.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import petune.run.distributed
import petune.run.job
import petune.run.step
import petune.run.train
from petune.errors import DistributedError, UsageError
from petune.parallel.launch import process_group
from petune.recipe import load_recipe
from petune.run.folder import RunFolder
from petune.saving import checkpoint
from tests.forked_launch import Forks
from tests.forked_launch import forks as forks
from tests.group_pool import assert_same_but_for_rounding, files, ranks
from tests.small_runs import as_yaml, newest, numbers, run, settings

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).parents[2]
PETUNE = (sys.executable, "-c", "import sys; from petune_cli.main import app; sys.argv[0] = 'petune'; app()")
TP = {"tp": {"columns": [32, 16]}}


@dataclass
class Launched:
    """A command that was started and the folder of its run."""

    process: subprocess.Popen[str]
    folder: Path
    session: int
    output: list[Path] = field(default_factory=list)

    def text(self) -> str:
        """What it has printed."""
        return "".join(path.read_text() for path in self.output)

    def steps(self) -> int:
        """Steps it has recorded."""
        path = self.folder / "metrics.jsonl"
        return (
            sum('"loss"' in line and '"eval_loss"' not in line for line in path.read_text().splitlines())
            if path.exists()
            else 0
        )

    def until(self, enough: Callable[[], bool], seconds: float = 90) -> None:
        """Wait for something while it runs."""
        end = time.monotonic() + seconds
        while not enough():
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.text()}"
            assert time.monotonic() < end, self.text()
            time.sleep(0.01)

    def rank(self, number: int) -> int:
        """The process id of a rank."""
        return next(pid for pid in of_session(self.session) if rank_of(pid) == str(number))

    def end(self, seconds: float = 90) -> int:
        """Its exit code. Nothing it started may be left."""
        code = self.process.wait(seconds)
        gone = time.monotonic() + 2
        while of_session(self.session) and time.monotonic() < gone:
            time.sleep(0.02)
        assert of_session(self.session) == [], "processes are left"
        return code


# in the environment of whatever a test starts, which process groups and reparenting do not hide
MARK = "PETUNE_TEST_SESSION"


def of_session(number: int) -> list[int]:
    """Processes that a launch has started, zombies not counted."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{MARK}={number}\0".encode() in (place / "environ").read_bytes() + b"\0"
            if marked and (place / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(place.name))
        except OSError:
            continue
    return found


def rank_of(pid: int) -> str | None:
    """The rank that a process is, by its environment and command."""
    try:
        words = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
        if b"petune" not in (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0"):
            return None
    except OSError:
        return None
    return next((word[5:].decode() for word in words if word.startswith(b"RANK=")), None)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a command line with the words; its run is in `run` of the test's folder. Whatever is left in the
    end is killed."""
    started: list[Launched] = []

    def start(*words: str, command: tuple[str, ...] = PETUNE, env: dict[str, str] | None = None) -> Launched:
        session = os.getpid() * 1000 + len(started)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        kept = {name: value for name, value in os.environ.items() if name not in names}
        kept |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", MARK: str(session), **(env or {})}
        output = [tmp_path / f"{len(started)}.out", tmp_path / f"{len(started)}.err"]
        with output[0].open("w") as out, output[1].open("w") as err:
            process = subprocess.Popen(
                [*command, *words],
                stdout=out,
                stderr=err,
                text=True,
                env=kept,
                cwd=tmp_path,
                start_new_session=True,
            )
        started.append(Launched(process, tmp_path / "run", session, output))
        return started[-1]

    yield start
    for one in started:
        for pid in of_session(one.session):
            os.kill(pid, signal.SIGKILL)
        one.process.wait(10)


def recipe_in(place: Path, *, steps: int = 6, **changes: Any) -> tuple[Path, dict[str, Any]]:
    """A recipe file for a tiny Llama under tensor parallelism, and what it says."""
    shape = {
        "batch_size": 4,
        "max_steps": steps,
        "epochs": steps,
        "warmup": 0,
        "save_every": 10,
        "eval_every": 1000,
        "parallel": TP,
        "lr": 1e-4,
        **changes,
    }
    recipe = settings(place, "llama", "lora", **shape)
    return as_yaml(place / "recipe.yaml", recipe), recipe


def straight(recipe: dict[str, Any], out: str = "straight") -> Path:
    """The same run, left alone, in forked ranks."""
    folder = Path(recipe["out"]).parent / out
    ranks(2, _train, recipe | {"out": str(folder)})
    return folder


def _train(recipe: dict[str, Any]) -> None:
    run(recipe)


def assert_whole(folder: Path, expected: Path) -> None:
    """The run has ended as the one that was left alone."""
    logs = [path for path in files(folder) if path.startswith("ranks/")]
    assert logs == ["ranks/rank-1.log"]
    (folder / "ranks" / "rank-1.log").unlink()
    (folder / "ranks").rmdir()
    assert_same_but_for_rounding(folder, expected)


# ------------------------------------------------------------------ all is well


# Three interpreters import torch: tests/parallel/launch/test_launcher.py starts real ranks in the short suite,
# and test_replacing.py there trains in ranks that petune's launcher has forked.
@pytest.mark.long
@pytest.mark.usefixtures("no_picture")
def test_petune_train_starts_its_own_ranks_and_ends_as_one_process_would(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    file, recipe = recipe_in(tmp_path)
    launched = launch("train", str(file))
    assert launched.end() == 0, launched.text()
    alone = run(recipe | {"parallel": "none", "out": str(tmp_path / "alone")}).folder
    (tmp_path / "run" / "loss.png").unlink(missing_ok=True)
    assert_whole(tmp_path / "run", alone)
    assert "Warning" not in launched.text() and "[W" not in launched.text(), launched.text()


def test_a_plan_that_cannot_be_is_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.run.distributed.launch", lambda *_, **__: pytest.fail("ranks were started"))
    _, recipe = recipe_in(tmp_path)
    for plan in (
        {"tp": {"heads": [3, 2]}},
        {"tp": {"columns": [40, 9]}},
        {"pp": {"stages": [1, 2]}},
        {"dp": 9},
    ):
        with pytest.raises(UsageError) as caught:
            petune.run.train.train(recipe | {"parallel": plan})
        assert caught.value.code == 2
        assert "parallel" in str(caught.value)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ one fails


PATCH = """
import os
first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and not os.environ.keys() & {{"PETUNE_GENERATION", "PETUNE_SPARE"}}
if os.environ.get("RANK") == "{rank}" and first:
    import petune.run.step as module
    from petune.errors import DataError
    step = module.OptimizerStep.take
    def spoilt(self):
        if self.progress.step + 1 == {step}:
            {act}
        return step(self)
    module.OptimizerStep.take = spoilt
"""


def patched(place: Path, rank: int, step: int, act: str) -> dict[str, str]:
    """An environment in which a rank does something of its own before a step, on its first start."""
    folder = place / "patch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCH.format(rank=rank, step=step, act=act))
    return {"PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'cli'}"}


# what a launcher makes of it is in tests/parallel/launch/test_launcher.py, what a rank says in
# tests/run/test_rank.py
@pytest.mark.long
def test_an_error_of_rank_1_alone_is_told_with_its_rank_and_its_code(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    file, _ = recipe_in(tmp_path)
    launched = launch(
        "train",
        str(file),
        env=patched(tmp_path, 1, 3, "raise DataError('the row is no object', where='rows.jsonl:7')"),
    )
    assert launched.end() == 3, launched.text()
    assert "rank 1: rows.jsonl:7  the row is no object" in launched.text()
    assert "Traceback" not in launched.text()


# ------------------------------------------------------------------ killed, frozen, stopped


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_killed_rank_ends_the_run_in_seconds_and_resume_goes_on(
    rank: int, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recipe = recipe_in(tmp_path, steps=4, save_every=2)
    take = petune.run.step.OptimizerStep.take

    def deadly(self: petune.run.step.OptimizerStep) -> Any:
        if self.progress.step == 3 and process_group.started()[0] == rank:
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self)

    with monkeypatch.context() as patch:
        patch.setattr(petune.run.step.OptimizerStep, "take", deadly)
        with pytest.raises(
            DistributedError, match=rf"^rank {rank} was killed by SIGKILL(.|\n)*--resume"
        ) as caught:
            run(recipe)
    assert time.time() - (tmp_path / "killed").stat().st_mtime < 5 and caught.value.code == 6
    for pid in (*forks.pids(0), *forks.pids(1)):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert_goes_on_from_a_saved_step(recipe)


@pytest.mark.long
@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("rank", [1, 0])
def test_a_real_rank_that_is_killed_ends_the_command_in_seconds(
    rank: int, tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    file, recipe = recipe_in(tmp_path, steps=50)
    launched = launch("train", str(file))
    launched.until(lambda: launched.steps() >= 12)
    os.kill(launched.rank(rank), signal.SIGKILL)
    began = time.monotonic()
    assert launched.end() == 6, launched.text()
    assert time.monotonic() - began < 5
    assert f"rank {rank} was killed by SIGKILL" in launched.text() and "--resume" in launched.text()
    assert_goes_on_from_a_saved_step(recipe)


def assert_goes_on_from_a_saved_step(recipe: dict[str, Any]) -> None:
    """What a run saved now and then has left is whole; resumed, it ends as one that was left alone."""
    folder = Path(recipe["out"])
    step = int(newest(folder).name.removeprefix("step-"))
    assert step > 0 and step % recipe["save_every"] == 0
    checkpoint.verify(newest(folder))
    ranks(2, lambda: run(recipe, resume=True))
    (folder / "ranks" / "rank-1.log").unlink()
    (folder / "ranks").rmdir()
    assert_same_but_for_rounding(folder, straight(recipe))


@pytest.mark.long
@pytest.mark.usefixtures("no_picture")
def test_sigterm_saves_and_ends_with_75_and_the_command_goes_on(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    file, recipe = recipe_in(tmp_path, steps=100)
    launched = launch("train", str(file))
    launched.until(lambda: launched.steps() >= 3)
    os.kill(launched.process.pid, signal.SIGTERM)
    assert launched.end() == 75, launched.text()
    saved = newest(tmp_path / "run")
    assert f"at step {saved.name.removeprefix('step-')} of 100; saved {saved}" in launched.text()
    assert launched.steps() == int(saved.name.removeprefix("step-"))
    again = launch("train", str(file), "--resume")
    assert again.end() == 0, again.text()
    (tmp_path / "run" / "loss.png").unlink(missing_ok=True)
    assert_whole(tmp_path / "run", straight(recipe))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank_is_named_once_its_time_is_over(
    rank: int, tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    file, _ = recipe_in(tmp_path, steps=2000, timeout=5)
    launched = launch("train", str(file))
    launched.until(lambda: launched.steps() >= 12)
    os.kill(launched.rank(rank), signal.SIGSTOP)
    began = time.monotonic()
    assert launched.end() == 6, launched.text()
    assert time.monotonic() - began < 5 + 8
    assert f"rank {rank} has not answered" in launched.text()
    assert "last seen at step" in launched.text()


@pytest.mark.long
@pytest.mark.usefixtures("no_picture")
def test_a_run_that_may_restart_goes_on_by_itself_after_a_kill(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    """The first rank dies when the spare, which only real processes show, has long been waiting for a place
    and for a terminal."""
    file, recipe = recipe_in(tmp_path, steps=20)
    kill = patched(tmp_path, 0, 13, "import time; time.sleep(12); os.kill(os.getpid(), 9)")
    launched = launch("train", str(file), "--restarts", "1", env=kill)
    assert launched.end() == 0, launched.text()
    text = launched.text()
    assert (
        "rank 0 replaced, the others keep their model: restart 1 of 1" in text
        and "after the loss was noticed" in text
    )
    assert "resumed  at step" in text, "what the successor of the first rank prints is seen"
    (tmp_path / "run" / "loss.png").unlink(missing_ok=True)
    assert_whole(tmp_path / "run", straight(recipe))


@pytest.mark.long
def test_a_launcher_that_is_killed_leaves_nothing_behind(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    file, _ = recipe_in(tmp_path, steps=2000)
    launched = launch("train", str(file))
    launched.until(lambda: launched.steps() >= 3)
    os.kill(launched.process.pid, signal.SIGKILL)
    assert launched.end() == -signal.SIGKILL


# ------------------------------------------------------------------ other launchers


def free_port() -> int:
    """A port nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.long
@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_launchers_of_torchrun_train_as_one_of_petune(
    rendezvous: str, tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    file, recipe = recipe_in(tmp_path)
    port = free_port()
    where = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "petune",
        "--local-addr",
        "127.0.0.1",
    ]
    nodes = [
        launch(
            *(
                ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
                if rendezvous == "static"
                else where
            ),
            *("-m", "petune", str(file), f"out={tmp_path / 'run'}"),
            command=(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        )
        for node in range(2)
    ]
    assert [node.end() for node in nodes] == [0, 0], "\n".join(node.text() for node in nodes)
    (tmp_path / "run" / "loss.png").unlink(missing_ok=True)
    assert_same_but_for_rounding(tmp_path / "run", straight(recipe))


@pytest.mark.long
@pytest.mark.usefixtures("no_picture")
def test_ranks_started_by_hand_stop_together_when_one_is_told_to(
    tmp_path: Path, launch: Callable[..., Launched]
) -> None:
    file, _ = recipe_in(tmp_path, steps=100, save_every=1000)
    port = str(free_port())
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
    started = [
        launch(
            str(file),
            command=(sys.executable, "-m", "petune"),
            env={**names, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    started[0].until(lambda: started[0].steps() >= 3)
    os.kill(started[1].process.pid, signal.SIGTERM)
    assert [one.end() for one in started] == [75, 75], "\n".join(one.text() for one in started)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
    assert (
        json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        == numbers(tmp_path / "run")[-1]["step"]
    )


# ------------------------------------------------------------------ started anew


@pytest.mark.parametrize(("replaced", "anew", "goes_on"), [(1, 0, True), (0, 1, False), (0, 0, False)])
def test_a_rank_that_replaces_one_goes_on_whatever_the_clock_says(
    replaced: int, anew: int, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the machine was set back while the run began: its file is older than the launcher."""
    monkeypatch.setenv("PETUNE_GENERATION", str(replaced))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(anew))
    folder = RunFolder(tmp_path, load_recipe())
    (tmp_path / "resolved.yaml").write_text("# run\n")
    os.utime(tmp_path / "resolved.yaml", (1, 1))
    assert petune.run.job.going_on(folder, since=1000.0) is goes_on
