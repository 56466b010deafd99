"""`petune.train`: settles what is meant, then trains in this process or starts those of a parallel plan. The loop is petune.run.loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from petune.errors import Stopped, UsageError
from petune.log import phase
from petune.parallel import ParallelPlan
from petune.parallel.launch import process_group
from petune.recipe import Recipe, differences, load_recipe, settings_text
from petune.run import distributed
from petune.run.build import prepare
from petune.run.callbacks import Callback, Callbacks
from petune.run.entrance import entered, refuse_unknown
from petune.run.finished import Run, load_run
from petune.run.folder import RunFolder
from petune.run.loop import Loop
from petune.run.notebook import fitting_reporter
from petune.run.objects import Objects, take_objects
from petune.run.reporting import Logged, Reporter, Silent
from petune.run.signals import StopNow, StopRequest
from petune.tasks import Table

__all__ = ["Run", "load_run", "settle", "train"]


def train(
    recipe: str | Path | Recipe | Mapping[str, Any] | None = None,
    *,
    model: str | Path | nn.Module | None = None,
    data: str | Path | Table | Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    method: str | Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool | str | Path = False,
    overwrite: bool = False,
    allow_change: Collection[str] = (),
    reporter: Reporter | None = None,
    overrides: Sequence[str] = (),
    restarts: int = 0,
    **settings: Any,
) -> Run:
    """Train a model with `method` on `data` and return the finished run.

        >>> run = petune.train(model="my-model", data="rows.jsonl", method="lora", lr=2e-4, out="runs/first")
        >>> run.history[-1]["step"] == run.summary["steps"]
        True

    Model and data may be in memory. The model is then tuned in place:

        >>> base = transformers.AutoModelForCausalLM.from_pretrained("my-model")
        >>> words = transformers.AutoTokenizer.from_pretrained("my-model")
        >>> rows = [{"text": "red sun sings"}, {"text": "blue sea runs"}, {"text": "green hill sings"}]
        >>> run = petune.train(model=base, tokenizer=words, data=rows, method={"name": "lora", "r": 8}, out="runs/second")
        >>> run.model is base
        True

    recipe: a file, the name of a shipped recipe, a mapping, or a run folder, which stands for its own recipe; None: `model` and `data` with
        neutral settings, or without them the demo.
    model: a folder, a hub id, or a transformers model that has the head of the task, which comes with its `tokenizer`.
    data: a file, folder or hub id; a list of mappings, a datasets.Dataset or a pandas.DataFrame; a mapping of splits to these
        (DatasetDict); or a mapping of the settings under `data` (path, eval, columns, ...), whose path and eval may be any of these.
    method: full, lora, adapter or side, or a mapping of its name and settings.
    callbacks: objects of subclasses of petune.Callback, called after steps and evaluations; they may end the run.
    resume: True goes on from the newest checkpoint in the run folder `out` that verifies, a path from exactly that one. Objects are given
        again: their fingerprints must agree with those the run began with.
    overwrite: replace the run in the folder `out`.
    allow_change: names of settings that may differ from those the run began with.
    reporter: speaks in this process; None: a progress bar and a loss curve in a notebook, plain lines elsewhere.
    overrides: `key.sub=value` texts, as on the command line.
    restarts: how often a process of a parallel plan that was killed or froze may be replaced; all then go on from the newest saved state.
    settings: every other key of a recipe, listed below; docs/recipes.md says more.

    A recipe with a parallel plan starts its processes itself, unless this is one of those a launcher has started. Raises PetuneError: every
    subclass carries the exit code of its kind; Stopped when a signal ended the run after saving.
    """
    named = {"model": model, "data": data, "method": method}
    settings |= {key: value for key, value in named.items() if value is not None}
    settings, objects = take_objects(settings, tokenizer)
    settled = settle(recipe, overrides, settings)
    if objects.model is not None and settled.dtype == "auto":
        settled = load_recipe(settled, {"dtype": objects.dtype})
    distributed.refuse_objects(settled, {"model": objects.model, "data": objects.data, "callbacks": callbacks})
    refuse_unknown(allow_change)
    job = _Job(
        settled, RunFolder.of(settled), reporter or fitting_reporter(), objects, Callbacks(callbacks), resume, overwrite, allow_change
    )
    folder, plan = job.folder, distributed.wanted(settled)
    starts = plan.world > 1 and not process_group.joined()
    if restarts and not starts:
        remedy = "leave it out, or name a parallel backend"
        raise UsageError("there are no processes here that petune could start anew", where="--restarts", remedy=remedy)
    first = process_group.started()[0] == 0
    alone = entered(folder, resume=bool(resume), overwrite=overwrite, allow_change=allow_change) if first else nullcontext()
    with alone:  # the lock comes before anything is read that another run may change
        if resume is True and folder.finished() and not differences(folder.resolved(), settled.resolved()):
            if first:
                folder.sweep()
            job.reporter.note(f"{folder.path} is finished; to go on raise epochs or max_steps and --allow-change it, or choose another out")
            return Run(folder.path, objects=objects)
        if not starts:
            return _train_here(job, plan)
        if overwrite:
            folder.clear_rank_logs()
    distributed.start(plan, settled, folder, resume=resume, overwrite=overwrite, allow_change=allow_change, restarts=restarts)
    return load_run(folder.path)


train.__doc__ = (train.__doc__ or "") + settings_text()


@dataclass(frozen=True)
class _Job:
    """What `train` was asked for, settled."""

    recipe: Recipe
    folder: RunFolder
    reporter: Reporter
    objects: Objects
    callbacks: Callbacks
    resume: bool | str | Path
    overwrite: bool
    allow_change: Collection[str]


def _train_here(job: _Job, plan: ParallelPlan) -> Run:
    """Train in this process, alone or as one rank of `plan`."""
    stop, folder, objects = StopRequest(), job.folder, job.objects
    with stop.listening(), distributed.among(plan):
        mesh = distributed.join(job.recipe, plan)
        folder = distributed.one_folder(folder)
        with phase("reading config, data and tokenizer"):
            prepared = prepare(job.recipe, objects=objects)
        if plan.world > 1:
            distributed.agree(prepared)
        if not mesh.main:
            Loop(prepared, folder, Silent(), stop, mesh).run(job.resume, job.allow_change)
            return load_run(folder.path)
        logged = Logged(job.reporter, folder.log, folder.metrics)
        try:
            # refuses what cannot train, before anything is written
            loop = Loop(prepared, folder, logged, stop, mesh, job.callbacks)
            if not job.resume:
                folder.begin(loop.saver.run_id, overwrite=job.overwrite)
            loop.run(job.resume, job.allow_change)
        except BaseException as error:
            if folder.has_resolved() and not isinstance(error, Stopped | StopNow):
                logged.write_error(process_group.explain(error))
            raise
    tuned = None if objects.model is None else (loop.step.model.eval(), prepared.tokenizer)
    return Run(folder.path, objects=objects, tuned=tuned)


def settle(
    recipe: str | Path | Recipe | Mapping[str, Any] | None = None, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> Recipe:
    """The recipe that is meant: a file, a shipped name, a mapping, or a run folder, which stands for its own resolved recipe."""
    if isinstance(recipe, str | Path) and (Path(recipe) / "resolved.yaml").is_file():
        recipe = load_run(recipe).recipe
    return load_recipe(recipe, overrides, settings or {})
