"""The verb that takes one training step apart: work and time by module, memory by what holds it, the
operations that take longest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from petune.log import human
from petune_cli.arguments import Given, Json, Overwrite, Words, refuse_place
from petune_cli.display import show_json, show_table
from petune_cli.echo import echo

if TYPE_CHECKING:
    from petune.profiling import MemoryUse, Operation, Profile, ProfiledModule

SHOWN = 12  # operations in the text; JSON has all


def profile(
    words: Words = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, metavar="N", help="Repetitions of the step that are timed.")
    ] = 3,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE.json", help="Write a Chrome trace of one step.")
    ] = None,
    overwrite: Overwrite = False,
    depth: Annotated[
        int, typer.Option("--depth", min=0, metavar="D", help="Levels of the module tree to show.")
    ] = 3,
    json: Json = False,
) -> None:
    """Profile a step: FLOP, time, memory by module and kind."""
    if trace is not None:
        refuse_place(trace, overwrite, "--trace FILE.json")
    recipe = Given.of(words).recipe()
    # else torch's profiler tells stderr when it starts and stops
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from petune import profiling

    found = profiling.profile(recipe, steps, trace)
    if found.rank:
        return
    if json:
        return _show_json(found)
    _show(found, depth)
    if trace is not None:
        echo(f"\ntrace    {trace}: open it in chrome://tracing or ui.perfetto.dev")


# ---------------------------------------------------------------- JSON


def _show_json(found: Profile) -> None:
    """The fields of petune.profiling.Profile and what follows from them; modules as one list, in the model's
    order."""
    written = asdict(found)
    written["modules"] = [_plain(part) for model in found.models for part in model.walk()]
    written["outside"] = _plain(found.outside)
    written["flop"] = {phase: found.flop(phase) for phase in ("forward", "backward", "recompute")}
    del written["models"]
    show_json(written)


def _plain(part: ProfiledModule) -> dict[str, Any]:
    fields = {name: value for name, value in vars(part).items() if name != "parts"}
    return fields | {"macs": part.macs}


# ---------------------------------------------------------------- text


def _show(found: Profile, depth: int) -> None:
    for line in (
        *found.facts,
        f"step     the first: {found.rows} rows, {found.tokens:,} tokens with padding, loss {found.loss:.4f}",
    ):
        echo(line)
    echo("")
    heads = (
        "module",
        "kind",
        "parameters",
        "trained",
        "MACs",
        "forward FLOP",
        "backward FLOP",
        "recomputed",
        "forward",
        "backward",
    )
    rows = [_cells(part, level) for model in found.models for part, level in _down_to(model, depth)]
    rows += [_cells(found.outside, 0), _sums(found)]
    show_table(heads, rows, without=() if found.flop("recompute") > 0 else ("recomputed",))
    echo("")
    for line in _closing(found):
        echo(line)
    echo("")
    show_table(("memory", "at the peak"), _memory(found.memory))
    echo("")
    show_table(("operations by self time", "calls", "time", "share"), [_timed(one) for one in found.groups])
    echo("")
    show_table(
        (f"the longest {SHOWN}", "calls", "time", "share"), [_timed(one) for one in found.operations[:SHOWN]]
    )


def _down_to(part: ProfiledModule, depth: int, level: int = 0) -> Iterator[tuple[ProfiledModule, int]]:
    yield part, level
    if level < depth:
        for below in part.parts:
            yield from _down_to(below, depth, level + 1)


def _cells(part: ProfiledModule, level: int) -> tuple[str, ...]:
    name = part.path.rpartition(".")[2] or "(model)"
    work = (part.parameters, part.trained, part.macs, part.forward, part.backward, part.recompute)
    spent = "-" if part.forward_s is None else _seconds(part.forward_s)
    return ("  " * level + name, part.kind, *map(_number, work), spent, _seconds(part.backward_s))


def _sums(found: Profile) -> tuple[str, ...]:
    forward, backward, again = (found.flop(phase) for phase in ("forward", "backward", "recompute"))
    spent = [part.forward_s for part in found.models if part.forward_s is not None]
    whole = sum(part.backward_s for part in (*found.models, found.outside))
    held = [sum(getattr(part, name) for part in found.models) for name in ("parameters", "trained")]
    numbers = map(_number, (*held, forward // 2, forward, backward, again))
    return ("in all", "", *numbers, _seconds(sum(spent)), _seconds(whole))


def _closing(found: Profile) -> Iterator[str]:
    timed = found.timing
    parts = {
        "batches": timed.batches,
        "forward and backward": timed.passes,
        "clipping and optimizer": timed.update,
    }
    listed = ", ".join(
        f"{name} {_seconds(spent)} ({spent / timed.step:.1%})" for name, spent in parts.items()
    )
    executed = sum(found.flop(phase) for phase in ("forward", "backward", "recompute"))
    yield f"time     {_seconds(timed.step)} a step, the median of {timed.steps}: {listed}"
    yield (
        f"speed    {found.tokens / timed.step:,.0f} tokens/s, {_number(executed / timed.passes)}FLOP/s"
        " executed in forward and backward"
    )
    yield (
        f"waits    {found.communication:.1%} of a step in collectives, others waited for included"
        f" (measured){_bubble(found)}"
    )


def _bubble(found: Profile) -> str:
    return f", {found.bubble:.1%} in the pipeline's bubble (predicted from the plan)" if found.bubble else ""


def _memory(memory: MemoryUse) -> list[tuple[str, str]]:
    gradients = f"of {human(memory.gradients)} in all" if memory.at_peak < memory.gradients else ""
    rows = [
        ("weights, frozen", human(memory.frozen)),
        ("weights, tuned", human(memory.tuned)),
        ("gradients", f"{human(memory.at_peak)} {gradients}".rstrip()),
        ("optimizer state", human(memory.optimizer)),
        ("activations", human(memory.activations)),
        *([("other: batches, caches, workspaces", human(memory.other))] if memory.reserved else []),
        ("peak of forward and backward", human(memory.peak)),
        ("peak of clipping and optimizer", human(memory.update)),
    ]
    return rows + ([("reserved by the allocator", human(memory.reserved))] if memory.reserved else [])


def _timed(one: Operation) -> tuple[str, ...]:
    name = one.name if len(one.name) <= 70 else one.name[:67] + "..."
    return name, f"{one.calls:,}", _seconds(one.seconds), f"{one.share:.1%}"


def _number(count: float) -> str:
    """A count for people: 1.23 G."""
    for unit in ("", "K", "M", "G", "T"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}".rstrip() if unit or count != int(count) else str(int(count))
        count /= 1000
    return f"{count:.3g} P"


def _seconds(spent: float) -> str:
    return f"{spent:.2f} s" if spent >= 1 else f"{spent * 1e3:.2f} ms"
