"""Bottleneck adapters (Houlsby et al. 2019, arXiv:1902.00751): a small residual network after every attention
and every MLP.

        y = W x + b;    out = y + up(act(down(y)))          down [bottleneck, hidden] ~ N(0, 0.02),   up
                        [hidden, bottleneck] = 0

It stands at the linear a sub-layer leaves by, before the sub-layer's own residual and norm, cross-attention
included; of a mixture of experts behind the whole of it. `up` starts at zero, so a wrapped model computes
exactly what the base did. The model's own dropout after that linear therefore acts on the adapter's output
too. An adapter is not linear in x: it cannot be merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.errors import UsageError
from petune.methods.configs import AdapterConfig
from petune.models.spec import CutKind, Family, RoutedMlp, Split, find_sites
from petune.models.tuned_linear import (
    BottleneckPart,
    KeptFeatures,
    LowRank,
    TunedLayer,
    TunedLinear,
    TunedOfAnyClass,
    WeightChange,
)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}


class Bottleneck(TunedLayer):
    """What every module with a bottleneck behind it has."""

    additions = ("adapter_down", "adapter_up", "linear_part", "activation", "dropout")
    adapter_down: nn.Linear
    adapter_up: nn.Linear
    linear_part: nn.Identity
    activation: str
    dropout: float

    def begin(self, width: int, like: Tensor, config: AdapterConfig, name: str) -> Self:
        """Put the bottleneck behind outputs of `width` features, beside weights like this one, and draw it.

        Raises UsageError, for the module `name`, where its width leaves none.
        """
        if config.reduction > width:
            raise UsageError(
                f"adapter.reduction {config.reduction} leaves no bottleneck",
                where=name,
                expected=f"at most {width}",
            )
        place: Any = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
        self.adapter_down = nn.Linear(width, width // config.reduction, **place)
        self.adapter_up = nn.Linear(width // config.reduction, width, **place)
        self.linear_part = nn.Identity()
        self.train(self.training)
        for own in self.tuned():
            self.draw(own)
        self.activation, self.dropout = config.activation, config.dropout
        return self

    def tuned(self) -> dict[str, nn.Parameter]:
        """Both linears of the bottleneck, with their biases."""
        return {
            f"{part}.{name}": value
            for part in ("adapter_down", "adapter_up")
            for name, value in getattr(self, part).named_parameters()
        }

    @torch.no_grad()
    def draw(self, name: str) -> None:
        """Fill a tensor of the bottleneck anew: noise in front, nothing behind."""
        value = self.get_parameter(name)
        if name == "adapter_down.weight":
            value.normal_(std=0.02)
        else:
            value.zero_()

    def kept_features(self) -> KeptFeatures:
        """The input of both linears, and what enters the activation between them."""
        return KeptFeatures(after=self.adapter_down.in_features + 2 * self.adapter_down.out_features)

    def bottleneck(self) -> BottleneckPart:
        """Both linears of the bottleneck, unless it is passed by."""
        part = BottleneckPart(self.adapter_down.out_features, cast("Any", self.activation), self.dropout)
        down, up = self.adapter_down, self.adapter_up
        return part._replace(tensors=(down.weight, down.bias, up.weight, up.bias)) if self.active else part

    def adapted(self, y: Tensor) -> Tensor:
        """y [..., width] behind the bottleneck and its own residual, in the dtype of y."""
        if not self.active:
            return y
        inner = _ACTIVATIONS[self.activation](self.adapter_down(y.to(self.adapter_down.weight.dtype)))
        return cast("Tensor", y + self.adapter_up(F.dropout(inner, self.dropout, self.training))).to(y.dtype)


class AdapterMixture(Bottleneck, TunedOfAnyClass):
    """A mixture of experts followed by a bottleneck adapter, behind the first of what the module gives."""

    @property
    def weights(self) -> tuple[str, ...]:
        """None: an adapter changes no weight."""
        return ()

    def forward(self, *args: Any, **settings: Any) -> Any:
        """The mixture, then the bottleneck with its own residual."""
        found = cast("Any", super()).forward(*args, **settings)
        return (self.adapted(found[0]), *found[1:]) if isinstance(found, tuple) else self.adapted(found)

    def weight_changes(self) -> dict[str, WeightChange]:
        """Raises UsageError: see AdapterLinear."""
        raise _unmergeable()

    def merged_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Raises UsageError: see AdapterLinear."""
        raise _unmergeable()


def _unmergeable() -> UsageError:
    return UsageError(
        "an adapter cannot be merged", remedy="keep the base model and load the adapter with petune.load"
    )


class AdapterLinear(Bottleneck, TunedLinear, nn.Linear):
    """nn.Linear followed by a bottleneck adapter. x [..., in] -> [..., out], dtype of the base layer's
    output."""

    base = nn.Linear

    def splits(self, cut: CutKind) -> dict[str, Split]:
        """The base layer is cut; the bottleneck is not linear and acts after the sum."""
        base: dict[str, Split] = (
            {"weight": 0, "bias": 0} if cut == "column" else {"weight": 1, "bias": "owner"}
        )
        return base | dict.fromkeys(self.tuned(), cast("Split", "after"))

    def after_sum(self) -> nn.Module:
        """Where the base layer's output passes before the bottleneck sees it."""
        return self.linear_part

    def low_rank(self) -> LowRank:
        """Weight and bias of the base layer, which the bottleneck acts behind."""
        return LowRank(self.weight, self.bias)

    def delta(self) -> Tensor:
        """Raises UsageError: the bottleneck has a non-linearity."""
        raise _unmergeable()

    def forward(self, x: Tensor) -> Tensor:
        """The base map, then the bottleneck with its own residual."""
        return self.adapted(cast("Tensor", self.linear_part(F.linear(x, self.weight, self.bias))))


def apply(
    model: nn.Module, family: Family | None, config: AdapterConfig, also_train: tuple[str, ...]
) -> None:
    """Put an adapter after the way out of every region, and behind a whole mixture. Raises UsageError for a
    reduction wider than the hidden width."""
    assert family is not None
    cores = [one.core for rule in family.stacks.values() for one in rule.sublayers]
    shared = [one.shared.region for one in cores if isinstance(one, RoutedMlp) and one.shared]
    for site in find_sites(model, family):
        if site.role == "experts":
            name = site.name.removesuffix(site.region.leave) + site.region.enter
            mixture = AdapterMixture.for_class(type(model.get_submodule(name))).of(model.get_submodule(name))
            width = family.shape(cast("Any", model).config).width
            like = next(site.module.parameters())
            model.set_submodule(name, mixture.begin(width, like, config, name))
        elif site.leaves and site.region not in shared:
            model.set_submodule(site.name, tune(cast("nn.Linear", site.module), config, site.name))


def tune(layer: nn.Linear, config: AdapterConfig, name: str) -> AdapterLinear:
    """The adapter form of `layer`, sharing its parameters and hooks; `name` is for the message if it cannot
    be tuned."""
    if type(layer) is not nn.Linear:
        raise UsageError(f"adapter tunes torch.nn.Linear, not {type(layer).__name__}", where=name)
    return AdapterLinear.of(layer).begin(layer.out_features, layer.weight, config, name)
