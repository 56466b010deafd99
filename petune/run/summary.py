"""What a run says first and last: the facts a person checks before waiting, what came of it, and how to go on
where it broke off."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from petune.errors import MachineError
from petune.kernels.memory.private_pools import peak_bytes
from petune.log import human
from petune.methods.configs import METHODS, method_of
from petune.parallel import ParallelPlan, describe, local
from petune.recipe import Recipe, far_from_known
from petune.run.build import ComputeSetting, Prepared
from petune.run.folder import RunFolder
from petune.run.objects import NO_OBJECTS, Objects, base_name
from petune.run.schedule import Steps
from petune.run.streaming import streams

_NO_MEMORY = (torch.OutOfMemoryError, MemoryError)


def header_lines(
    prepared: Prepared,
    described: tuple[str, tuple[int, int]],
    steps: Steps,
    place: ComputeSetting,
    plan: ParallelPlan,
    out: Path,
) -> list[str]:
    """Model, method, data, steps, numbers, ranks and where it all goes. `described`: the method in words;
    trained and all parameters."""
    recipe, rows = prepared.recipe, prepared.rows
    method, (trained, total) = described
    units = "packed sequences" if recipe.data.packing else "rows"
    far = far_from_known(recipe, prepared.config, trained, prepared.encoded.report.trained, steps.total)
    return [
        *(f"recipe   {note}" for note in recipe.notes),
        f"model    {prepared.source.note}",
        f"method   {method}",
        f"data     task {prepared.task.name}; {'; '.join(rows.notes)}",
        *(f"         {line}" for line in prepared.encoded.report.lines()),
        *([] if (kept := prepared.encoded.kept) is None else [f"         tokenized rows are in {kept}"]),
        (
            f"steps    {steps.total:,} of {steps.per_step} {units}, peak lr {recipe.learning_rate:g},"
            f" {recipe.schedule}"
        ),
        f"numbers  {place}, tuned tensors fp32; {trained:,} of {total:,} parameters train",
        *(f"         warning: {line}" for line in far),
        *([f"ranks    {describe(plan)}"] if plan.world > 1 else []),
        *(
            [f"saves    a snapshot every {every} steps".replace(" 1 steps", " step")]
            if (every := recipe.snapshot_every)
            else []
        ),
        f"out      {out}",
    ]


def closing_lines(summary: Mapping[str, Any], method: str, folder: RunFolder) -> list[str]:
    """Loss and score before and after, cost, files, the commands that come next and, last, why the run is no
    success."""
    metric, out = str(summary["metric"]), folder.path
    before, after = summary["before"][metric], summary["after"][metric]
    control = f"   (head only: {summary['head_only']:.4f})" if summary["head_only"] is not None else ""
    first, last = summary["loss"]
    speed, memory = summary["tokens_per_s"], human(summary["peak_memory_bytes"])
    picture = f", {folder.picture}" if folder.picture.exists() else ""
    run = shlex.quote(str(out))
    ask = f"petune chat {run}" if summary["task"] == "chat" else f'petune generate {run} "..."'
    use = f"petune merge {run}" if METHODS[method].mergeable else f'petune.load(base, "{out}/tuned")'
    next_ = "   |   ".join([f"petune eval {run}", *([ask] if summary["task"] != "embed" else []), use])
    if base_name(folder.recipe) is None:  # of a model in memory, which no command of the shell has
        next_ = 'run.eval()   |   run.generate("...")   |   run.model, in the process that trained it'
    return [
        f"loss     {first:.4f} -> {last:.4f} (training, first and last of {summary['steps']:,} steps)",
        f"{metric:8s} {before:.4f} (untouched base) -> {after:.4f}, held out{control}",
        f"took     {summary['seconds']:.1f} s, {speed:,.0f} tokens/s, peak memory {memory}",
        f"files    {out}/tuned, {folder.metrics}{picture}; see {out}/README.md",
        *([f"report   {folder.report}"] if folder.report.exists() else []),
        f"next     {next_}",
        *(f"note     {line}" for line in summary["notes"]),
        *(f"WARNING  {line}" for line in summary["warnings"]),
    ]


def peak_memory(device: torch.device) -> int:
    """The most memory this process has held, in bytes: on a GPU of tensors and recordings, resident on the
    CPU."""
    if device.type == "cuda":
        return peak_bytes(device)
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resting(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, int]:
    """Bytes that lie on the device between two steps: frozen and tuned tensors, the optimizer's state."""
    own = {id(value): value for module in modules for value in (*module.parameters(), *module.buffers())}
    state = (
        value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)
    )

    def held(tensors: Iterable[Tensor]) -> int:
        return sum(part.nbytes for part in map(local, tensors) if part.device == device)

    return {
        "frozen": held(value for value in own.values() if not value.requires_grad),
        "tuned": held(value for value in own.values() if value.requires_grad),
        "optimizer": held(state),
    }


def command_to_go_on(run: Path, objects: Objects) -> str:
    """The command, or the call where the run was given objects, that takes a stopped run up again."""
    if objects == NO_OBJECTS:
        return f"petune train {run} --resume"
    given = "model=model, tokenizer=tokenizer, " * (objects.model is not None) + "data=data, " * bool(
        objects.data
    )
    return f'petune.train("{run}", {given}resume=True), with the same objects, the model untouched'


@contextmanager
def explain_memory(recipe: Recipe, step: Callable[[], int], doing: str) -> Iterator[None]:
    """Turn running out of memory inside the block into a MachineError that says where, at which step, and
    what to change."""
    try:
        yield
    except (*_NO_MEMORY, RuntimeError) as error:
        if not isinstance(error, _NO_MEMORY) and "allocate memory" not in str(error):
            raise
        first = (str(error).splitlines() or ["no detail"])[0]
        remedy = "try " + ", ".join(ways_out(recipe, doing))
        raise MachineError(
            f"out of memory in the {doing}, step {step()}", found=first, remedy=remedy
        ) from None


def ways_out(recipe: Recipe, phase: str) -> list[str]:
    """What to change in `recipe` when memory runs out in `phase`."""
    held = recipe.eval_batch_size or recipe.batch_size
    if phase == "loading of the model":
        ways = ["a smaller model"]
    elif phase == "evaluation":
        ways = [f"eval_batch_size={held // 2}"] * (held > 1) + ["a smaller data.max_length"]
    else:
        same = "" if streams(recipe) else f" accumulate={recipe.accumulate * 2} (the same numbers)"
        ways = [f"batch_size={recipe.batch_size // 2}{same}"] * (recipe.batch_size > 1)
        ways += ["cache_room=0"] * bool(recipe.cache and recipe.cache_room)
        keeps = not (recipe.gradient_checkpointing or method_of(recipe.method).head_alone)
        ways += ["gradient_checkpointing=true"] * keeps + ["a smaller data.max_length"]
    return ways + ["method=lora"] * (method_of(recipe.method).trains_base and not streams(recipe))
