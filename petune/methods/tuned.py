"""The joint of methods, parallel plans and kernels: a layer that is tuned, and where the tuning of a model is remembered.

A tuned layer is a subclass of the layer it tunes and holds that layer's weight and bias itself, so base names, hooks and code that reads
`layer.weight` do not change. What trains is what such layers declare, never what a name happens to contain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from torch import Tensor, nn

from petune.errors import UsageError
from petune.methods.configs import MethodConfig
from petune.sites import CutKind, Split


@runtime_checkable
class Tuned(Protocol):
    """Anything in the model that trains parameters of its own."""

    def tuned(self) -> dict[str, nn.Parameter]:
        """What trains and is saved, by name inside this module."""
        ...


@runtime_checkable
class TunedLayer(Tuned, Protocol):
    """A tuned layer that can be passed by and, where its method allows, merged."""

    active: bool  # False: compute what the base layer would

    def splits(self, cut: CutKind) -> dict[str, Split]:
        """How each of the layer's tensors, the base layer's included, is cut when the layer is cut by columns or by rows."""
        ...

    def way_out(self) -> nn.Module:
        """The module whose output is the linear part of this layer: what a cut by rows must sum before anything else acts on it.

        It is the layer itself, or passes on what `plain()` computes.
        """
        ...

    def kept(self) -> tuple[bool, int]:
        """What a forward pass keeps for the backward pass of the tuning: whether the input, and how many features of its own per token.

        Linears inside the layer, one after the other, are counted by themselves.
        """
        ...

    def merged_weight(self) -> Tensor:
        """Base weight with the tuning in it, dtype of the base weight; the sum is made in float32 at least."""
        ...

    def plain(self) -> nn.Module:
        """The base layer again: same parameters, original class, no tuning."""
        ...


@dataclass(frozen=True)
class Tuning:
    """How a model is tuned: the method, its config, the family's name if it has one, and the modules trained whole beside it."""

    method: str
    config: MethodConfig
    family: str | None
    also_train: tuple[str, ...]


def tuning(model: nn.Module) -> Tuning:
    """The tuning of a wrapped model. Raises UsageError for a model that is not wrapped."""
    found = getattr(model, "petune_tuning", None)
    if not isinstance(found, Tuning):
        raise UsageError(f"this {type(model).__name__} is not wrapped", remedy='call petune.wrap(model, method="lora") first')
    return found


def is_wrapped(model: nn.Module) -> bool:
    """Whether `wrap` has been called on this model and not undone by `merge`."""
    return isinstance(getattr(model, "petune_tuning", None), Tuning)


def tuned_modules(model: nn.Module) -> Iterator[tuple[str, Tuned]]:
    """Every module with parameters of its own method, with its full name."""
    for name, module in model.named_modules():
        if hasattr(type(module), "tuned"):  # isinstance of a protocol asks after every attribute, a hundred times slower
            yield name, cast("Tuned", module)


def tuned_layers(model: nn.Module) -> Iterator[tuple[str, TunedLayer]]:
    """The tuned modules that stand in for a layer of the base model."""
    for name, module in tuned_modules(model):
        if hasattr(type(module), "merged_weight"):
            yield name, cast("TunedLayer", module)
