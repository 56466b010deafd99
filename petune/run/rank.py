"""One process of a run: alone, or one rank of a plan. It takes the lock, prepares, and runs the loop."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

from petune.errors import Stopped
from petune.log import phase
from petune.parallel import ParallelPlan
from petune.parallel.launch import process_group
from petune.run import distributed
from petune.run.build import Base, prepare
from petune.run.callbacks import Callbacks
from petune.run.finished import Run, load_run
from petune.run.job import Job
from petune.run.loop import Loop
from petune.run.objects import NO_OBJECTS, Objects
from petune.run.reporting import Logged, Reporter, Silent
from petune.run.signals import StopNow, StopRequest


@dataclass(frozen=True)
class Here:
    """What only this process has: who speaks, what was given in memory, and what is called after steps."""

    reporter: Reporter
    objects: Objects = NO_OBJECTS
    callbacks: Callbacks | None = None


def finished(job: Job, here: Here) -> Run:
    """The run of a job that is done, which is said. The first rank, which holds the lock, removes what was
    left half-made."""
    path = job.folder.path
    if process_group.started()[0] == 0:
        job.folder.sweep()
    here.reporter.note(
        f"{path} is finished; to go on raise epochs or max_steps and --allow-change it, or choose another out"
    )
    return Run(path, objects=here.objects)


def run_rank(job: Job, base: Base, plan: ParallelPlan, here: Here) -> Run:
    """Train in this process, alone or as one rank of `plan`; the run when it has ended. The first rank holds
    the lock of the run folder."""
    first = process_group.started()[0] == 0
    # the lock comes before anything is read that another run may change
    with job.entered() if first else nullcontext():
        return finished(job, here) if job.is_done() else _train(job, base, plan, here)


def _train(job: Job, base: Base, plan: ParallelPlan, here: Here) -> Run:
    stop, objects = StopRequest(), here.objects
    with stop.listening(), distributed.among(plan):
        mesh = distributed.join(job.recipe, plan)
        folder = distributed.one_folder(job.folder)
        with phase("reading config, data and tokenizer"):
            prepared = prepare(job.recipe, objects=objects, base=base)
            prepared = replace(prepared, restored=bool(job.resume) and job.has_state(folder))
        if plan.world > 1:
            distributed.agree(prepared)
        if not mesh.main:
            Loop(prepared, folder, Silent(), stop, mesh).run(job.resume, job.allow_change)
            return load_run(folder.path)
        logged = Logged(here.reporter, folder.log, folder.metrics, stop.output_lost)
        try:
            # refuses what cannot train, before anything is written
            loop = Loop(prepared, folder, logged, stop, mesh, here.callbacks)
            if not job.resume:
                folder.begin(loop.saver.run_id, overwrite=job.overwrite)
            loop.run(job.resume, job.allow_change)
        except BaseException as error:
            with suppress(
                OSError
            ):  # where the folder's disk does not answer, the error itself is what matters
                if folder.has_resolved() and not isinstance(error, Stopped | StopNow):
                    logged.write_error(process_group.explain(error))
            raise
    tuned = None if objects.model is None else (loop.step.model.eval(), prepared.tokenizer, prepared.reader)
    return Run(folder.path, objects=objects, tuned=tuned)
