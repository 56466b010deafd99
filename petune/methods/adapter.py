"""Bottleneck adapters (Houlsby et al. 2019, arXiv:1902.00751): a small residual network after every attention
and every MLP.

        y = W x + b;    out = y + up(act(down(y)))          down [bottleneck, hidden] ~ N(0, 0.02),   up
                        [hidden, bottleneck] = 0

It stands at the linear a sub-layer leaves by, before the sub-layer's own residual and norm, cross-attention
included; of a mixture of experts behind the whole of it. `up` starts at zero, so a wrapped model computes
exactly what the base did. The model's own dropout after that linear therefore acts on the adapter's output
too. An adapter is not linear in x: it cannot be merged.

Pfeiffer's kind (MAD-X, Pfeiffer et al. 2020, arXiv:2005.00052) has one adapter for each block. It reads what
the block would give, LN(y + x), and adds to y, before the same norm:

        s = y + x;      out = LN(s + up(act(down(LN(s)))))  y: the MLP's output, x: what the block adds it to

Where no norm stands behind that sum (Llama, T5 and kin), nothing is normed and it stands behind the block:

        out = s + up(act(down(s)))                          s: what the block gives

which is what AdapterHub's `adapters` computes of its seq_bn in Llama, Mistral and T5, whose layers hand it no
norm: what it reads has the residual in it (Adapter.pre_forward, original_ln_before).

The parallel kind (He et al. 2022, arXiv:2110.04366) has one beside each MLP, which reads what the block adds
the MLP to, and is scaled:

        y = W m + b;    out = y + s up(act(down(x)))        down as torch draws a linear, up = 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from petune.errors import UsageError
from petune.methods.configs import ADAPTERHUB, AdapterConfig
from petune.models.acts import ACTS
from petune.models.boundary import BoundaryHook
from petune.models.sites import find_sites
from petune.models.spec import (
    Attention,
    CutKind,
    Family,
    Mlp,
    RoutedMlp,
    StackName,
    SubLayer,
    TensorSplit,
    child_of,
    stack_paths,
)
from petune.models.tuned_linear import (
    KeptFeatures,
    TunedLayer,
    TunedLinear,
    TunedOfAnyClass,
    WeightChange,
    linear_splits,
)
from petune.models.tuned_parts import BottleneckPart, LowRank

# Tensors of the bottleneck's width that autograd keeps of an activation and for `up`, where they are not 2
_KEPT = {"gelu_10": 3, "quick_gelu": 3, "gelu_python": 4, "gelu_fast": 8}
_KEPT |= dict.fromkeys(("gelu_new", "gelu_accurate", "gelu_python_tanh"), 5)


@cache
def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """The non-linearity that a setting names, or a file of AdapterHub's."""
    return cast("Callable[[Tensor], Tensor]", ACT2FN[ADAPTERHUB.get(name, name)])


class BottleneckLayer(TunedLayer):
    """What every module with a bottleneck behind it has. The names are no block's own."""

    additions = (
        *("adapter_down", "adapter_up", "linear_part", "adapter_activation", "adapter_dropout"),
        *("adapter_scale", "beside", "handed"),
    )
    adapter_down: nn.Linear
    adapter_up: nn.Linear
    linear_part: nn.Identity
    adapter_activation: str
    adapter_dropout: float
    adapter_scale: float
    beside: bool  # it reads what `BesideHook` hands it
    handed: Tensor | None
    of_sum: ClassVar[bool] = False  # it is part of what a block makes of its last sum

    def begin(self, width: int, like: Tensor, config: AdapterConfig, name: str) -> Self:
        """Put the bottleneck behind outputs of `width` features, beside weights like this one, and draw it.

        Raises UsageError, for the module `name`, where its width leaves none.
        """
        if config.reduction > width:
            what = f"adapter.reduction {config.reduction} leaves no bottleneck"
            raise UsageError(what, where=name, expected=f"at most {width}")
        place: Any = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
        self.adapter_down = nn.Linear(width, width // config.reduction, **place)
        self.adapter_up = nn.Linear(width // config.reduction, width, **place)
        self.linear_part = nn.Identity()
        self.train(self.training)
        self.adapter_activation, self.adapter_dropout = config.activation, config.dropout
        self.adapter_scale, self.beside, self.handed = config.factor, config.kind == "parallel", None
        for own in self.tuned():
            self.draw(own)
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
        if name == "adapter_down.weight" and self.beside:
            nn.init.kaiming_uniform_(value, a=math.sqrt(5))
        elif name == "adapter_down.weight":
            value.normal_(std=0.02)
        else:
            value.zero_()

    def kept_features(self) -> KeptFeatures:
        """The input of both linears, and what the activation between them keeps."""
        inner = _KEPT.get(self.adapter_activation, 2) * self.adapter_down.out_features
        return KeptFeatures(after=self.adapter_down.in_features + inner)

    def bottleneck(self) -> BottleneckPart:
        """Both linears of the bottleneck, unless it is passed by."""
        down, up, act = self.adapter_down, self.adapter_up, self.adapter_activation
        own = down.out_features, ACTS.get(act, act), self.adapter_dropout, None, self.adapter_scale
        part = BottleneckPart(*own, self.beside, self.of_sum)
        return part._replace(tensors=(down.weight, down.bias, up.weight, up.bias)) if self.active else part

    def after_sum(self) -> nn.Module:
        """Where what the base gives passes before the bottleneck sees it."""
        return self.linear_part

    def adapted(self, y: Tensor) -> Tensor:
        """y [..., width] and what the bottleneck adds to it, in the dtype of y."""
        x, self.handed = self.handed if self.beside else y, None
        if not self.active:
            return y
        assert x is not None, "the sub-layer was left without having been entered"
        return (y + self.update(x)).to(y.dtype)

    def update(self, x: Tensor) -> Tensor:
        """What the bottleneck makes of x [..., width], in its own dtype."""
        inner = activation_of(self.adapter_activation)(
            self.adapter_down(x.to(self.adapter_down.weight.dtype))
        )
        made = cast("Tensor", self.adapter_up(F.dropout(inner, self.adapter_dropout, self.training)))
        return made if self.adapter_scale == 1 else made * self.adapter_scale


class BesideHook(BoundaryHook):
    """Hook on the module that first reads what a sub-layer is added to: a bottleneck beside the sub-layer
    reads it too. It acts before the hooks of a plan, which are put there later."""

    def __init__(self, to: BottleneckLayer) -> None:
        self.to = to

    def __call__(self, module: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
        """Hand it over."""
        self.to.handed = args[0] if args else settings["hidden_states"]


class AdapterOfAnyClass(BottleneckLayer, TunedOfAnyClass):
    """A module that is no linear, with a bottleneck."""

    @property
    def weights(self) -> tuple[str, ...]:
        """None: an adapter changes no weight."""
        return ()

    def weight_changes(self) -> dict[str, WeightChange]:
        """Raises UsageError: see AdapterLinear."""
        raise _unmergeable()

    def merged_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Raises UsageError: see AdapterLinear."""
        raise _unmergeable()


class AdapterNorm(AdapterOfAnyClass):
    """The norm behind the sum of a sub-layer, with a bottleneck before it that reads what it gives."""

    of_sum = True

    def forward(self, total: Tensor) -> Tensor:
        """The sum [..., width] with the bottleneck's update in it, normed."""
        norm = cast("Any", super()).forward
        normed: Tensor = norm(total)
        return norm((total + self.update(normed)).to(total.dtype)) if self.active else normed


class AdapterMixture(AdapterOfAnyClass):
    """A mixture of experts followed by a bottleneck adapter, behind the first of what the module gives."""

    def forward(self, *args: Any, **settings: Any) -> Any:
        """The mixture, then the bottleneck with its own residual."""
        found = cast("Any", super()).forward(*args, **settings)
        first, *rest = found if isinstance(found, tuple) else (found,)
        y = self.adapted(self.linear_part(first))
        return (y, *rest) if isinstance(found, tuple) else y


class AdapterBlock(AdapterMixture):
    """A block that ends with a sum, with a bottleneck behind that: the first of what it gives."""

    of_sum = True

    @classmethod
    def own_of(cls, kind: type[nn.Module]) -> dict[str, Any]:
        """A forward that says which arguments the block takes."""

        @wraps(kind.forward)
        def forward(self: AdapterBlock, *args: Any, **settings: Any) -> Any:
            return cls.forward(self, *args, **settings)

        return {"forward": forward}


def _unmergeable() -> UsageError:
    return UsageError(
        "an adapter cannot be merged", remedy="keep the base model and load the adapter with petune.load"
    )


class AdapterLinear(BottleneckLayer, TunedLinear, nn.Linear):
    """nn.Linear followed by a bottleneck adapter. x [..., in] -> [..., out], dtype of the base layer's
    output."""

    base = nn.Linear

    def splits(self, cut: CutKind) -> dict[str, TensorSplit]:
        """The base layer is cut; the bottleneck is not linear and acts after the sum."""
        return linear_splits(cut) | dict.fromkeys(self.tuned(), cast("TensorSplit", "after"))

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
    """Put adapters where their kind has them. Raises UsageError for a reduction wider than the hidden width,
    and for Pfeiffer's behind blocks whose forward somebody has put another in place of."""
    assert family is not None
    if config.kind == "pfeiffer":
        _at_sums(model, family, config)
    elif config.kind == "parallel":
        _beside(model, family, config)
    else:
        cores = [one.core for rule in family.stacks.values() for one in rule.sublayers]
        shared = [one.shared.region for one in cores if isinstance(one, RoutedMlp) and one.shared]
        for site in find_sites(model, family):
            if site.role == "experts":
                name = site.name.removesuffix(site.region.leave) + site.region.enter
                like = next(site.module.parameters())
                _widen(model, AdapterMixture, name, like, family, site.stack, config)
            elif site.leaves and site.region not in shared:
                model.set_submodule(site.name, tune(cast("nn.Linear", site.module), config, site.name))


def _beside(model: nn.Module, family: Family, config: AdapterConfig) -> None:
    """Put an adapter beside every MLP, and a hook that hands it what it reads."""
    for stack, path, block, sublayers in _blocks(model, family):
        for one in sublayers:
            if isinstance(one.core, Attention):
                continue
            if isinstance(one.core, RoutedMlp):
                name = f"{path}.{one.core.at}"
                like = next(block.get_submodule(one.core.experts).parameters())
                _widen(model, AdapterMixture, name, like, family, stack, config)
            else:
                name = f"{path}.{cast('tuple[str, nn.Module]', child_of(block, one.core.down))[0]}"
                model.set_submodule(name, tune(cast("Any", model.get_submodule(name)), config, name))
            made = cast("BottleneckLayer", model.get_submodule(name))
            # which is the first to read what the sub-layer is added to
            reader = block.get_submodule(one.core.at if one.norm_in is None else one.norm_in.path)
            reader.register_forward_pre_hook(BesideHook(made), with_kwargs=True)


def _blocks(
    model: nn.Module, family: Family
) -> Iterator[tuple[StackName, str, nn.Module, tuple[SubLayer, ...]]]:
    """Every block with its stack, its full name and its sub-layers."""
    for stack, path in stack_paths(model, family).items():
        for at, block in model.get_submodule(path).named_children():
            if at.isdigit():
                yield stack, f"{path}.{at}", block, family.stacks[stack].sublayers_in(block)


def _at_sums(model: nn.Module, family: Family, config: AdapterConfig) -> None:
    """Put an adapter at the norm behind every MLP's sum or, where there is none, behind the block. Raises
    UsageError, with the model as it was."""
    found: dict[str, tuple[type[AdapterOfAnyClass], Tensor, StackName]] = {}
    for stack, path, block, layers in _blocks(model, family):
        mlp = next((one for one in layers if isinstance(one.core, Mlp)), layers[-1])
        if mlp.norm_after_sum is not None:
            norm = f"{path}.{mlp.norm_after_sum.path}"
            found[norm] = AdapterNorm, cast("Any", model.get_submodule(norm)).weight, stack
            continue
        if "forward" in vars(block):
            what = "adapters of kind pfeiffer stand behind a block, and this one's forward was exchanged"
            remedy = "set kind: houlsby, or wrap the model before it is dispatched over devices"
            raise UsageError(what, where=path, remedy=remedy)
        floats = (value for value in block.parameters() if value.is_floating_point())
        found[path] = AdapterBlock, next(floats), stack
    for name, (form, like, stack) in found.items():
        _widen(model, form, name, like, family, stack, config)


def _widen(
    model: nn.Module,
    form: type[AdapterOfAnyClass],
    name: str,
    like: Tensor,
    family: Family,
    stack: StackName,
    config: AdapterConfig,
) -> None:
    """Put the form of a module that is no linear in its place. like: a weight beside it."""
    module = model.get_submodule(name)
    width = family.shape(family.part(cast("Any", model).config, stack)).width
    tuned = form.for_class(type(module)).of(module)
    model.set_submodule(name, tuned.begin(width, like, config, name))


def tune(layer: nn.Linear, config: AdapterConfig, name: str) -> AdapterLinear:
    """The adapter form of `layer`, sharing its parameters and hooks; `name` is for the message if it cannot
    be tuned."""
    if type(layer) is not nn.Linear:
        what = f"adapter tunes torch.nn.Linear, not {type(layer).__name__}"
        raise UsageError(what, where=name, remedy="use lora")
    return AdapterLinear.of(layer).begin(layer.out_features, layer.weight, config, name)
