"""The arithmetic of a run: how many steps, which rows each trains on, at which learning rate. Pure functions
of the recipe and the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Steps:
    """Units (rows, or packed sequences) in all and per step, steps per epoch, steps in all, steps of
    warm-up."""

    units: int
    per_step: int
    per_epoch: int
    total: int
    warmup: int


def plan_steps(units: int, per_step: int, epochs: float, max_steps: int | None, warmup: float) -> Steps:
    """Steps over `units` units; the last step of an epoch takes what is left. `warmup` below 1 is a share of
    all steps, else a number."""
    per_epoch = math.ceil(units / per_step)
    total = max(1, _rounded_up(epochs * per_epoch))
    if max_steps is not None:
        total = min(total, max_steps)
    return Steps(
        units, per_step, per_epoch, total, int(warmup) if warmup >= 1 else _rounded_up(warmup * total)
    )


def _rounded_up(steps: float) -> int:
    return math.ceil(round(steps, 6))  # 0.07 * 100 is 7.000000000000001 and means 7


def units_of_step(step: int, steps: Steps, seed: int) -> list[int]:
    """Which units step `step` (from 0) trains on: a slice of the permutation that seed and epoch alone
    determine."""
    epoch, index = divmod(step, steps.per_epoch)
    found = _order(seed, epoch, steps.units)[index * steps.per_step : (index + 1) * steps.per_step]
    return [int(unit) for unit in found]


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, units: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(units, generator=generator)


def learning_rate(step: int, steps: Steps, peak: float, schedule: str) -> float:
    """Learning rate of step `step` (from 0): linear warm-up to `peak`, then linear or cosine towards 0, or
    constant."""
    if step < steps.warmup:
        return peak * (step + 1) / steps.warmup
    if schedule == "constant":
        return peak
    done = (step - steps.warmup) / max(1, steps.total - steps.warmup)
    return peak * (1 - done) if schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))
