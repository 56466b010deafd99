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
from petune.methods.held_levels import free_bytes
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
                room=recipe.cache_room,
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
        if (line := find_room(step, step.cache)) is not None:
            say(line)
        yield
        say(said(step.cache))
        step.cache = step.backbone = None
        runner.barrier()
    if runner.mesh.main and not kept:
        shutil.rmtree(folder, ignore_errors=True)


def most_bytes(step: Step, cache: ActivationCache) -> int:
    """Of all rows of the run, trained and held out, on all ranks."""
    spans = [(name, span) for one in step.runner.plan.stages for name, span in one.blocks.items()]
    return sum(
        tokens
        * cache.token_bytes(
            stack,
            step.place.dtype,
            {end - 1 for name, (_, end) in spans if name == stack.name and end},
        )
        for stack, tokens in _tokens(step)
    )


def _tokens(step: Step) -> list[tuple[Stack, int]]:
    """Each stack of the model, and the tokens of all rows of the run that go through it."""
    rows = (*step.prepared.encoded.train, *step.prepared.encoded.eval)
    tokens = sum(row.size for row in rows)
    targets = sum(len(row.labels) for row in rows if row.has_target and isinstance(row.labels, list))
    stacks = [module for module in step.model.modules() if isinstance(module, Stack)]
    return [
        (stack, (targets or tokens) if stack.name == "decoder" and len(stacks) > 1 else tokens)
        for stack in stacks
    ]


def find_room(step: Step, cache: ActivationCache) -> str | None:
    """Settle whether the rows of this process stay on its device; in words, None on the CPU."""
    device = step.place.device
    if (free := free_bytes(device)) is None:
        return None
    own = cache.own_bytes({stack.name: tokens for stack, tokens in _tokens(step)}, step.place.dtype)
    fits, of = own <= cache.room.share * free, f"{human(own)} of {human(free)} that are free on the device"
    if cache.room.share and fits and cache.room.on(device):
        return f"cache: rows stay on the device: {of}"
    cache.room.closed = True
    ahead = ", a step ahead of the device" * cache.reads_ahead
    return f"cache: rows are read from files{ahead}: {of}, and cache_room is {cache.room.share:g}"


def said(cache: ActivationCache) -> str:
    """What became of it, in one line."""
    counts = cache.counts
    held = f", {human(cache.held_bytes)} of it on the device" if cache.held_bytes else ""
    return (
        f"cache: {human(cache.nbytes)}{held}; blocks ran for {counts.computed:,} rows and were read for"
        f" {counts.read:,}" + (f"; {counts.passed_by:,} passes without it" if counts.passed_by else "")
    )
