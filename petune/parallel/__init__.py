"""Parallel plans and their execution. `configs` and `plan` are pure; `place`, `pipeline` and `shard` carry a plan out for `runner`.

Names are fetched when first used, so that reading `parallel.configs`, as checking a recipe does, loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petune.parallel import group
    from petune.parallel.configs import ParallelConfig
    from petune.parallel.mesh import Mesh, alone, make_mesh, renew
    from petune.parallel.plan import ALONE, ParallelPlan, describe, make_plan
    from petune.parallel.runner import Runner
    from petune.parallel.shard import is_sharded, local
    from petune.parallel.work import Batch, Work

__all__ = [
    "ALONE",
    "Batch",
    "Mesh",
    "ParallelConfig",
    "ParallelPlan",
    "Runner",
    "Work",
    "alone",
    "describe",
    "group",
    "is_sharded",
    "local",
    "make_mesh",
    "make_plan",
    "renew",
]

_FILES = {
    "ParallelConfig": "configs",
    **dict.fromkeys(("Mesh", "alone", "make_mesh", "renew"), "mesh"),
    **dict.fromkeys(("ALONE", "ParallelPlan", "describe", "make_plan"), "plan"),
    "Runner": "runner",
    **dict.fromkeys(("is_sharded", "local"), "shard"),
    **dict.fromkeys(("Batch", "Work"), "work"),
}


def __getattr__(name: str) -> Any:
    if name == "group":
        return import_module("petune.parallel.group")
    if name not in _FILES:
        raise AttributeError(f"module 'petune.parallel' has no attribute {name!r}")
    return getattr(import_module(f"petune.parallel.{_FILES[name]}"), name)
