"""LoRA (Hu et al. 2021, arXiv:2106.09685): a frozen linear map plus a trained one of rank r beside it.

        y = W x + b + (alpha / r) * B A dropout(x)          A [r, in] ~ U(-1/sqrt(in), 1/sqrt(in)),   B [out,
                                                            r] = 0

At the start B A = 0, so a wrapped model computes exactly what the base did. Factors are float32 whatever the
base's dtype; the input is cast to them and the sum back to the base's output dtype. For an embedding the
roles swap: A [r, vocab] = 0, B [dim, r] ~ N(0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from petune.errors import UsageError
from petune.methods.configs import LoraConfig, name_of
from petune.methods.targets import select_layers
from petune.models.spec import CutKind, Family, Split
from petune.models.tuned_linear import KeptFeatures, LowRank, TunedLinear


class LoraLayer(TunedLinear):
    """What the three LoRA layers share."""

    additions: ClassVar[tuple[str, ...]] = ("lora_A", "lora_B", "scale", "dropout")
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    dropout: float

    @classmethod
    def shapes(cls, layer: nn.Module, r: int) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that trains beside `layer`, by name."""
        weight = cast("Tensor", layer.weight)
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
        tuned.scale = (config.alpha if config.alpha is not None else 2 * config.r) / config.r
        tuned.dropout = config.dropout
        return tuned

    @torch.no_grad()
    def draw(self, name: str) -> None:
        """Fill a factor anew; their product is zero."""
        embeds = isinstance(self, nn.Embedding)
        if name == "lora_A" and not embeds:
            bound = 1 / math.sqrt(self.lora_A.shape[1])
            self.lora_A.uniform_(-bound, bound)
        elif name == "lora_B" and embeds:
            self.lora_B.normal_()
        else:
            self.get_parameter(name).zero_()

    def tuned(self) -> dict[str, nn.Parameter]:
        """The two factors."""
        return {"lora_A": self.lora_A, "lora_B": self.lora_B}

    def delta(self) -> Tensor:
        """The update of `weight`, same shape, float32 at least."""
        return self.scale * (self.lora_B @ self.lora_A)

    def splits(self, cut: CutKind) -> dict[str, Split]:
        """By columns B follows the outputs and A is whole; by rows A follows the inputs and B is whole."""
        if cut == "column":
            return {"weight": 0, "bias": 0, "lora_A": None, "lora_B": 0}
        return {"weight": 1, "bias": "owner", "lora_A": 1, "lora_B": None}

    def after_sum(self) -> nn.Module:
        """The layer itself: an update is linear."""
        return self

    def kept_features(self) -> KeptFeatures:
        """The input, which A reads, and what it makes of it, r features."""
        return KeptFeatures(input=True, inner=self.lora_A.shape[0])

    def passes_by(self) -> bool:
        """Whether the base layer's own forward is all there is to compute."""
        return self.merged or not self.active

    def extra_repr(self) -> str:
        """The base layer's own words and the rank."""
        return f"{super().extra_repr()}, r={self.lora_A.shape[0]}, scale={self.scale:g}"

    def update(self, x: Tensor) -> Tensor:
        """scale * B A dropout(x) for x [..., in], in the factors' dtype."""
        x = F.dropout(x.to(self.lora_A.dtype), self.dropout, self.training)
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


class LoraLinear(LoraLayer, nn.Linear):
    """nn.Linear with a LoRA update. x [..., in] -> [..., out], dtype of the base layer's output."""

    base = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """The base map plus the update."""
        y = F.linear(x, self.weight, self.bias)
        return y if self.passes_by() else (y + self.update(x)).to(y.dtype)

    def low_rank(self) -> LowRank:
        """Weight, bias and both factors."""
        if self.passes_by():
            return LowRank(_own(self, "weight"), _own(self, "bias"))
        factors = _own(self, "lora_A"), _own(self, "lora_B")
        return LowRank(_own(self, "weight"), _own(self, "bias"), *factors, self.scale, self.dropout)


def _own(layer: nn.Module, name: str) -> Any:
    """A parameter past nn.Module's own look-up, which takes ten times as long; fused blocks ask for all of
    them in every pass."""
    found = layer._parameters.get(name)
    return getattr(layer, name) if found is None else found


class LoraConv1D(LoraLayer, Conv1D):  # type: ignore[misc]  # transformers says Parameter where torch says Tensor
    """transformers' Conv1D, a linear map whose weight is stored [in, out], with a LoRA update."""

    base = Conv1D

    def delta(self) -> Tensor:
        """The update in Conv1D's transposed layout, [in, out]."""
        return super().delta().T

    def forward(self, x: Tensor) -> Tensor:
        """The base map plus the update."""
        y: Tensor = Conv1D.forward(self, x)
        return y if self.passes_by() else (y + self.update(x)).to(y.dtype)

    __repr__ = nn.Module.__repr__  # Conv1D's own repr would hide the rank


class LoraEmbedding(LoraLayer, nn.Embedding):
    """nn.Embedding with a LoRA update: ids [...] -> [..., dim]. There is no dropout, as the input is an
    index."""

    base = nn.Embedding

    def delta(self) -> Tensor:
        """The update in the embedding's layout, [vocab, dim]."""
        return super().delta().T

    def forward(self, ids: Tensor) -> Tensor:
        """The row of the base table plus the update of that row."""
        y: Tensor = nn.Embedding.forward(self, ids)
        if self.passes_by():
            return y
        return (y + F.linear(F.embedding(ids, self.lora_A.T), self.lora_B) * self.scale).to(y.dtype)


Layers = Mapping[type[nn.Module], type[LoraLayer]]  # the form of each class of layer that can be tuned
LAYERS: Layers = {nn.Linear: LoraLinear, Conv1D: LoraConv1D, nn.Embedding: LoraEmbedding}


def apply(
    model: nn.Module,
    family: Family | None,
    config: LoraConfig,
    also_train: tuple[str, ...],
    forms: Layers = LAYERS,
) -> None:
    """Replace every target layer by its tuned form. Raises UsageError when a target is not a layer that has
    one in `forms`."""
    method = name_of(config)
    layers = select_layers(model, family, config.targets, config.exclude, also_train)
    wrong = {name: type(module).__name__ for name, module in layers.items() if type(module) not in forms}
    if wrong:
        name = next(iter(wrong))
        known = ", ".join(f"{kind.__module__.partition('.')[0]}'s {kind.__name__}" for kind in forms)
        raise UsageError(
            f"{method} tunes {known}, not {wrong[name]}",
            where=name,
            remedy="narrow `targets` or name it in `exclude`",
        )
    if not layers:
        raise UsageError(f"{method} has nothing to tune: targets less exclude is empty")
    _refuse_unreached(model, layers)
    for name, layer in layers.items():
        model.set_submodule(name, forms[type(layer)].around(layer, config))


def _refuse_unreached(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise UsageError for layers whose forward never runs, where an update would train nothing: torch's own
    encoder layer reads the weights of its linears itself in eval mode, and encoder-decoder models look tokens
    up in tied twins of `shared`."""
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(owner, nn.TransformerEncoderLayer | nn.MultiheadAttention):
            raise UsageError(
                f"{type(owner).__name__} reads this weight without calling the layer",
                where=name,
                remedy=f"exclude: [{leaf}]",
            )
        twins = (
            [twin for twin, table in tables.items() if twin != name and table.weight is layer.weight]
            if name in tables
            else []
        )
        if twins and leaf == "shared":
            raise UsageError(
                "this embedding is never called, only its tied twins are",
                where=name,
                remedy=f"target {', '.join(twins)}",
            )


def tune(layer: nn.Module, config: LoraConfig, saved: Mapping[str, Tensor] | None = None) -> LoraLayer:
    """The LoRA form of `layer`; see `LoraLayer.around`."""
    return LAYERS[type(layer)].around(layer, config, saved)


def factor_dtype(layer: nn.Module) -> torch.dtype:
    """What both factors of a layer are held in: float32, float64 on a float64 weight."""
    return torch.promote_types(cast("Tensor", layer.weight).dtype, torch.float32)
