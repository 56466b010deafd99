"""Small runs under a plan in forked ranks, and what may happen to one of them at a step: a kill, a value that
is not finite."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import petune.run.objective
import petune.run.step
import petune.run.train
from petune.parallel.launch import process_group
from petune.recipe import load_recipe
from petune.run import distributed
from petune.run.build import plan_of, prepare
from petune.run.reporting import Silent
from petune.run.state import held_state, restore_parts
from petune.run.step import OptimizerStep
from petune.run.tuned_files import TunedFiles
from petune.saving import checkpoint
from tests.group_pool import End, ends, ranks
from tests.small_runs import run, settings

PLANS: dict[str, Any] = {
    "dp": {"dp": {"shares": [3, 1]}},
    "shard": {"dp": {"size": 2, "shard": True}},
    "tp": {"tp": {"columns": [32, 16]}},
    "sp": {"sp": {"sequence": [5, 3]}},
    "galaxy": {"galaxy": {"columns": [32, 16], "sequence": [5, 3]}},
    "pp": {"pp": {"size": 2, "microbatches": 2}},
}


def small(place: Path, family: str, method: Any, **changes: Any) -> dict[str, Any]:
    """23 rows in forward passes of four, two of them a step, the last of an epoch of three rows; five steps,
    saved at their end. Dropout in every part."""
    task = {"task": changes["task"]} if "task" in changes else {}
    changes["data"] = settings(place, family, **task)["data"] | {"max_rows": 23} | changes.get("data", {})
    shape = {"batch_size": 4, "max_steps": 5, "epochs": 2, "keep": 10, "save_every": 50}
    return settings(place, family, method, **{**shape, **changes})


def trained(recipe: dict[str, Any], **options: Any) -> Path:
    """The run folder of a recipe, in as many forked ranks as its plan asks for."""
    wanted = petune.run.train.distributed.wanted(petune.run.train.settle(recipe))
    if wanted.world == 1:
        return run(recipe, **options).folder
    ranks(wanted.world, train_as_a_rank, recipe, options, timeout=40)
    return Path(recipe["out"])


def train_as_a_rank(recipe: dict[str, Any], options: dict[str, Any]) -> None:
    run(recipe, **options)


def rewritten(recipe: dict[str, Any], saved: Path, root: Path) -> None:
    """On each rank of a plan: put its part of a state back, let all train nothing, and write it once more."""
    loaded = load_recipe(recipe)
    plan = plan_of(loaded)
    with distributed.among(plan):
        mesh = distributed.join(loaded, plan)
        step = OptimizerStep(prepare(loaded), mesh)
        restore_parts(saved, step.runner, step.optimizer, step.make_optimizer)
        held = held_state(step.runner, step.optimizer, step.make_optimizer)
        crew = step.runner.crew
        if mesh.main or crew.world > 1:
            checkpoint.commit(root, 2, held.begin, run_id="run", facts={}, fill=held.fill, crew=crew)
        tuned = TunedFiles(step, Silent())
        tuned.write(root / "tuned") if mesh.main else tuned.take_part()


def at_steps(
    rank: int, steps: dict[int, Callable[[], None]]
) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """What a rank calls: train, and on `rank` do something before the update of each of the steps, counted
    from 1."""

    def train(recipe: dict[str, Any], options: dict[str, Any]) -> None:
        step = OptimizerStep.take

        def watched(self: OptimizerStep) -> dict[str, Any]:
            if process_group.started()[0] == rank and (act := steps.get(self.progress.step + 1)):
                act()
            return step(self)

        OptimizerStep.take = watched  # type: ignore[method-assign]  # in this very process, which ends soon
        run(recipe, **options)

    return train


def spoilt(
    rank: int, step: int, patch: Callable[[], None]
) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """What a rank calls: train, with `patch` made on one rank before a step."""
    return at_steps(rank, {step: patch})


def infinite_loss() -> None:
    summed = petune.run.objective.cross_entropy_sum
    petune.run.objective.cross_entropy_sum = lambda *given: summed(*given) * math.nan


def killed(recipe: dict[str, Any], rank: int, after_s: float, resume: bool) -> list[End]:
    """How the ranks of a run end of which one is killed `after_s` seconds after training began."""

    def train(recipe: dict[str, Any], options: dict[str, Any]) -> None:
        if process_group.started()[0] == rank:
            restore = OptimizerStep.make_audit

            def armed(self: OptimizerStep) -> Any:
                threading.Thread(
                    target=lambda: (time.sleep(after_s), os.kill(os.getpid(), signal.SIGKILL)), daemon=True
                ).start()
                return restore(self)

            OptimizerStep.make_audit = armed  # type: ignore[method-assign]
        run(recipe, **options)

    return ends(2, train, recipe, {"resume": resume}, timeout=30)
