"""Fusing the blocks of a run's model, on every rank alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petune.kernels.block.module import FusedBlock
from petune.kernels.fuse import fuse_modules, fuse_stages, fused_blocks, unfusable
from petune.log import say
from petune.models import family_of
from petune.parallel import Runner
from petune.parallel.plan import in_flight, slow_columns, waiting
from petune.recipe import Recipe


def fuse(runner: Runner, recipe: Recipe) -> None:
    """Fused blocks, which recompute by themselves what `memory` says, and a loss without logits; else single
    modules. Says so where the plan's overlap finds nothing to hide behind then, where it would pay, and where
    columns are slow on a GPU."""
    _fuse(runner, recipe)
    cut, device = runner.plan.cut, runner.mesh.device
    if device.type == "cuda" and (line := slow_columns(cut)) is not None:
        say(line)
    if cut is None:
        return
    blocks = [block for module in runner.modules for block in fused_blocks(module)]
    by_heads = "heads" in (cut.attention, cut.mlp)
    if cut.overlap and not by_heads and not blocks:
        say("overlap: nothing hides what is sent, as blocks run their own forward")
    if not cut.overlap and by_heads and len(cut.heads) > 2 and _would_hide(blocks) and runner.mesh.engines:
        say(f"{len(cut.heads)} linked GPUs share every block: overlap: true hides most of what they send")


def _would_hide(blocks: Sequence[FusedBlock]) -> bool:
    """Whether halves of rows without padding may go through these in turns (figures: benchmarks/RESULTS.md,
    four GPUs)."""
    specs = [block.spec for block in blocks]
    plain = (spec.program.inputs == ("x",) and not (spec.mixtures or spec.called) for spec in specs)
    return bool(blocks) and all(plain)


def _fuse(runner: Runner, recipe: Recipe) -> None:
    if recipe.kernels == "off" or recipe.compile:
        return
    plan, device, family = runner.plan, runner.mesh.device, family_of(runner.model)
    reason: str | None = None
    if not runner.owned:
        reason = f"{type(runner.model).__name__} is of no known family, or its blocks are not alike"
    elif plan.pp > 1:
        reason = _unfused_stage(runner, recipe)
    if reason is not None:
        fuse_modules(runner.modules, recipe.kernels, device, reason, recipe.memory)
    else:
        memory = replace(recipe.memory, keep="input") if recipe.gradient_checkpointing else recipe.memory
        at, pieces = runner.mesh.at.pp, plan.microbatches
        passes = in_flight(plan, at, fused=True), waiting(plan, at)
        fuse_stages(runner.modules, family, recipe.kernels, memory, device, passes[0], pieces, passes[1])


def _unfused_stage(runner: Runner, recipe: Recipe) -> str | None:
    """Why no stage of a pipeline has fused blocks, as one cannot have them; or None."""
    family = family_of(runner.model)
    assert family is not None, "a model of no known family has no stages"
    reasons = unfusable(runner.modules, family, recipe.kernels, runner.mesh.device)
    runner.unfused_stage = bool(reasons)
    (anywhere,) = runner.any([runner.unfused_stage])
    return ("; ".join(reasons) or "a stage on another rank cannot be fused") if anywhere else None
