"""`memory.stream` of a recipe: whether a model's blocks can rest in host memory here, and the optimizer that
takes them there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from petune.errors import Problem, UsageError
from petune.kernels.dispatch import refusal
from petune.kernels.fuse import fused_blocks
from petune.kernels.memory.offloaded_adamw import StreamedAdamW
from petune.parallel import Runner
from petune.recipe import Recipe


def streams(recipe: Recipe) -> bool:
    """Whether the weights and states of blocks rest in host memory and are updated inside the backward
    pass."""
    return recipe.memory.stream != "none"


def refuse_unstreamable(recipe: Recipe, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Raise UsageError for a recipe that streams and cannot, computing in `dtype` on `device`, which need not
    be here if it is None.

    For use before a weight is loaded; what a recipe can tell by itself its rules have told.
    """
    if not streams(recipe):
        return
    where, problems = recipe.where("memory.stream"), []
    if recipe.memory.stream == "bf16" and dtype is not torch.bfloat16:
        what, remedy = "memory.stream: bf16 keeps weights in bf16", "set dtype: bf16, or memory.stream: fp32"
        problems.append(Problem(what, where, expected="dtype: bf16", found="fp32", remedy=remedy))
    refused = refusal(device, dtype) if recipe.kernels == "auto" and device is not None else None
    if refused is not None:
        what, remedy = (
            "memory.stream needs fused blocks",
            "set kernels: reference, which is for tests and slow, or memory.stream: none",
        )
        problems.append(Problem(what, where, expected="kernels that run here", found=refused, remedy=remedy))
    if problems:
        raise UsageError(problems)


def refuse_unfused(recipe: Recipe, reasons: str) -> None:
    """Raise UsageError where fused blocks of a recipe that streams would run as the model's own in training,
    for `reasons`."""
    if streams(recipe) and reasons:
        what, where = "memory.stream: blocks of this model would run unfused", recipe.where("memory.stream")
        remedy = "set what is found here to 0 in the model's config, or memory.stream: none"
        raise UsageError(what, where=where, expected="fused blocks", found=reasons, remedy=remedy)


def stream(runner: Runner, recipe: Recipe, autocast: AbstractContextManager[Any]) -> None:
    """Let the fused blocks of a runner's model rest in host memory from now on. Raises UsageError where one
    would run unfused."""
    model, device = runner.model, runner.mesh.device
    blocks = fused_blocks(model)
    with autocast:
        reasons = {reason for block in blocks if (reason := block.train().unready(device)) is not None}
    model.eval()
    refuse_unfused(
        recipe,
        "; ".join(sorted(reasons))
        if blocks
        else "this model's blocks cannot all be handed the same arguments",
    )
    runner.stream(
        StreamedAdamW(
            model,
            blocks,
            recipe.learning_rate,
            (recipe.beta1, recipe.beta2),
            weight_decay=recipe.weight_decay,
            states=torch.float32 if recipe.memory.stream == "fp32" else torch.bfloat16,
            seed=recipe.seed,
            device=device,
        )
    )
