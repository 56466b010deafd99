"""`--restarts`: a rank that dies is replaced while the others keep process and model, and the numbers are as
if nothing had been.

The launcher is the real one; the processes it starts are forks, which cost no imports.
"""

from __future__ import annotations

import operator
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

import petune.run.build
from petune.errors import DataError, DistributedError, Stopped
from petune.parallel.launch import beats, orders, process_group
from petune.parallel.runner import Runner
from petune.run.step import OptimizerStep
from petune.run.train import train
from petune.saving import checkpoint
from tests.forked_launch import Forks, note_loads
from tests.forked_launch import forks as forks
from tests.group_pool import ranks
from tests.small_runs import Listener, assert_same_run, run, settings

pytestmark = [pytest.mark.usefixtures("no_picture"), pytest.mark.timeout(120)]
PLANS: dict[str, Any] = {
    "dp": {"dp": {"shares": [3, 1]}},
    "tp": {"tp": {"columns": [32, 16]}},
    "galaxy": {"galaxy": {"columns": [32, 16], "sequence": [5, 3]}},
    "pp": {"pp": {"size": 2, "microbatches": 2}},
    "sp": {"sp": {"sequence": [5, 3]}},
    "shard": {"dp": {"size": 2, "shard": True}},
    "dp x tp": {"dp": 2, "tp": {}},
}

LONG = pytest.param("pp", 0, marks=pytest.mark.long)
LOADING = pytest.param("petune.run.build.load_model", marks=pytest.mark.long)


def small(place: Path, plan: str, **changes: Any) -> dict[str, Any]:
    """Six steps, saved at every third, with dropout and an evaluation in between."""
    shape = {"batch_size": 4, "max_steps": 6, "epochs": 3, "save_every": 3, "eval_every": 4, "timeout": 30}
    return settings(place, "llama", "lora", **{**shape, "parallel": PLANS[plan], **changes})


def straight(recipe: dict[str, Any], world: int = 2) -> Path:
    """The same run, left alone."""
    folder = Path(recipe["out"]).with_name("straight")
    ranks(world, lambda: run(recipe | {"out": str(folder)}) and None)
    return folder


class Alone:
    """Runs that nothing happened to, each made once for all tests of its plan."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.made: dict[str, Path] = {}

    def recipe(self, folder: Path, plan: str, **changes: Any) -> dict[str, Any]:
        """Of a run in `folder` on the same model, whose name is in what is saved."""
        return small(self.place, plan, out=str(folder / "run"), **changes)

    def folder(self, plan: str) -> Path:
        """Where the plan's run has ended."""
        if plan not in self.made:
            world = 4 if " x " in plan else 2
            self.made[plan] = straight(self.recipe(self.place / plan, plan), world)
        return self.made[plan]


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What runs to which something happens are compared with."""
    return Alone(tmp_path_factory.mktemp("alone"))


def before_step(monkeypatch: pytest.MonkeyPatch, acts: dict[tuple[int, int, int], Callable[[], Any]]) -> None:
    """Let ranks do something: (generation, rank, step) -> what, before that step."""
    step = OptimizerStep.take

    def watched(self: OptimizerStep) -> dict[str, Any]:
        if act := acts.get((process_group.restarted(), process_group.started()[0], self.progress.step + 1)):
            act()
        return step(self)

    monkeypatch.setattr(OptimizerStep, "take", watched)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the launcher says."""
    lines: list[str] = []
    for place in ("distributed", "train"):
        monkeypatch.setattr(f"petune.run.{place}.say", lines.append)
    return lines


# ------------------------------------------------------------------ one rank dies


@pytest.mark.parametrize(
    ("plan", "rank"),
    [
        ("pp", 1),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("dp", 0), ("tp", 1), ("galaxy", 0), ("sp", 1), ("pp", 0))
        ),
    ],
)
def test_a_killed_rank_is_replaced_and_the_others_keep_process_and_base(
    plan: str,
    rank: int,
    tmp_path: Path,
    forks: Forks,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    left_alone: Alone,
) -> None:
    loads = note_loads(monkeypatch, tmp_path / "loads")
    recipe = left_alone.recipe(tmp_path, plan)
    before_step(monkeypatch, {(0, rank, 6): die})
    train(recipe, restarts=1, reporter=Listener())
    assert (
        said[0]
        == f"rank {rank} was killed by SIGKILL\nrank {rank} replaced, the others keep their model: restart 1"
        " of 1"
    )
    assert (
        re.fullmatch(r"all ranks train again, \d+\.\d s after the loss was noticed", said[1])
        and len(said) == 2
    )
    assert re.search(r"resumed from .*step-[34] at step [34]", (tmp_path / "run" / "run.log").read_text())
    kept = forks.pids(1 - rank)
    assert len(kept) == 1, "the other rank was started once"
    by_process = Counter(loads())
    assert by_process[kept[0]] == 1 + (rank != 0), (
        "it read the base once, and the first rank again to write tuned/"
    )
    assert by_process[forks.pids(rank)[0]] == 1 and len(by_process) == 3
    monkeypatch.undo()
    assert_same_run(Path(recipe["out"]), left_alone.folder(plan))


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_dies_while_a_checkpoint_is_written_beside_training_is_replaced(
    rank: int,
    tmp_path: Path,
    forks: Forks,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    left_alone: Alone,
) -> None:
    """The other's thread waits for its part; later checkpoints are written by both again."""
    commit = checkpoint.commit

    def deadly(root: Path, step: int, *given: Any, **named: Any) -> Path:
        if process_group.restarted() == 0 and process_group.started()[0] == rank and step == 3:
            assert threading.current_thread().name == "petune-save"
            time.sleep(0.2)
            die()
        return commit(root, step, *given, **named)

    monkeypatch.setattr(checkpoint, "commit", deadly)
    recipe = left_alone.recipe(tmp_path, "galaxy")
    train(recipe, restarts=1, reporter=Listener())
    assert f"rank {rank} replaced, the others keep their model" in said[0]
    assert re.search(r"resumed from .*step-0 at step 0", (tmp_path / "run" / "run.log").read_text())
    assert len(forks.pids(1 - rank)) == 1
    monkeypatch.undo()
    assert_same_run(Path(recipe["out"]), left_alone.folder("galaxy"))


@pytest.mark.long
def test_four_ranks_survive_one_after_the_other_and_two_at_once(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch, left_alone: Alone
) -> None:
    recipe = left_alone.recipe(tmp_path, "dp x tp")
    before_step(monkeypatch, {(0, 3, 3): die, (1, 0, 5): die, (2, 1, 6): die, (2, 2, 6): die})
    train(recipe, restarts=9, reporter=Listener())
    assert len(forks.pids(0)) == 1, (
        "whoever stood in for the first rank was a spare or the second start of it"
    )
    assert sum("replaced" in line for line in said) in (3, 4)
    monkeypatch.undo()
    assert_same_run(Path(recipe["out"]), left_alone.folder("dp x tp"))


def test_a_rank_that_waits_for_one_that_has_left_is_freed(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 3 dies before the sums of gradients: rank 0 has its sum with rank 1 and waits for rank 2, which
    has lost rank 3 and left."""
    complete = Runner._complete

    def deadly(self: Runner) -> None:
        if (
            process_group.restarted() == 0
            and self.mesh.rank == 3
            and self.tuned
            and next(iter(self.tuned.values())).grad is not None
        ):
            die()
        complete(self)

    monkeypatch.setattr(Runner, "_complete", deadly)
    began = time.monotonic()
    train(small(tmp_path, "dp x tp", max_steps=3, epochs=1), restarts=1, reporter=Listener())
    assert time.monotonic() - began < 15 and "rank 3 replaced" in said[0]


@pytest.mark.long
def test_a_frozen_rank_is_named_killed_and_replaced(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch, left_alone: Alone
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.2)
    monkeypatch.setattr(beats, "SILENT_S", 0.6)
    recipe = left_alone.recipe(tmp_path, "tp", timeout=2)
    before_step(monkeypatch, {(0, 1, 5): lambda: os.kill(os.getpid(), signal.SIGSTOP)})
    train(recipe, restarts=1, reporter=Listener())
    assert re.match(r"rank 1 has not answered for \d s \(last seen at step \d\)\nrank 1 replaced", said[0]), (
        said
    )
    assert len(forks.pids(0)) == 1
    monkeypatch.undo()
    assert_same_run(Path(recipe["out"]), left_alone.folder("tp"))


# ------------------------------------------------------------------ what happens meanwhile


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("petune.run.build.load_model", marks=pytest.mark.long),
        "torch.distributed.init_process_group",
    ],
)
def test_a_second_rank_that_dies_while_the_first_is_replaced_is_replaced_with_it(
    where: str,
    tmp_path: Path,
    forks: Forks,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    left_alone: Alone,
) -> None:
    """The successor of rank 1 dies as it loads the base, or when it has met rank 0 but not joined its group:
    rank 0 meets yet another."""
    work = operator.attrgetter(where.removeprefix("torch.").removeprefix("petune."))(
        torch if where.startswith("torch") else petune
    )

    def deadly(*given: Any, **named: Any) -> Any:
        if process_group.restarted() == 1 and process_group.started()[0] == 1:
            die()
        return work(*given, **named)

    monkeypatch.setattr(where, deadly)
    recipe = left_alone.recipe(tmp_path, "galaxy")
    before_step(monkeypatch, {(0, 1, 5): die})
    train(recipe, restarts=3, reporter=Listener())
    counts = [line.rpartition(": ")[2] for line in said[:2]]
    assert counts == ["restart 1 of 3", "restart 2 of 3"] and all(
        "rank 1 replaced" in line for line in said[:2]
    )
    assert len(forks.pids(0)) == 1
    monkeypatch.undo()
    assert_same_run(Path(recipe["out"]), left_alone.folder("galaxy"))


def test_a_rank_that_hangs_while_a_group_forms_anew_is_replaced_soon(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the new group of both forms, rank 1 dies and rank 0 waits for its connection, in C++, which hears of
    no order."""
    form = torch.distributed.init_process_group

    def hanging(*given: Any, **named: Any) -> Any:
        if process_group.restarted() == 1:
            die() if process_group.started()[0] else time.sleep(600)
        return form(*given, **named)

    monkeypatch.setattr(torch.distributed, "init_process_group", hanging)
    recipe = small(tmp_path, "dp", timeout=90, max_steps=3)
    before_step(monkeypatch, {(0, 1, 2): die})
    began = time.monotonic()
    train(recipe, restarts=4, reporter=Listener())
    assert time.monotonic() - began < 60, "that is less than the time-out of a collective"
    assert len(forks.pids(0)) == 2, said


@pytest.mark.long
def test_when_nobody_is_left_who_has_the_model_all_start_again(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch, left_alone: Alone
) -> None:
    """Rank 0 dies while the successor of rank 1 has nothing to keep yet."""
    rejoin = process_group.rejoin

    def die_at_it() -> None:
        time.sleep(0.2)
        die()
        rejoin()

    monkeypatch.setattr(process_group, "rejoin", die_at_it)
    recipe = left_alone.recipe(tmp_path, "tp")
    before_step(monkeypatch, {(0, 1, 5): die})
    train(recipe, restarts=2, reporter=Listener())
    assert said[1].startswith("rank 0 was killed by SIGKILL") and said[1].endswith(
        "all ranks start again: restart 2 of 2"
    )
    monkeypatch.undo()
    assert_same_run(Path(recipe["out"]), left_alone.folder("tp"))


@pytest.mark.long
def test_a_spare_that_dies_is_told_and_a_rank_is_replaced_without_it(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch, left_alone: Alone
) -> None:
    monkeypatch.setattr(orders, "take_place", die)
    recipe = left_alone.recipe(tmp_path, "dp")
    before_step(monkeypatch, {(0, 0, 4): lambda: time.sleep(0.5), (0, 1, 5): die})
    train(recipe, restarts=1, reporter=Listener())
    assert said[0].startswith("the spare process has ended (code -9)") and "rank 1 replaced" in said[1]
    assert len(forks.pids(1)) == 2, "its successor was started when it was needed"
    monkeypatch.undo()
    assert_same_run(Path(recipe["out"]), left_alone.folder("dp"))


@pytest.mark.long
def test_the_spare_takes_the_place_and_another_waits(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch, left_alone: Alone
) -> None:
    recipe = left_alone.recipe(tmp_path, "dp")
    before_step(
        monkeypatch, {(0, 1, 4): lambda: time.sleep(0.5), (0, 0, 5): die, (1, 1, 6): lambda: time.sleep(0.5)}
    )
    train(recipe, restarts=2, reporter=Listener())
    assert len(forks.pids(0)) == 1 and len(forks.pids(1)) == 1 and len(forks.pids(0, spare=True)) == 2
    with pytest.raises(ProcessLookupError):
        os.kill(forks.pids(0, spare=True)[1], 0)
    monkeypatch.undo()
    assert_same_run(Path(recipe["out"]), left_alone.folder("dp"))


def test_a_stop_while_a_rank_is_replaced_ends_the_run_where_it_was_saved_last(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch, left_alone: Alone
) -> None:
    load = petune.run.build.load_model

    def loaded(*given: Any) -> Any:
        if process_group.restarted():
            (tmp_path / "asked").touch()
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(5)
        return load(*given)

    monkeypatch.setattr(petune.run.build, "load_model", loaded)
    recipe = left_alone.recipe(tmp_path, "galaxy")
    before_step(monkeypatch, {(0, 1, 4): die})
    with pytest.raises(Stopped, match=r"stopped by SIGTERM"):
        train(recipe, restarts=3, reporter=Listener())
    assert time.time() - (tmp_path / "asked").stat().st_mtime < 5
    monkeypatch.undo()
    ranks(2, lambda: run(recipe, resume=True) and None)
    assert_same_run(Path(recipe["out"]), left_alone.folder("galaxy"))


@pytest.mark.long
def test_restarts_that_are_used_up_end_the_run_as_without_any(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch, left_alone: Alone
) -> None:
    recipe = left_alone.recipe(tmp_path, "sp")
    before_step(monkeypatch, {(0, 1, 5): die, (1, 0, 6): die})
    with pytest.raises(DistributedError, match=r"^rank 0 was killed by SIGKILL(.|\n)*--resume"):
        train(recipe, restarts=1, reporter=Listener())
    monkeypatch.undo()
    ranks(2, lambda: run(recipe, resume=True) and None)
    assert_same_run(Path(recipe["out"]), left_alone.folder("sp"))


@pytest.mark.long
def test_a_run_with_a_cache_starts_all_again_and_ends_as_one_left_alone(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small(tmp_path, "dp") | {"method": {"name": "side", "reduction": 4}, "cache": True}
    expected = straight(recipe)
    before_step(monkeypatch, {(0, 0, 6): die})
    train(recipe, restarts=1, reporter=Listener())
    assert "all ranks start again, as the activation cache is opened by all ranks together" in said[-1]
    assert_same_run(Path(recipe["out"]), expected)


@pytest.mark.long
def test_a_plan_whose_objects_hold_the_group_starts_all_again_and_says_why(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch, left_alone: Alone
) -> None:
    recipe = left_alone.recipe(tmp_path, "shard")
    before_step(monkeypatch, {(0, 1, 5): die})
    train(recipe, restarts=1, reporter=Listener())
    assert said[-1].endswith(
        "all ranks start again, as FSDP's shards hold their process group: restart 1 of 1"
    )
    assert not forks.pids(0, spare=True), "a spare would be of no use"
    monkeypatch.undo()
    assert_same_run(Path(recipe["out"]), left_alone.folder("shard"))


def test_an_error_that_a_rank_raises_itself_is_no_restart(
    tmp_path: Path, forks: Forks, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil() -> None:
        raise DataError("the row is no object", where="rows.jsonl:7")

    before_step(monkeypatch, {(0, 1, 2): spoil})
    with pytest.raises(DataError, match=r"^rank 1: rows.jsonl:7  the row is no object"):
        train(small(tmp_path, "tp"), restarts=3, reporter=Listener())
    assert said == [] and len(forks.pids(0)) == 1


# ------------------------------------------------------------------ random kills

KILLS = int(os.environ.get("PETUNE_KILLS", "200"))  # of a rank, over all runs of the long form
PER_RUN = 5


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("world", "snapshot_every", "count"),
    [
        pytest.param(2, None, KILLS // 2, marks=pytest.mark.long),
        pytest.param(4, None, KILLS // 2, marks=pytest.mark.long),
        pytest.param(2, 1, KILLS // 2, marks=pytest.mark.long),
        pytest.param(4, 1, KILLS // 2, marks=pytest.mark.long),
        (2, 1, 1),
    ],
)
def test_no_run_is_lost_to_random_kills_of_its_ranks(
    world: int,
    snapshot_every: int | None,
    count: int,
    tmp_path: Path,
    forks: Forks,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every run ends as one that was left alone, bit by bit; a kill costs no more steps than were made since
    the newest saved state."""
    draw, steps = random.Random(world), 40 if count > PER_RUN else 4
    plans = ("dp", "tp", "galaxy", "pp", "sp") if world == 2 else ("dp x tp",)
    shape = {
        "max_steps": steps,
        "epochs": 14,
        "save_every": 5,
        "eval_every": 17,
        "keep": 3,
        "snapshot_every": snapshot_every,
    }
    expected: dict[str, Path] = {}
    kills, lost, whole, took = 0, [0], 0, [0.0]
    while kills < count:
        plan = draw.choice(plans)
        recipe = small(tmp_path, plan, out=f"run-{kills}", **shape)
        if plan not in expected:
            expected[plan] = straight(recipe | {"out": str(tmp_path / f"out-{plan}" / "run")}, world)
        said.clear()
        forks.places.clear()
        killer = Killer(
            forks,
            Path(recipe["out"]),
            sorted(draw.choice((-1, *range(steps))) for _ in range(min(PER_RUN, count + 1))),
            draw,
            world,
        )
        killer.start()
        train(recipe, restarts=2 * PER_RUN, reporter=Listener())
        killer.join()
        assert_same_run(Path(recipe["out"]), expected[plan])
        log = (Path(recipe["out"]) / "run.log").read_text()
        lost += [
            int(last) - int(first) + 1
            for first, last in re.findall(r"trained again: steps (\d+) to (\d+)", log)
        ]
        whole += sum("all ranks start again" in line for line in said)
        took += [float(found[1]) for line in said if (found := re.search(r"again, (\d+\.\d) s", line))]
        kills += killer.done
        shutil.rmtree(recipe["out"])
    print(
        f"\n{kills} kills of one of {world} ranks, {snapshot_every=}: steps lost"
        f" {sorted(Counter(lost[1:]).items())}"
    )
    print(f"{whole} full restarts, recovery {sorted(took)[-3:]} s at most")
    assert max(lost) <= 5, (
        "with snapshots it is one, or as many as are made while one is written: that is the disk's to say"
    )


class Killer(threading.Thread):
    """Kills a random rank after each of the steps, -1 being while the ranks start."""

    def __init__(self, forks: Forks, folder: Path, steps: list[int], draw: random.Random, world: int) -> None:
        super().__init__(daemon=True)
        self.forks, self.folder, self.world = forks, folder, world
        self.plan = [(step, draw.randrange(world), draw.uniform(0, 0.1)) for step in steps]
        self.done = 0

    def run(self) -> None:
        metrics, summary = self.folder / "metrics.jsonl", self.folder / "summary.json"
        for step, rank, pause in self.plan:
            while not summary.exists() and not self._reached(metrics, step):
                time.sleep(0.005)
            time.sleep(pause)
            pid = self.forks.places.get(rank)
            with suppress(ProcessLookupError):
                if pid is not None and not summary.exists():
                    os.kill(pid, signal.SIGKILL)
                    self.done += 1
            time.sleep(0.2)  # the launcher has seen it

    def _reached(self, metrics: Path, step: int) -> bool:
        if step < 0:
            return len(self.forks.places) == self.world
        with suppress(OSError):
            return metrics.read_text().count('"grad_norm"') >= step > 0 or (step == 0 and metrics.exists())
        return False
