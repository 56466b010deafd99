"""LoRA (Hu et al. 2021, arXiv:2106.09685): a frozen linear map plus a trained one of rank r beside it.

        y = W x + b + s B A dropout(x)          A [r, in] ~ U(-1/sqrt(in), 1/sqrt(in)),   B [out, r] = 0
        s = alpha / r, or alpha / sqrt(r)       rank-stabilised, Kalajdzievski 2023, arXiv:2312.03732

At the start B A = 0, so a wrapped model computes exactly what the base did. Factors are float32 whatever the
base's dtype; the input is cast to them and the sum back to the base's output dtype (of bf16 linears on a CPU:
petune/methods/lora_node.py). For an embedding the roles swap: A [r, vocab] = 0, B [dim, r] ~ N(0, 1). Beside
a convolution: petune/methods/lora_conv.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from petune.errors import UsageError
from petune.methods import lora_conv, lora_experts, lora_parts, pissa, token_rows
from petune.methods.configs import LoraConfig, name_of
from petune.methods.lora_experts import LoraExperts
from petune.methods.lora_node import fits, lora_linear
from petune.methods.targets import by_layer, in_blocks, refuse_unreached, select_layers
from petune.models import family_of
from petune.models.experts import Experts, is_experts, weight_at, weights_of
from petune.models.frozen_weight import sampled
from petune.models.joined import JoinedLinear, joined_linears, part_at, split_name
from petune.models.spec import CutKind, Family, TensorSplit
from petune.models.tuned_linear import KeptFeatures, TunedLayer, TunedLinear, linear_splits, parameter
from petune.models.tuned_parts import LowRank


class LoraLayer(TunedLinear):
    """What the LoRA layers of single modules share."""

    additions: ClassVar[tuple[str, ...]] = (
        *("lora_A", "lora_B", "scale", "dropout", "lr_ratio"),
        *pissa.START,
    )
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    dropout: float
    lr_ratio: float | None
    start_A: nn.Parameter  # these two only where it started from components of the weight
    start_B: nn.Parameter

    @classmethod
    def shapes(cls, layer: nn.Module, r: int) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that trains beside `layer`, by name."""
        weight = cast("Tensor", layer.weight)
        if isinstance(layer, nn.Conv2d):
            return lora_conv.shapes(weight, r)
        outputs, inputs = weight.shape if isinstance(layer, nn.Linear) else weight.T.shape
        return {"lora_A": (r, inputs), "lora_B": (outputs, r)}

    @classmethod
    def around(cls, layer: nn.Module, config: LoraConfig, saved: Mapping[str, Tensor] | None = None) -> Self:
        """The tuned form of `layer`, sharing its parameters, hooks and every other attribute.

        `saved` are the tensors of a saved tuning, by name; without them the factors are drawn as the module
        says.
        """
        tuned, weight = cls.of(layer), cast("Tensor", layer.weight)
        place: Any = {"dtype": factor_dtype(layer), "device": weight.device}
        for name, shape in cls.shapes(layer, config.r).items():
            value = torch.empty(shape, **place) if saved is None else saved[name].to(**place)
            setattr(tuned, name, nn.Parameter(value))
        for name in tuned.tuned() if saved is None else ():
            tuned.draw(name)
        tuned.scale = config.scale
        tuned.dropout, tuned.lr_ratio = config.dropout, config.lr_ratio
        if config.init == "pissa" and saved is None:
            tuned._start_from_components(config.init_iterations)
        return tuned

    @torch.no_grad()
    def _start_from_components(self, iterations: int | None) -> None:
        """Take the principal components of the weight for A and B, and leave the rest in it."""
        weight = self.weight.to(self.lora_A.dtype)
        self.origin = sampled(self.weight)
        linear = weight if isinstance(self, nn.Linear) else weight.T
        a, b = pissa.principal(linear, len(self.lora_A), iterations)
        factors = a / math.sqrt(self.scale), b / math.sqrt(self.scale)
        for own, start, factor in zip(("lora_A", "lora_B"), pissa.START, factors, strict=True):
            setattr(self, own, nn.Parameter(factor.contiguous()))
            setattr(self, start, nn.Parameter(factor.clone(), requires_grad=False))
        self.weight = nn.Parameter((weight - self.delta()).to(self.weight.dtype), requires_grad=False)

    @torch.no_grad()
    def draw(self, name: str) -> None:
        """Fill a factor anew; their product is zero, or the components that were taken out of the weight."""
        embeds, factor = isinstance(self, nn.Embedding), self.get_parameter(name)
        if pissa.has_start(self):
            factor.copy_(self.start_A if name == "lora_A" else self.start_B)
        elif name == "lora_A" and not embeds:
            bound = 1 / math.sqrt(factor[0].numel())
            factor.uniform_(-bound, bound)
        elif name == "lora_B" and embeds:
            factor.normal_()
        else:
            factor.zero_()

    def tuned(self) -> dict[str, nn.Parameter]:
        """The two factors."""
        return {"lora_A": self.lora_A, "lora_B": self.lora_B}

    def rates(self) -> dict[str, float]:
        """That of B, where it has one (LoRA+, Hayou et al. 2024, arXiv:2402.12354)."""
        return {} if self.lr_ratio is None else {"lora_B": self.lr_ratio}

    def delta(self) -> Tensor:
        """The update of `weight`, same shape, float32 at least."""
        return self.scale * (self.lora_B @ self.lora_A)

    def splits(self, cut: CutKind) -> dict[str, TensorSplit]:
        """By columns B follows the outputs and A is whole; by rows A follows the inputs and B is whole."""
        a, b = (None, 0) if cut == "column" else (1, None)
        start = dict(zip(pissa.START, (a, b), strict=True)) if pissa.has_start(self) else {}
        return linear_splits(cut) | {"lora_A": a, "lora_B": b} | start

    def kept_features(self) -> KeptFeatures:
        """The input, which A reads, and what it makes of it, r features."""
        return KeptFeatures(input=True, inner=self.lora_A.shape[0])

    def passes_by(self) -> bool:
        """Whether the base layer's own forward, with the weight as it is, is all there is to compute."""
        return self.merged or not (self.active or pissa.has_start(self))

    def change(self) -> Tensor:
        """What training has changed of the base's weight."""
        if not pissa.has_start(self):
            return self.delta()
        change = self.scale * (self.lora_B @ self.lora_A - self.start_B @ self.start_A)
        return change if isinstance(self, nn.Linear) else change.T

    def extra_repr(self) -> str:
        """The base layer's own words and the rank."""
        return f"{super().extra_repr()}, r={self.lora_A.shape[0]}, scale={self.scale:g}"

    def update(self, x: Tensor) -> Tensor:
        """scale * B A dropout(x) for x [..., in], in the factors' dtype; what was taken out of the weight,
        while the tuning is passed by."""
        x = x.to(self.lora_A.dtype)
        if not self.active:
            return F.linear(F.linear(x, self.start_A), self.start_B) * self.scale
        x = F.dropout(x, self.dropout, self.training)
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """The base map plus the update."""
        y = cast("Tensor", super().forward(x))
        return y if self.passes_by() else (y + self.update(x)).to(y.dtype)


class LoraLinear(LoraLayer, nn.Linear):
    """nn.Linear with a LoRA update. x [..., in] -> [..., out], dtype of the base layer's output."""

    base = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """The base map plus the update."""
        held = self._parameters
        weight, bias, a, b = (held.get(name) for name in ("weight", "bias", "lora_A", "lora_B"))
        other = self.merged or not self.active or (self.training and self.dropout > 0)
        other = other or type(self).update is not LoraLayer.update  # a subclass' own mathematics
        if not other and weight is not None and a is not None and b is not None and fits(x, weight, bias, a):
            return lora_linear(x, weight, bias, a, b, self.scale)
        return super().forward(x)

    def low_rank(self) -> LowRank:
        """Weight, bias and both factors."""
        return _low_rank(self)


def _low_rank(layer: LoraLayer, transposed: bool = False) -> LowRank:
    base = parameter(layer, "weight"), parameter(layer, "bias")
    if layer.passes_by():
        return LowRank(*base, transposed=transposed)
    if not layer.active:
        start = parameter(layer, "start_A"), parameter(layer, "start_B")
        return LowRank(*base, *start, layer.scale, transposed=transposed)
    factors = parameter(layer, "lora_A"), parameter(layer, "lora_B")
    return LowRank(*base, *factors, layer.scale, layer.dropout, transposed=transposed)


class LoraConv1D(LoraLayer, Conv1D):  # type: ignore[misc]  # transformers says Parameter where torch says Tensor
    """transformers' Conv1D, a linear map whose weight is stored [in, out], with a LoRA update."""

    base = Conv1D

    def delta(self) -> Tensor:
        """The update in Conv1D's transposed layout, [in, out]."""
        return super().delta().T

    def low_rank(self) -> LowRank:
        """Weight as it is stored, bias and both factors."""
        return _low_rank(self, transposed=True)

    __repr__ = nn.Module.__repr__  # Conv1D's own repr would hide the rank


class LoraEmbedding(LoraLayer, nn.Embedding):
    """nn.Embedding with a LoRA update: ids [...] -> [..., dim]. There is no dropout, as the input is an
    index."""

    base = nn.Embedding

    def rates(self) -> dict[str, float]:
        """None: the ratio is derived for B = 0 at the start, and here it is A that is 0."""
        return {}

    def delta(self) -> Tensor:
        """The update in the embedding's layout, [vocab, dim]."""
        return super().delta().T

    def forward(self, ids: Tensor) -> Tensor:
        """The row of the base table plus the update of that row; that of padding has no gradient of its
        own."""
        y: Tensor = nn.Embedding.forward(self, ids)
        if self.passes_by():
            return y
        found = F.embedding(ids, self.lora_A.T, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return (y + F.linear(found, self.lora_B) * self.scale).to(y.dtype)


class LoraConv2d(LoraLayer, nn.Conv2d):
    """nn.Conv2d with a LoRA update: x [batch, in, height, width] -> [batch, out, ...]. See lora_conv."""

    base = nn.Conv2d

    def delta(self) -> Tensor:
        """The update in the convolution's layout, [out, in, height, width]."""
        return self.scale * (self.lora_B.flatten(1) @ self.lora_A.flatten(1)).view_as(self.weight)

    def update(self, x: Tensor) -> Tensor:
        """scale * B A dropout(x), in the factors' dtype."""
        x = F.dropout(x.to(self.lora_A.dtype), self.dropout, self.training)
        return F.conv2d(F.conv2d(x, self.lora_A, None, self.stride, self.padding), self.lora_B) * self.scale


# the form of each class of layer that can be tuned; Experts: of a weight of experts
Layers = Mapping[type[nn.Module], type[TunedLayer]]
LAYERS: Layers = {
    nn.Linear: LoraLinear,
    Conv1D: LoraConv1D,
    nn.Embedding: LoraEmbedding,
    nn.Conv2d: LoraConv2d,
    Experts: LoraExperts,
}


def kind_of(layer: nn.Module) -> type[nn.Module]:
    """What `layer` is looked up by in `Layers`."""
    return Experts if is_experts(layer) else type(layer)


def layer_at(model: nn.Module, name: str) -> nn.Module:
    """The layer of a full name, the experts of which it means a weight, or the linear of which it means a
    part."""
    if (found := weight_at(model, name)) is not None:
        return found[0]
    part = part_at(model, family_of(model), name)
    return model.get_submodule(name) if part is None else part[0].module


def shapes_at(model: nn.Module, name: str, r: int, forms: Layers = LAYERS) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that trains beside the layer, the weight of experts or the part `name`, by
    full name."""
    found, part = weight_at(model, name), part_at(model, family_of(model), name)
    inside = lora_experts.shapes(*found, r) if found else lora_parts.shapes(*part, r) if part else None
    if inside is not None:
        return {f"{name.rpartition('.')[0]}.{own}": shape for own, shape in inside.items()}
    layer = model.get_submodule(name)
    form = cast("type[LoraLayer]", forms[type(layer)])
    return {f"{name}.{own}": shape for own, shape in form.shapes(layer, r).items()}


def put(
    model: nn.Module,
    configs: Mapping[str, LoraConfig],
    forms: Layers = LAYERS,
    saved: Mapping[str, Tensor] | None = None,
) -> None:
    """Put tuned forms in the place of the layers, the experts of the weights and the linears of the parts of
    these names, with their settings. saved: as `LoraLayer.around`, by full name."""
    experts: dict[str, dict[str, LoraConfig]] = {}
    joined: dict[str, tuple[JoinedLinear, dict[str, LoraConfig]]] = {}
    linears = joined_linears(model, family_of(model))
    for name, config in configs.items():
        path, _, leaf = name.rpartition(".")
        if weight_at(model, name) is not None:
            experts.setdefault(path, {})[leaf] = config
            continue
        if split_name(name, linears) is not None:
            joined.setdefault(path, (linears[path], {}))[1][leaf] = config
            continue
        layer = model.get_submodule(name)
        form = cast("type[LoraLayer]", forms[type(layer)])
        model.set_submodule(name, form.around(layer, config, _inside(name, saved)))
    for name, own in experts.items():
        module = model.get_submodule(name)
        model.set_submodule(name, LoraExperts.around(module, own, factor_dtype(module), _inside(name, saved)))
    for name, (whole, own) in joined.items():
        parts = lora_parts.FORMS[type(whole.module)]
        made = parts.around(whole, own, factor_dtype(whole.module), _inside(name, saved))
        model.set_submodule(name, made)


def _inside(name: str, state: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    """The tensors directly inside a module, by their names there."""
    if state is None:
        return None
    inside = ((*key.rpartition("."), value) for key, value in state.items())
    return {own: value for path, _, own, value in inside if path == name}


def apply(
    model: nn.Module,
    family: Family | None,
    config: LoraConfig,
    also_train: tuple[str, ...],
    forms: Layers = LAYERS,
) -> None:
    """Replace every target layer by its tuned form. Raises UsageError when a target is not a layer that has
    one in `forms`."""
    put(model, settings_of(model, family, config, also_train, forms), forms)
    if config.token_rows:
        token_rows.apply(model, config.token_rows, also_train)


def settings_of(
    model: nn.Module,
    family: Family | None,
    config: LoraConfig,
    also_train: tuple[str, ...],
    forms: Layers = LAYERS,
) -> dict[str, LoraConfig]:
    """The settings of each target, by full name. Raises as `apply`."""
    method = name_of(config)
    layers = select_layers(model, family, config.targets, config.exclude, also_train, parts=forms is LAYERS)
    if config.layers is not None:
        layers = in_blocks(layers, config.layers)
    wrong = {name: type(module).__name__ for name, module in layers.items() if kind_of(module) not in forms}
    if wrong:
        name = next(iter(wrong))
        classes = (kind for kind in forms if kind is not Experts)
        known = ", ".join(f"{kind.__module__.partition('.')[0]}'s {kind.__name__}" for kind in classes)
        what = f"{method} tunes {known}, not {wrong[name]}"
        raise UsageError(what, where=name, remedy="narrow `targets` or name it in `exclude`")
    if not layers:
        remedy = "take a name out of exclude, or name more targets"
        raise UsageError(f"{method} has nothing to tune: targets less exclude is empty", remedy=remedy)
    refuse_unreached(model, layers)
    if config.init_iterations is not None and config.init != "pissa":
        raise UsageError("init_iterations is of init: pissa", remedy="set init: pissa, or leave it out")
    ranks = by_layer(model, family, layers, config.rank_pattern, "rank_pattern")
    alphas = by_layer(model, family, layers, config.alpha_pattern, "alpha_pattern")
    for name, layer in layers.items():
        if kind_of(layer) is Experts:
            lora_experts.refuse_unfit(name, config)
        lora_conv.refuse_unfit(name, layer)
    if config.init == "pissa":
        pissa.refuse_unfit(layers, dict.fromkeys(layers, config.r) | ranks, model)
    return {
        name: replace(config, r=ranks.get(name, config.r), alpha=alphas.get(name, config.alpha))
        for name in layers
    }


def tune(layer: nn.Module, config: LoraConfig, saved: Mapping[str, Tensor] | None = None) -> LoraLayer:
    """The LoRA form of `layer`; see `LoraLayer.around`."""
    return cast("type[LoraLayer]", LAYERS[type(layer)]).around(layer, config, saved)


def factor_dtype(layer: nn.Module) -> torch.dtype:
    """What both factors of a layer are held in: float32, float64 on a float64 weight."""
    weight = layer.get_parameter(weights_of(layer)[0] if is_experts(layer) else "weight")
    return torch.promote_types(weight.dtype, torch.float32)
