"""petune: parameter-efficient fine-tuning of Hugging Face models. The public face, and nothing else.

Names are fetched when first used, so `import petune` costs milliseconds and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petune.errors import PetuneError
    from petune.methods import mark_only_trainable, merge, merged_weights, tuned_state, wrap
    from petune.methods import mark_only_trainable as mark_only_adapter_as_trainable
    from petune.methods import mark_only_trainable as mark_only_lora_as_trainable
    from petune.methods import mark_only_trainable as mark_only_side_as_trainable
    from petune.methods.activation_cache import ActivationCache
    from petune.methods.several import active, alone, per_row
    from petune.models.multimodal import text_model
    from petune.recipe import Recipe, load_recipe
    from petune.run.callbacks import Callback
    from petune.run.finished import Run, load_run
    from petune.run.train import train
    from petune.saving.export import save
    from petune.saving.four_bit import save_base
    from petune.saving.load import load
    from petune.saving.several import add

__version__ = "0.1.0"

__all__ = [
    "ActivationCache",
    "Callback",
    "PetuneError",
    "Recipe",
    "Run",
    "__version__",
    "active",
    "add",
    "alone",
    "load",
    "load_recipe",
    "load_run",
    "mark_only_adapter_as_trainable",
    "mark_only_lora_as_trainable",
    "mark_only_side_as_trainable",
    "mark_only_trainable",
    "merge",
    "merged_weights",
    "per_row",
    "save",
    "save_base",
    "text_model",
    "train",
    "tuned_state",
    "wrap",
]

_ROOMS = {
    "ActivationCache": "methods.activation_cache",
    "Callback": "run.callbacks",
    "PetuneError": "errors",
    **dict.fromkeys(("Recipe", "load_recipe"), "recipe"),
    "load": "saving.load",
    "save": "saving.export",
    "save_base": "saving.four_bit",
    **dict.fromkeys(("mark_only_trainable", "merge", "merged_weights", "tuned_state", "wrap"), "methods"),
    **dict.fromkeys(("Run", "load_run"), "run.finished"),
    **dict.fromkeys(("active", "alone", "per_row"), "methods.several"),
    "add": "saving.several",
    "text_model": "models.multimodal",
    "train": "run.train",
}
_SAME_FOR_EVERY_METHOD = {
    f"mark_only_{method}_as_trainable": "mark_only_trainable" for method in ("lora", "adapter", "side")
}


if not TYPE_CHECKING:  # a type checker knows the names above, and reports any other

    def __getattr__(name: str) -> Any:
        name = _SAME_FOR_EVERY_METHOD.get(name, name)
        if name not in _ROOMS:
            raise AttributeError(f"module 'petune' has no attribute {name!r}")
        return getattr(import_module(f"petune.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
