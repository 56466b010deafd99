"""The activation cache of a run: where it lies, the room it needs, and what became of it."""

from __future__ import annotations

import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from petune.errors import UsageError
from petune.files.lock import RunLock
from petune.log import human
from petune.methods.activation_cache import ActivationCache, Stored
from petune.models.stack import Stack
from petune.run.backbone import Backbone
from petune.run.folder import ACTIVATIONS
from petune.run.step import Step
from petune.saving import checkpoint


@contextmanager
def caching(step: Step, out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """The run's passes with the activation cache of its recipe, if it has one, opened before any and closed
    after all.

    A cache in the run folder `out` is deleted when the block ends well; after an error or a stop it is there
    for the resumed run. Raises MachineError where the disk has no room for it, UsageError where ranks are on
    several machines, MachineError where another run writes to the same folder.
    """
    recipe, runner = step.recipe, step.runner
    if not recipe.cache:
        yield
        return
    host = zlib.crc32(socket.gethostname().encode())
    if len(set(runner.gather(float(host)))) > 1:
        raise UsageError(
            "ranks share the cache by its files, and these are on several machines",
            where=recipe.where("cache"),
            remedy="remove cache, or use one machine",
        )
    kept = recipe.cache_folder is not None
    folder = Path(recipe.cache_folder).expanduser() if recipe.cache_folder is not None else out / ACTIVATIONS
    stored: Stored = "auto" if recipe.cache is True else recipe.cache
    with ExitStack() as stack:
        if runner.mesh.main:
            folder.mkdir(parents=True, exist_ok=True)
            if kept:
                stack.enter_context(RunLock(folder))
        runner.barrier()
        step.cache = stack.enter_context(
            ActivationCache(
                runner.modules,
                folder,
                stored,
                identity=step.base,
                together=runner.plan.world > 1,
                writes=runner.mesh.at.tp == 0,
            )
        )
        most = most_bytes(step, step.cache)
        if runner.mesh.main:
            checkpoint.require_free(folder, max(0, most - step.cache.nbytes))
        runner.barrier()  # every rank knows the same rows, and writes from here on
        step.backbone = Backbone(runner, step.cache, say)
        stack.callback(step.backbone.close)
        leaves = "then leave memory" if (stays := step.backbone.stays) is None else f"stay in memory: {stays}"
        say(f"cache: blocks run once for each row, and {leaves}; at most {human(most)} in {folder}")
        yield
        say(said(step.cache))
        step.cache = step.backbone = None
        runner.barrier()
    if runner.mesh.main and not kept:
        shutil.rmtree(folder, ignore_errors=True)


def most_bytes(step: Step, cache: ActivationCache) -> int:
    """Of all rows of the run, trained and held out."""
    rows = (*step.prepared.encoded.train, *step.prepared.encoded.eval)
    tokens = {"input": sum(row.size for row in rows), "target": 0}
    tokens["target"] = sum(len(row.labels) for row in rows if row.has_target and isinstance(row.labels, list))
    stacks = [module for module in step.model.modules() if isinstance(module, Stack)]
    targets = tokens["target"] or tokens["input"]
    spans = [(name, span) for one in step.runner.plan.stages for name, span in one.blocks.items()]
    lasts = {stack: {end - 1 for name, (_, end) in spans if name == stack.name and end} for stack in stacks}
    return sum(
        cache.token_bytes(stack, step.place.dtype, lasts[stack])
        * (targets if stack.name == "decoder" and len(stacks) > 1 else tokens["input"])
        for stack in stacks
    )


def said(cache: ActivationCache) -> str:
    """What became of it, in one line."""
    counts = cache.counts
    return (
        f"cache: {human(cache.nbytes)}; blocks ran for {counts.computed:,} rows and were read for"
        f" {counts.read:,}" + (f"; {counts.passed_by:,} passes without it" if counts.passed_by else "")
    )
