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
from petune.methods.held_levels import free_bytes, passing_bytes
from petune.methods.stack_levels import stack_bytes
from petune.models.spec import StackName
from petune.models.stack import Stack, stacks_in
from petune.run.backbone import Backbone
from petune.run.folder import ACTIVATIONS
from petune.run.step import OptimizerStep
from petune.saving import checkpoint


@contextmanager
def caching(step: OptimizerStep, out: Path, say: Callable[[str], None]) -> Iterator[None]:
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
        what = "ranks share the cache by its files, and these are on several machines"
        raise UsageError(what, where=recipe.where("cache"), remedy="remove cache, or use one machine")
    kept = recipe.cache_folder is not None
    folder = Path(recipe.cache_folder) if recipe.cache_folder is not None else out / ACTIVATIONS
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
        step.backbone = Backbone(runner, step.cache, say, lambda: _say_room(step, say, stepped=True))
        stack.callback(step.backbone.close)
        leaves = "then leave memory" if (stays := step.backbone.stays) is None else f"stay in memory: {stays}"
        say(f"cache: blocks run once for each row, and {leaves}; at most {human(most)} in {folder}")
        _say_room(step, say, stepped=False)
        yield
        say(said(step.cache))
        step.cache = step.backbone = None
        runner.barrier()
    if runner.mesh.main and not kept:
        shutil.rmtree(folder, ignore_errors=True)


def most_bytes(step: OptimizerStep, cache: ActivationCache) -> int:
    """Of all rows of the run, trained and held out, on all ranks."""
    amounts, plan, dtype = _amounts(step), step.runner.plan, step.place.dtype
    return sum(
        stack_bytes(step.model, stack, cache.dtype, dtype, *amounts[stack.name], plan.lasts(stack.name))
        for stack in stacks_in(step.model).values()
    )


def _amounts(step: OptimizerStep) -> dict[StackName, tuple[int, int]]:
    """Of each stack of the model, the tokens of all rows of the run that go through it, and the rows."""
    examples = (*step.prepared.encoded.train, *step.prepared.encoded.eval)
    rows = [text for example in examples for text in (example, *example.others)]
    tokens = sum(row.size for row in rows)
    targets = sum(len(row.labels) for row in rows if row.has_target and isinstance(row.labels, list))
    stacks = [module.name for module in step.model.modules() if isinstance(module, Stack)]
    return {
        name: ((targets or tokens) if name == "decoder" and len(stacks) > 1 else tokens, len(rows))
        for name in stacks
    }


def _say_room(step: OptimizerStep, say: Callable[[str], None], stepped: bool) -> None:
    if step.cache is not None and (line := find_room(step, step.cache, stepped)) is not None:
        say(line)


def find_room(step: OptimizerStep, cache: ActivationCache, stepped: bool) -> str | None:
    """Settle whether the rows of this process stay on its device; in words, None on the CPU and where it was
    settled before. stepped: a step was taken since this process began: what one needs is known, and left
    free; before, rows that fit wait for that.

    It is measured and not foretold: of ladders, heads and losses nobody knows it better. Rows of other steps
    may be longer, and need as much more.
    """
    device, room = step.place.device, cache.room
    if (free := free_bytes(device)) is None or stepped > room.waits:
        return None
    passing = int(passing_bytes(device) * _longest(step)) if stepped else 0
    own = cache.own_bytes(_amounts(step), step.place.dtype)
    fits, left = own <= room.share * (free - passing), max(0, free - passing)
    of = f"{human(own)} of {human(left)} that {'a step leaves' if stepped else 'are'} free on the device"
    if room.share and fits and not stepped:
        room.waits = True
        return None
    if fits:
        room.open(left)
        return f"cache: rows stay on the device: {of}"
    room.closed, room.waits = True, False
    ahead = ", a step ahead of the device" * cache.reads_ahead
    return f"cache: rows are read from files{ahead}: {of}, and cache_room is {room.share:g}"


def _longest(step: OptimizerStep) -> float:
    """How many times as long the longest row of the run is as that of the last step."""
    last = max(row.size for row in step.rows_of(max(0, step.progress.step - 1)))
    return max(1.0, max(row.size for row in step.prepared.encoded.train) / max(1, last))


def said(cache: ActivationCache) -> str:
    """What became of it, in one line."""
    counts = cache.counts
    held = f", {human(cache.held_bytes)} of it on the device" if cache.held_bytes else ""
    return (
        f"cache: {human(cache.nbytes)}{held}; blocks ran for {counts.computed:,} rows and were read for"
        f" {counts.read:,}" + (f"; {counts.passed_by:,} passes without it" if counts.passed_by else "")
    )
