"""`petune.train`: settles what is meant, then trains in this process (petune.run.rank) or starts those of a
parallel plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from petune.errors import FileError, UsageError
from petune.log import say
from petune.parallel.launch import process_group
from petune.recipe import Recipe, load_recipe, settings_text, with_rate
from petune.run import distributed
from petune.run.build import Base
from petune.run.callbacks import Callback, Callbacks
from petune.run.entrance import refuse_unknown
from petune.run.finished import Run, load_run
from petune.run.folder import RunFolder
from petune.run.job import Job
from petune.run.notebook import fitting_reporter
from petune.run.objects import take_objects
from petune.run.rank import Here, finished, run_rank
from petune.run.reporting import Reporter
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
        >>> lora = {"name": "lora", "r": 8}
        >>> run = petune.train(model=base, tokenizer=words, data=rows, method=lora, out="runs/second")
        >>> run.model is base
        True

    recipe: a file, the name of a shipped recipe, a mapping, or a run folder, which stands for its own recipe;
        None: `model` and `data` with neutral settings, or without them the demo.
    model: a folder, a hub id, or a transformers model that has the head of the task, which comes with its
        `tokenizer`.
    data: a file, folder or hub id; a list of mappings, a datasets.Dataset or a pandas.DataFrame; a mapping of
        splits to these (DatasetDict); or a mapping of the settings under `data` (path, eval, columns, ...),
        whose path and eval may be any of these.
    method: the name of a method (full, lora, ...), or a mapping of its name and settings.
    callbacks: objects of subclasses of petune.Callback, called after steps and evaluations; they may end the
        run.
    resume: True goes on from the newest checkpoint in the run folder `out` that verifies, a path from exactly
        that one. Objects are given again: their fingerprints must agree with those the run began with.
    overwrite: replace the run in the folder `out`.
    allow_change: names of settings that may differ from those the run began with.
    reporter: speaks in this process; None: a progress bar and a loss curve in a notebook, plain lines
        elsewhere.
    overrides: `key.sub=value` texts, as on the command line.
    restarts: how often a process of a parallel plan that was killed or froze may be replaced; all then go on
        from the newest saved state.
    settings: every other key of a recipe, listed below; docs/recipes.md says more.

    A recipe with a parallel plan starts its processes itself, unless this is one of those a launcher has
    started. Raises PetuneError: every subclass carries the exit code of its kind; Stopped when a signal ended
    the run after saving.
    """
    named = {"model": model, "data": data, "method": method}
    settings |= {key: value for key, value in named.items() if value is not None}
    settings, objects = take_objects(settings, tokenizer)
    settled = settle(recipe, overrides, settings)
    if objects.model is not None and settled.dtype == "auto":
        settled = load_recipe(settled, {"dtype": objects.dtype})
    settled = distributed.planned(settled)
    distributed.refuse_objects(
        settled, {"model": objects.model, "data": objects.data, "callbacks": callbacks}
    )
    refuse_unknown(allow_change)
    here = Here(reporter or fitting_reporter(), objects, Callbacks(callbacks))
    speaker = getattr(here.reporter, "in_ranks", None)
    base = Base(settled, objects)
    settled = rated(base)
    job = Job(settled, RunFolder.of(settled), resume, overwrite, allow_change, reporter=speaker)
    plan = distributed.wanted(settled, base)
    if plan.world == 1 or process_group.joined():
        if restarts:
            what, remedy = (
                "there are no processes here that petune could start anew",
                "leave it out, or name a parallel backend",
            )
            raise UsageError(what, where="--restarts", remedy=remedy)
        return run_rank(job, base, plan, here)
    with job.entered():
        if job.is_done():
            return finished(job, here)
        if overwrite:
            job.folder.clear_rank_logs()
    aside = getattr(reporter, "aside", None)
    distributed.launch_ranks(plan, job, restarts, partial(aside, world=plan.world) if aside else say)
    return load_run(job.folder.path)


train.__doc__ = (train.__doc__ or "") + settings_text()


def rated(base: Base) -> Recipe:
    """The recipe of `base` with a learning rate: its own, the usual one of its model, or where that is gone
    the one that a run which has ended took."""
    try:
        return with_rate(base.recipe, base.config) if base.recipe.lr is None else base.recipe
    except FileError:
        if not (folder := RunFolder.of(base.recipe)).finished():
            raise
        return base.recipe.model_copy(update={"lr": folder.resolved()["lr"]})


def settle(
    recipe: str | Path | Recipe | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe that is meant: a file, a shipped name, a mapping, or a run folder, which stands for its own
    resolved recipe."""
    if isinstance(recipe, str | Path) and (Path(recipe) / "resolved.yaml").is_file():
        recipe = load_run(recipe).recipe
    if isinstance(recipe, Recipe) and not overrides and not settings:
        return recipe
    return load_recipe(recipe, overrides, settings or {})
