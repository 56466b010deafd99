"""Parallel plans and their execution. `configs` and `plan` are pure; `tensor`, `sequence`, `pipeline` and
`fsdp` carry a plan out for `runner`.

Names are fetched when first used, so that reading `parallel.configs`, as checking a recipe does, loads no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petune.parallel.configs import ParallelConfig
    from petune.parallel.fsdp import is_sharded, local
    from petune.parallel.mesh import Mesh, alone, make_mesh, renew
    from petune.parallel.objective import Batch, Objective, Outputs
    from petune.parallel.placement import ShardPlace, parallelize
    from petune.parallel.plan import ALONE, ParallelPlan, describe
    from petune.parallel.planning import make_plan
    from petune.parallel.runner import Runner

__all__ = [
    "ALONE",
    "Batch",
    "Mesh",
    "Objective",
    "Outputs",
    "ParallelConfig",
    "ParallelPlan",
    "Runner",
    "ShardPlace",
    "alone",
    "describe",
    "is_sharded",
    "local",
    "make_mesh",
    "make_plan",
    "parallelize",
    "renew",
]

_FILES = {
    "ParallelConfig": "configs",
    **dict.fromkeys(("Mesh", "alone", "make_mesh", "renew"), "mesh"),
    **dict.fromkeys(("ALONE", "ParallelPlan", "describe"), "plan"),
    "make_plan": "planning",
    "Runner": "runner",
    **dict.fromkeys(("is_sharded", "local"), "fsdp"),
    **dict.fromkeys(("Batch", "Objective", "Outputs"), "objective"),
    **dict.fromkeys(("ShardPlace", "parallelize"), "placement"),
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'petune.parallel' has no attribute {name!r}")
    return getattr(import_module(f"petune.parallel.{_FILES[name]}"), name)
