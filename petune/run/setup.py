"""What a run knows before its first step, as setup.json: what pages of the run say of its method, data and
plan, also while it trains.

Plain facts for people. Nothing reads them back to train.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from petune.models import FAMILIES
from petune.models.spec import Family
from petune.parallel import ParallelPlan, describe
from petune.parallel.mesh import coordinate
from petune.recipe import far_from_known
from petune.run.build import Prepared
from petune.run.evaluate import Metric
from petune.run.schedule import Steps
from petune.run.step import OptimizerStep
from petune.tasks import Example
from petune.tasks.examples import MASKED


def setup(step: OptimizerStep, metric: Metric, run_id: str) -> dict[str, Any]:
    """The facts of a run that is set up, as JSON has them."""
    prepared, (method, (trained, total)) = step.prepared, step.described
    recipe, rows, tokens = prepared.recipe, prepared.rows, prepared.encoded.report.trained
    return {
        "run_id": run_id,
        "began": round(time.time(), 1),
        "model": prepared.source.note,
        "method": method,
        "task": prepared.task.name,
        "format": rows.format,
        "labels": list(rows.labels or ()),
        "metric": metric.name,
        "direction": "max" if metric.larger_is_better else "min",
        "parameters": {"trained": trained, "total": total},
        "numbers": f"{step.place}, tuned tensors fp32",
        "steps": _steps(step.steps, packed=prepared.encoded.packed),
        "data": data_facts(prepared),
        "plan": _plan(step),
        "warnings": list(far_from_known(recipe, prepared.config, trained, tokens, step.steps.total)),
    }


def _steps(steps: Steps, *, packed: bool) -> dict[str, Any]:
    unit = "packed sequences" if packed else "rows"
    return {"total": steps.total, "per_epoch": steps.per_epoch, "per_step": steps.per_step, "unit": unit}


def data_facts(prepared: Prepared) -> dict[str, Any]:
    """Rows, their lengths, cuts and classes, the share that trains, and where they come from: all JSON."""
    encoded, labels = prepared.encoded, prepared.rows.labels or ()
    sides = {"rows to train on": encoded.train, "rows held out": encoded.eval}
    tagged = prepared.task.name == "tokens"
    names = {side.replace("rows", "words") if tagged else side: examples for side, examples in sides.items()}
    classes = {name: _counts(examples, labels) for name, examples in names.items()} if labels else {}
    return asdict(encoded.report) | {"sources": list(prepared.rows.notes), "classes": classes}


def _counts(examples: Sequence[Example], labels: Sequence[str]) -> dict[str, int]:
    """How many rows have each class, or words each tag; zero is said too."""
    found = Counter[int]()
    for example in examples:
        found.update([example.labels] if isinstance(example.labels, int) else example.labels)
    del found[MASKED]
    return {label: found[at] for at, label in enumerate(labels)}


def _plan(step: OptimizerStep) -> dict[str, Any]:
    plan, prepared = step.runner.plan, step.prepared
    family = FAMILIES.get(prepared.config.model_type)
    ranks = [holding(plan, family, prepared.config, rank) for rank in range(plan.world)]
    return {"words": describe(plan), "world": plan.world, "ranks": ranks if plan.world > 1 else []}


def holding(plan: ParallelPlan, family: Family | None, config: Any, rank: int) -> Mapping[str, Any]:
    """What a rank holds: blocks by stack, heads and columns of each, and its part of tokens and rows, in
    percent where it is not all."""
    at, cut = coordinate(plan, rank), plan.cut
    held: dict[str, Any] = {"blocks": blocks_of(plan, family, config, at.pp)}
    if cut is not None:
        held |= {"heads": cut.heads[at.tp]} if cut.heads else {}
        held |= {"columns": cut.columns[at.tp]} if cut.columns else {}
        held |= {"tokens": _percent(cut.sequence, at.tp)} if cut.sequence else {}
    if plan.experts:
        held |= {"experts": experts_of(plan, rank)}
    return held | ({"rows": _percent(plan.shares, at.dp)} if plan.dp > 1 else {})


def experts_of(plan: ParallelPlan, rank: int) -> str:
    """The routed experts of a rank in words, from the first to the last."""
    at = coordinate(plan, rank).ep
    first = sum(plan.experts[:at])
    return f"{first}-{first + plan.experts[at] - 1}" if plan.experts[at] > 1 else str(first)


def blocks_of(plan: ParallelPlan, family: Family | None, config: Any, stage: int) -> str:
    """The blocks of a rank of the pipeline in words: by stack, from the first to the last of each stretch."""
    if family is None:
        return "all"
    stages = plan.stages[stage :: plan.pp] if plan.stages else ()
    spans = [(name, *span) for one in stages for name, span in one.blocks.items()]
    spans = spans or [(name, 0, count) for name, count in family.depth(config).items()]
    return ", ".join(
        f"{name} {first}-{end - 1}" if end - first > 1 else f"{name} {first}" for name, first, end in spans
    )


def _percent(parts: Sequence[int], at: int) -> str:
    return f"{parts[at] / sum(parts):.0%}"
