"""The step of a recipe, taken apart: one instrument at a time, so that none is in another's figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from petune.errors import UsageError
from petune.estimate.comm_cost import bubble
from petune.parallel import describe
from petune.parallel.launch import process_group
from petune.profiling.attribution import OUTSIDE, Attribution, StepPhase, join, paths_of
from petune.profiling.flops import FlopCounts, counting
from petune.profiling.latency import Forward, Timing, forward_times, timing
from petune.profiling.memory import MemoryUse, measure
from petune.profiling.operations import Operation, grouped, traced
from petune.profiling.repeat_step import Rehearsal
from petune.recipe import Recipe
from petune.run import distributed
from petune.run.build import Base, prepare
from petune.run.streaming import streams


@dataclass(frozen=True)
class ProfiledModule:
    """A module with everything below it. forward, backward, recompute: FLOP of one step; parameters, trained:
    elements, tied ones once.

    calls: its forward passes in a step. forward_s: seconds from their beginning to their end, None where it
    is never called by itself; backward_s: seconds of its autograd nodes, what they recompute included.
    """

    path: str
    kind: str
    parameters: int
    trained: int
    forward: int
    backward: int
    recompute: int
    calls: int
    forward_s: float | None
    backward_s: float
    parts: tuple[ProfiledModule, ...] = ()

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward pass."""
        return self.forward // 2

    def walk(self) -> Iterator[ProfiledModule]:
        """This part and all below it, in the model's order."""
        yield self
        for part in self.parts:
            yield from part.walk()


@dataclass(frozen=True)
class Profile:
    """One training step of a recipe, on this rank. models: one, or this rank's stages of a pipeline; outside:
    what no module runs.

    rows, tokens: of the step as they are computed, padding included. communication: measured, see
    operations.Traced. bubble: predicted from the plan, the part of a step in which a rank of a pipeline waits
    if all stages take as long; 0 without a pipeline.
    """

    facts: tuple[str, ...]
    rank: int
    rows: int
    tokens: int
    loss: float
    models: tuple[ProfiledModule, ...]
    outside: ProfiledModule
    timing: Timing
    memory: MemoryUse
    operations: tuple[Operation, ...]
    groups: tuple[Operation, ...]
    communication: float
    bubble: float

    def flop(self, phase: StepPhase) -> int:
        """Of the whole step, in one phase."""
        return sum(int(getattr(part, phase)) for part in (*self.models, self.outside))


def profile(recipe: Recipe, steps: int = 3, trace: Path | None = None) -> Profile:
    """Load model and data of `recipe` and profile its first training step; times are medians of `steps`
    repetitions.

    The step is repeated 2 * steps + 4 times, each under one instrument: to warm up, for the times of phases
    and of modules, for FLOP, memory and operations. Only `trace` is written, by the first rank. A recipe with
    a parallel plan is profiled where a launcher has started its ranks, each for itself. Raises UsageError
    elsewhere, for a compiled model and a streamed one, and what training raises.
    """
    if recipe.compile:
        raise UsageError(
            "modules of a compiled model cannot be told apart",
            where=recipe.where("compile"),
            remedy="set compile=false",
        )
    if streams(recipe):
        raise UsageError(
            "the phases of a step whose updates are inside its backward pass cannot be told apart",
            where=recipe.where("memory.stream"),
            remedy="set memory.stream=none clip=1.0, or measure whole steps with petune bench",
        )
    base = Base(recipe)
    plan = distributed.wanted(recipe, base)
    if plan.world > 1 and not process_group.joined():
        command = f"torchrun --nproc-per-node {plan.world} --no-python petune profile ..."
        remedy = f"{command}, or the whole model in this process: parallel=none"
        raise UsageError(
            f"this plan is for {plan.world} processes, and here is one",
            where=recipe.where("parallel"),
            remedy=remedy,
        )
    with distributed.among(plan):
        mesh = distributed.join(recipe, plan)
        prepared = prepare(recipe, base=base)
        if plan.world > 1:
            distributed.agree(prepared)
        return take_apart(Rehearsal(prepared, mesh), steps, trace if mesh.main else None)


def take_apart(rehearsal: Rehearsal, steps: int = 3, trace: Path | None = None) -> Profile:
    """The same for a run that is set up."""
    runner = rehearsal.runner
    micro = rehearsal.batches()
    loss = rehearsal.passes(micro)
    rehearsal.update()  # from here on the optimizer has its state
    timed, forward = timing(rehearsal, steps), forward_times(rehearsal, steps)
    with Attribution(runner.modules) as attribution, counting(attribution) as counts:
        rehearsal.passes(micro)
    rehearsal.update()
    memory = measure(rehearsal)
    seen = traced(rehearsal, Attribution(runner.modules), trace)
    tree = _Tree(paths_of(runner.modules), counts, forward, seen.backward)
    trained, total = rehearsal.step.described[1]
    return Profile(
        facts=_facts(rehearsal),
        rank=runner.mesh.rank,
        rows=sum(len(batch["rows"]) for batch in micro),
        tokens=sum(batch["input_ids"].numel() for batch in micro),
        loss=loss,
        models=tuple(map(tree.part, runner.modules)),
        outside=tree.alone(OUTSIDE),
        timing=timed,
        memory=memory,
        operations=seen.operations,
        groups=grouped(seen.operations),
        communication=seen.communication,
        bubble=bubble(runner.plan, trained / total),
    )


def _facts(rehearsal: Rehearsal) -> tuple[str, ...]:
    plan, step = rehearsal.runner.plan, rehearsal.step
    method, (trained, total) = step.described
    return (
        f"model    {step.prepared.source.note}",
        f"method   {method}",
        f"numbers  {step.place}, tuned tensors fp32; {trained:,} of {total:,} parameters train",
        *([f"ranks    {describe(plan)}"] if plan.world > 1 else []),
    )


@dataclass(frozen=True)
class _Tree:
    """What the instruments found, by path; a module that several share stands where its path says."""

    paths: Mapping[nn.Module, str]
    counts: FlopCounts
    forward: Mapping[str, Forward]
    backward: Mapping[str, float]

    def part(self, module: nn.Module) -> ProfiledModule:
        path = self.paths[module]
        inside = (child for name, child in module.named_children() if self.paths[child] == join(path, name))
        own = self.alone(path)
        parts = tuple(self.part(child) for child in inside)
        held = list(module.parameters())
        return replace(
            own,
            kind=type(module).__name__,
            parameters=sum(value.numel() for value in held),
            trained=sum(value.numel() for value in held if value.requires_grad),
            forward=own.forward + sum(part.forward for part in parts),
            backward=own.backward + sum(part.backward for part in parts),
            recompute=own.recompute + sum(part.recompute for part in parts),
            backward_s=own.backward_s + sum(part.backward_s for part in parts),
            parts=parts,
        )

    def alone(self, path: str) -> ProfiledModule:
        """What is done at this path itself."""
        run = self.forward.get(path)
        return ProfiledModule(
            path=path,
            kind="",
            parameters=0,
            trained=0,
            forward=self.counts.get(("forward", path), 0),
            backward=self.counts.get(("backward", path), 0),
            recompute=self.counts.get(("recompute", path), 0),
            calls=run.calls if run else 0,
            forward_s=run.seconds if run else None,
            backward_s=self.backward.get(path, 0.0),
        )
