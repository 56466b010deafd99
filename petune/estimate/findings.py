"""What a search for a plan has found, in words and as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from petune.estimate.choice import Findings, PricedPlan
from petune.estimate.forecast import sketch
from petune.estimate.layouts import plain
from petune.estimate.measure import measured
from petune.estimate.planner import Planner
from petune.log import human
from petune.parallel import ParallelConfig, describe
from petune.parallel.configs import CutConfig
from petune.recipe import load_recipe
from petune.recipe.yaml_lines import short, write_scalar
from petune.run.job import Job

HEADS = ("plan", "step", "computes", "communicates", "waits", "memory")
LEFT_OUT = 4  # reasons that are shown


def table(found: Findings) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows: the plans that were found, the best first."""
    return HEADS, [_row(choice) for choice in found.choices]


def _row(choice: PricedPlan) -> tuple[str, ...]:
    time = choice.time
    parts = (time.compute, time.communication, time.waiting)
    full = f"{choice.fullest:.0%}" if choice.fullest else "?"
    return name_of(choice), _seconds(time.total), *(f"{part / time.total:.0%}" for part in parts), full


def name_of(choice: PricedPlan) -> str:
    """The sizes of a plan's axes, with what sets it apart from others of the same sizes."""
    words, plan = [], choice.plan
    for name, axis in choice.parallel.axes.items():
        text = f"{name} {axis.size}"
        text += ", overlapped" if isinstance(axis, CutConfig) and axis.overlap else ""
        text += " sharded" if name == "dp" and plan.sharding is not None else ""
        if name == "pp":
            text += f" {plan.schedule}, {plan.microbatches} micro-batches"
        words.append(text)
    return (" x ".join(words) or "one process") + (", recomputing" if choice.again else "")


def explained(found: Findings) -> Iterator[str]:
    """Why the best is best, what devices there were, and what to write into the recipe."""
    best, *others = found.choices
    yield f"devices  {_devices(found)}"
    yield f"plan     {short(describe(best.plan), 200)}"
    yield f"because  {_because(best, others[0] if others else None)}"
    yield f"compared {found.compared} plans that fit, by one model of time; memory is an estimate"
    for reason, number in found.left_out[:LEFT_OUT]:
        yield f"left out {number}: {reason}"
    yield f"write    {written(best.parallel)}"
    if best.checkpointing:
        yield "write    gradient_checkpointing: true"


def _devices(found: Findings) -> str:
    names = [device.name for device in found.cluster.devices]
    runs = [f"{len(list(own))} {name}" for name, own in groupby(names)]
    link = found.cluster.inside
    speed = f"{1e6 * link.latency:.0f} us and {human(int(min(link.bandwidth, 1e15)))}/s between neighbours"
    shown = ", ".join(runs[:6]) + (f" and {len(runs) - 6} more groups" if len(runs) > 6 else "")
    return f"{shown}; {speed}"


def _because(best: PricedPlan, other: PricedPlan | None) -> str:
    """In which of its parts the runner-up loses most."""
    if other is None:
        return "no other layout fits"
    gaps = {
        "computes": other.time.compute - best.time.compute,
        "communicates": other.time.communication - best.time.communication,
        "waits": other.time.waiting - best.time.waiting,
    }
    what, gap = max(gaps.items(), key=lambda one: one[1])
    slower = other.time.total / best.time.total - 1
    return f"{name_of(other)} takes {slower:.1%} longer: it {what} {_seconds(gap)} more"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def choose(job: Path, answer: Path) -> None:
    """Write the settings of the best plan for a job's recipe on this machine, and why, to `answer`."""
    recipe = Job.read(job).recipe
    found = Planner(sketch(load_recipe(recipe, {"parallel": "none"})), measured(recipe)).search()
    best = found.choices[0]
    settings = {"parallel": plain(best.parallel) or "none"} | (
        {"gradient_checkpointing": True} if best.checkpointing else {}
    )
    answer.write_text(json.dumps({"settings": settings, "reasons": list(explained(found))}), encoding="utf-8")


def facts(found: Findings) -> dict[str, object]:
    """The same as plain data."""
    return {
        "choices": [
            {
                "plan": name_of(choice),
                "parallel": plain(choice.parallel),
                "gradient_checkpointing": choice.checkpointing,
                "recomputing": choice.again,
                "step_s": choice.time.total,
                "compute_s": choice.time.compute,
                "communication_s": choice.time.communication,
                "waiting_s": choice.time.waiting,
                "memory": choice.fullest or None,
            }
            for choice in found.choices
        ],
        "reasons": list(explained(found)),
        "compared": found.compared,
        "left_out": dict(found.left_out),
    }


def written(parallel: ParallelConfig) -> str:
    """The axes as they stand in a recipe, defaults left out."""
    axes = plain(parallel)
    return f"parallel: {write_scalar(axes)}" if axes else "parallel: none"
