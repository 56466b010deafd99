"""A run in several processes: what starts them, how one of them joins, and what they must agree on before the
first weight is cut."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from petune.errors import MachineError, Stopped, UsageError
from petune.log import phase, say
from petune.models.checksums import RankShare
from petune.models.contents import contents_of
from petune.parallel import Mesh, ParallelConfig, ParallelPlan, Runner, alone, make_mesh, renew
from petune.parallel.launch import process_group
from petune.parallel.launch.launcher import launch
from petune.parallel.placement import refuse_together
from petune.recipe import Recipe, load_recipe
from petune.run.build import Base, Prepared, choose_place, plan_of
from petune.run.folder import RANK_LOGS, RunFolder
from petune.run.job import Job
from petune.run.signals import StopAsked
from petune.saving.fingerprint import fingerprint

MUST_AGREE = ("petune", "torch", "transformers")  # packages of one version on every rank


def wanted(recipe: Recipe, base: Base | None = None) -> ParallelPlan:
    """The plan of a recipe for the processes that were started, or, where only this one was, for those it
    asks for.

    base: its model, where that was found already. Raises UsageError for a plan that cannot be, or one that
    needs another number of processes than a launcher has started.
    """
    started = process_group.started()[1]
    plan = plan_of(recipe, started if started > 1 else None, base)
    if started > 1 and plan.world != started:
        remedy = (
            "name a backend: parallel=dp"
            if plan.world == 1
            else "start as many, or let petune train start them"
        )
        expected, found = f"{plan.world} processes", str(started)
        what = "the plan is for another number of processes"
        raise UsageError(what, where="parallel", expected=expected, found=found, remedy=remedy)
    return plan


def planned(recipe: Recipe) -> Recipe:
    """The recipe with axes for the devices of this machine, where it leaves their choice open.

    Another process measures and chooses, as it stands above this room. Raises UsageError under a launcher of
    others, which has started ranks for a plan already, MachineError where nothing can be chosen.
    """
    if not recipe.parallel.auto:
        return recipe
    where = recipe.where("parallel")
    if process_group.started()[1] > 1:
        remedy = "write the axes that petune plan --cluster FILE prints"
        raise UsageError("auto is for ranks that petune itself starts", where=where, remedy=remedy)
    with tempfile.TemporaryDirectory(prefix="petune-") as scratch, phase("choosing a parallel plan"):
        job, answer = Job(recipe, RunFolder.of(recipe)).write(Path(scratch)), Path(scratch) / "choice.json"
        command = [sys.executable, "-m", "petune", "--choose", str(job), str(answer)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise MachineError("no plan could be chosen", where=where, found=done.stderr.strip() or None)
        choice = json.loads(answer.read_text(encoding="utf-8"))
    for text in choice["reasons"]:
        say(text)
    return load_recipe(recipe, choice["settings"])


def launch_ranks(
    plan: ParallelPlan, job: Job, restarts: int = 0, on_line: Callable[[str], None] = say
) -> None:
    """Start every rank of a job on this machine and wait for their end; up to `restarts` times one that was
    killed or froze is replaced, which `on_line` is told.

    Raises what the first of them to fail has raised.
    """
    recipe = job.recipe
    # the ranks are given a file, and say nothing of it
    for note in recipe.notes if recipe.source is None else ():
        say(f"recipe   {note}")
    with tempfile.TemporaryDirectory(prefix="petune-") as scratch:
        file = replace(job, since=time.time()).write(Path(scratch))
        command = [sys.executable, "-m", "petune", "--job", str(file)]
        launch(
            command, plan.world, restarts=restarts, log_folder=job.folder.path / RANK_LOGS, on_line=on_line
        )


def refuse_objects(recipe: Recipe, given: Mapping[str, Any]) -> None:
    """Raise UsageError for what lives in this process alone beside a parallel plan, whose processes read
    everything from files."""
    for name, value in given.items():
        if value and recipe.parallel != ParallelConfig():
            remedy = {
                "model": "save it with save_pretrained, with its tokenizer, and give the folder",
                "data": "write the rows to a .jsonl file and give its path",
                "callbacks": "leave them out",
            }[name]
            what = f"{name} in memory cannot reach the processes of a parallel plan"
            raise UsageError(what, where=recipe.where("parallel"), remedy=f"{remedy}; or set parallel: none")


def join(recipe: Recipe, plan: ParallelPlan) -> Mesh:
    """This process in the plan: alone, or in the group of those that were started with it, which is joined
    here.

    Raises DistributedError when ranks are missing or cannot be reached, MachineError without a GPU for this
    one.
    """
    place = choose_place(recipe)
    if plan.world == 1:
        return alone(place.device)
    process_group.join("cuda" if place.device.type == "cuda" else "cpu", recipe.timeout)
    return make_mesh(plan, choose_place(recipe).device)  # asked again: joining has chosen the GPU


def rejoin(runner: Runner, folder: RunFolder, prepared: Prepared, model: str) -> None:
    """Join the group again after a rank was replaced, and agree with it as at a start. model: what
    `agree_on_model` gave there."""
    process_group.rejoin()
    renew(runner.mesh)
    one_folder(folder)
    agree(prepared)
    process_group.agree({"model": model})
    process_group.barrier()
    refuse_together([], prepared.source.place)  # what the rank that is new has read
    runner.rejoin()


def one_folder(folder: RunFolder) -> RunFolder:
    """The run folder as the first rank names it: a name made of the time may differ."""
    return (
        replace(folder, path=Path(process_group.gather(str(folder.path))[0]))
        if process_group.inside()
        else folder
    )


def outlive(work: Callable[[], None], meet_again: Callable[[], None], whole: str | None) -> None:
    """Do `work`; as often as another rank is lost and replaced meanwhile, `meet_again` it and go on.

    whole: why all ranks start anew instead, if so. Raises what `work` does where nobody is replaced.
    """
    lost = False
    while True:
        try:
            if lost:
                meet_again()
            process_group.settle(whole)
            work()
            return process_group.unsettle()
        except StopAsked:
            raise
        except Exception as error:
            if not process_group.survives(error):
                raise
        lost = True


def agree(prepared: Prepared) -> None:
    """Compare over all ranks what would make them compute different things. Raises DistributedError naming
    it, on every rank."""
    recipe = prepared.recipe
    settings = {
        key: value for key, value in recipe.resolved().items() if key not in ("name", "out", "device")
    }
    facts = {f"version of {package}": version(package) for package in MUST_AGREE}
    facts["recipe"] = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]
    facts["data"] = prepared.rows.sha256[:16]
    process_group.agree(facts)


def agree_on_model(model: nn.Module) -> str:
    """The same for the base model, whole; what was compared. Raises as `agree`."""
    if (contents := contents_of(model)) is not None:
        found = contents.fingerprint()
    else:
        text = json.dumps(fingerprint(model), sort_keys=True, default=str)
        found = hashlib.sha256(text.encode()).hexdigest()[:16]
    process_group.agree({"model": found})
    return found


def share_of_checksums() -> RankShare:
    """This rank's share of the checksums of the whole model, which all ranks of a start take together.

    A rank in the place of a lost one takes all alone: those that it meets are past their start.
    """
    here = process_group.place()
    if here is None or not process_group.inside() or process_group.replacement():
        return RankShare()
    return RankShare(here.rank, here.world, process_group.gather)


@contextmanager
def among(plan: ParallelPlan) -> Iterator[None]:
    """Leave the group when the block has ended well, or was stopped, as every rank then is; a group that
    broke is left as it is."""
    try:
        yield
    except Stopped:
        if plan.world > 1:
            process_group.leave()
        raise
    if plan.world > 1:
        process_group.leave()
