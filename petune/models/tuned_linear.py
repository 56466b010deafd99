"""The protocol of a tuned layer, below kernels, methods and parallel plans.

A tuned layer is a subclass of the layer it tunes and holds that layer's weights and biases itself, so base
names, hooks and code that reads `layer.weight` do not change. What trains, what is fused, how it is cut and
what it keeps is what the layer says here: nobody decides it by the names of attributes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from petune.models.spec import CutKind, TensorSplit
from petune.models.tuned_parts import BottleneckPart, LowRank


class KeptFeatures(NamedTuple):
    """What a forward pass keeps for the backward pass of a layer's tuning, in features per token.

    input: the layer's own input is kept. inner: features made before the sum of a cut by rows; after: those
    made after it.
    """

    input: bool = False
    inner: int = 0
    after: int = 0


class TunedModule(nn.Module, ABC):
    """A module with parameters of its own method."""

    @abstractmethod
    def tuned(self) -> dict[str, nn.Parameter]:
        """What trains and is saved, by name inside this module."""

    @abstractmethod
    def draw(self, name: str) -> None:
        """Fill one tensor of `tuned`, and nothing else, in place with what it begins as; random numbers come
        from torch's generator of the CPU, or of the tensor's device."""

    def begun(self) -> Collection[str]:
        """The tensors of `tuned` that are made of the base's weights and not drawn: they hold what they begin
        as."""
        return ()

    def rates(self) -> dict[str, float]:
        """Learning rates over the run's, of those tensors of `tuned` that have one of their own."""
        return {}


class WeightChange(NamedTuple):
    """A weight that merging replaces, what merging adds to it, and what of that the tuning has changed of the
    base's; all of one shape."""

    weight: Tensor
    delta: Tensor
    change: Tensor


class TunedLayer(TunedModule):
    """A layer of the base with a tuning, mixed in before the class of the layer it tunes: it has the layer's
    parameters, hooks and attributes, and names of the base do not change."""

    active: bool  # False: compute what the base layer would
    merged: bool  # True: the weights contain the tuning already
    # values of the base's weight, as `frozen_weight.sampled` takes them, where `weight` is another
    origin: Tensor | None = None
    base: ClassVar[type[nn.Module]]  # the class of the layer that is tuned
    # attributes, parameters and children that the base layer has not
    additions: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, layer: nn.Module) -> Self:
        """The tuned form of `layer`, sharing its parameters, hooks and every other attribute; its additions
        are not made yet."""
        tuned = cls.__new__(cls)
        tuned.__dict__ = dict(layer.__dict__)
        for name in ("_parameters", "_modules"):
            tuned.__dict__[name] = dict(layer.__dict__[name])
        tuned.active, tuned.merged = True, False
        return tuned

    def plain(self) -> nn.Module:
        """The base layer again: same parameters, original class, no tuning."""
        layer = self.base.__new__(self.base)
        layer.__dict__ = self._without_additions(self.__dict__)
        for name in ("_parameters", "_modules"):
            layer.__dict__[name] = self._without_additions(self.__dict__[name])
        return layer

    def _without_additions(self, own: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in own.items()
            if name not in ("active", "merged", "origin", *self.additions)
        }

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights that the tuning changes."""
        return ("weight",)

    def bottleneck(self) -> BottleneckPart | None:
        """What acts on what the base layer gives in a fused block, for a linear the sum of `low_rank`; None:
        nothing. Always None or never, for one layer; it follows from attributes and tensors of the layer and
        of the modules in it."""
        return None

    def after_sum(self) -> nn.Module:
        """The module whose output ranks that share the layer, or hold a cut of it by rows, must sum before
        anything else acts on it.

        It is the layer itself where nothing does, as where it is linear, else a child that passes on what
        `plain()` computes.
        """
        return self

    @abstractmethod
    def kept_features(self) -> KeptFeatures:
        """What a forward pass keeps for the backward pass of the tuning; the base layer itself keeps
        nothing."""

    @abstractmethod
    def weight_changes(self) -> dict[str, WeightChange]:
        """What merging does to each of `weights`, float32 at least. Raises UsageError for a tuning that
        cannot be merged."""

    @abstractmethod
    def merged_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The tensors of the base layer that merging replaces, by name, in `dtype` as `summed`."""


class TunedOfAnyClass(TunedLayer):
    """The tuned form of modules of several classes: a subclass of each, made when it is needed."""

    @classmethod
    def for_class(cls, kind: type[nn.Module]) -> type[Self]:
        """The form of modules of the class `kind`."""
        return cast("type[Self]", _form_of(cast("Any", cls), cast("Any", kind)))

    @classmethod
    def own_of(cls, kind: type[nn.Module]) -> dict[str, Any]:
        """What the form of a class has beside this one and that class."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, made_of(type(self)), self.__dict__


def made_of(kind: type) -> tuple[Any, Any]:
    """(form, base) by which `class_of` finds a class again: one that is made at run time has no name that a
    file could say. form: None of a class that has one."""
    return (kind.__mro__[1], kind.base) if issubclass(kind, TunedOfAnyClass) else (None, kind)


def class_of(form: Any, kind: Any) -> Any:
    """The class of which `made_of` has given this."""
    return kind if form is None else form.for_class(kind)


@cache
def _form_of(form: Any, kind: Any) -> Any:
    made = {"__module__": form.__module__, "base": kind} | form.own_of(kind)
    return type(f"{form.__name__}Of{kind.__name__}", (form, kind), made)


def _blank(form: Any, kind: Any) -> Any:
    made = class_of(form, kind)
    return made.__new__(made)


def summed(weight: Tensor, delta: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A weight with its update in it, summed in float32 (float64 for a float64 weight) and rounded once to
    `dtype`, the weight's own by default."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.detach().to(wide) + delta.detach().to(wide)).to(dtype or weight.dtype)


class TunedLinear(TunedLayer):
    """A linear layer (nn.Linear, Conv1D, nn.Embedding) with a tuning, mixed in before the class of the layer
    it tunes.

    Everything that kernels, parallel plans, merging and estimates want to know of it is asked through these
    members.
    """

    weight: Tensor
    # tensors of `tuned` with a number for each row of the weight, which is made of that row
    of_rows: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **settings: Any) -> None:
        """A subclass may compute something else, so it has a fused form only if it says so itself."""
        super().__init_subclass__(**settings)
        if "low_rank" not in vars(cls):
            cls.low_rank = TunedLinear.low_rank  # type: ignore[method-assign]  # of a class that is made here

    def low_rank(self) -> LowRank | None:
        """The linear map of the layer as fused kernels compute it, all of it but for its `bottleneck`.

        Without factors while its tuning is passed by; None: there is no fused form. Never inherited: a class
        that does not define it has none. Always None or never, for one layer. It follows from attributes and
        tensors of the layer and of the modules in it: while those are the same objects, nobody asks again.
        """
        return None

    @property
    def kind(self) -> str:
        """What to call a layer that has no fused form."""
        return type(self).__name__

    @abstractmethod
    def splits(self, cut: CutKind) -> dict[str, TensorSplit]:
        """How each tensor of the layer, the base layer's included, is cut when the layer is cut by columns or
        by rows.

        Raises UsageError for a cut in which the layer could not compute what it computes whole.
        """

    def cut_to(self, outputs: Sequence[int]) -> None:
        """Hear what a cut by columns has left of its outputs: of each part, where it is several."""

    @abstractmethod
    def delta(self) -> Tensor:
        """What merging adds to `weight`, same shape, float32 at least. Raises UsageError for a tuning that
        cannot be merged."""

    def change(self) -> Tensor:
        """What the tuning has changed of the base's weight, as `delta`."""
        return self.delta()

    def weight_changes(self) -> dict[str, WeightChange]:
        """That of the one weight."""
        return {"weight": WeightChange(self.weight, self.delta(), self.change())}

    def merged_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight with the tuning in it, as `summed`."""
        return summed(self.weight, self.delta(), dtype)

    def merged_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {"weight": self.merged_weight(dtype)}


def linear_splits(cut: CutKind) -> dict[str, TensorSplit]:
    """How weight and bias of a linear are cut: by columns both along the outputs; by rows the weight along
    the inputs, and the bias is one rank's."""
    return {"weight": 0, "bias": 0} if cut == "column" else {"weight": 1, "bias": "owner"}


def low_rank_of(layer: nn.Module) -> LowRank | None:
    """`layer` as a linear with LoRA's update, or with one of each part, or None where it is more than that (a
    bottleneck, a scale), its weight is transposed or its forward is not exactly known."""
    part = linear_of(layer)
    other = part is None or part.scaling is not None or part.turned or part.transposed
    return None if other or bottleneck_of(layer) is not None else part


def bottleneck_of(layer: nn.Module) -> BottleneckPart | None:
    """What acts behind the linear map of `layer`, where its forward is exactly known, or behind a whole
    mixture of experts; None: nothing."""
    known = isinstance(layer, TunedOfAnyClass) or linear_of(layer) is not None
    return layer.bottleneck() if isinstance(layer, TunedLayer) and known else None


def linear_of(layer: nn.Module) -> LowRank | None:
    """The linear map of `layer`, or None where its forward is not exactly known: only torch's own linear,
    transformers' Conv1D and what says it."""
    # where there is one, somebody has put another in its place
    return None if "forward" in vars(layer) else known_linear_of(layer)


def known_linear_of(layer: nn.Module) -> LowRank | None:
    """`linear_of` for a layer whose forward has been seen to be that of its class."""
    if type(layer) is nn.Linear:
        return LowRank(layer.weight, layer.bias)
    if type(layer) is Conv1D:
        return LowRank(layer.weight, layer.bias, transposed=True)
    return layer.low_rank() if isinstance(layer, TunedLinear) else None


def parameter(layer: nn.Module, name: str) -> Any:
    """A parameter past nn.Module's own look-up, which takes ten times as long; fused blocks ask for all of
    them in every pass."""
    found = layer._parameters.get(name)
    return getattr(layer, name) if found is None else found


def tuned_modules(model: nn.Module) -> Iterator[tuple[str, TunedModule]]:
    """Every module with parameters of its own method, with its full name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, TunedModule))


def tuned_layers(model: nn.Module) -> Iterator[tuple[str, TunedLayer]]:
    """The tuned modules that stand in for a layer of the base model, with their full names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, TunedLayer))
