"""Methods of tuning. A method is a config and a function that rewrites a model in place; `configs.METHODS`
lists them.

Names are fetched when first used, so that reading `methods.configs`, as checking a recipe does, loads no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petune.methods.configs import METHODS
    from petune.methods.merging import merge, merged_weights
    from petune.methods.registry import tune, wrap
    from petune.methods.trainable import (
        count_parameters,
        describe,
        frozen_tensors,
        learning_rates,
        mark_only_trainable,
        tuned_names,
        tuned_parameters,
        tuned_state,
        untouched,
        without_tuning,
    )
    from petune.methods.wrapped import Tuning, is_wrapped, tuning

__all__ = [
    "METHODS",
    "Tuning",
    "count_parameters",
    "describe",
    "frozen_tensors",
    "is_wrapped",
    "learning_rates",
    "mark_only_trainable",
    "merge",
    "merged_weights",
    "tune",
    "tuned_names",
    "tuned_parameters",
    "tuned_state",
    "tuning",
    "untouched",
    "without_tuning",
    "wrap",
]

_FILES = {
    "METHODS": "configs",
    **dict.fromkeys(("tune", "wrap"), "registry"),
    **dict.fromkeys(("merge", "merged_weights"), "merging"),
    **dict.fromkeys(("Tuning", "is_wrapped", "tuning"), "wrapped"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'petune.methods' has no attribute {name!r}")
    return getattr(import_module(f"petune.methods.{_FILES.get(name, 'trainable')}"), name)
