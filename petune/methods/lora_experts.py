"""LoRA on experts: each has factors of its own, for one or both of its weights.

        y_t = sum over chosen e of  w_te down_e(act(gate_up_e(x_t)))        A [E, r, in],   B [E, out, r] = 0

with W_e + s B_e A_e in the place of each tuned weight. Tokens are sorted by expert, and all products are
grouped (kernels/grouped.py); a token's weight for an expert is multiplied in before the way down, so that its
gradient needs no result of the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.kernels.grouped import combine, dispatch, grouped
from petune.methods.configs import LoraConfig
from petune.methods.lora_factors import NamedFactors
from petune.models.experts import TunedExperts, along, sizes_of, weights_of
from petune.models.routes import Routes, routes_of
from petune.models.spec import TensorSplit
from petune.models.tuned_linear import KeptFeatures, WeightChange, summed
from petune.models.tuned_parts import LowRank


def shapes(module: nn.Module, weight: str, r: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that trains beside a weight of experts, by its name in their module."""
    experts, outputs, inputs = sizes_of(module, weight)
    return {f"{weight}_lora_A": (experts, r, inputs), f"{weight}_lora_B": (experts, outputs, r)}


class LoraExperts(NamedFactors, TunedExperts):
    """Experts with a LoRA update of some of their weights.

    (x [tokens, width], index and weights [tokens, k] of the chosen) -> [tokens, width], in the dtype of x.
    Names of its factors are those of the weights.
    """

    kind: ClassVar[str] = "weight of experts"  # what messages call it

    @classmethod
    def around(
        cls,
        experts: nn.Module,
        configs: Mapping[str, LoraConfig],
        dtype: torch.dtype,
        saved: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """The tuned form of a module of experts, sharing its parameters; `configs` by weight, the rest as
        `LoraLayer.around`. dtype: of the factors."""
        tuned = cls.for_class(type(experts)).of(experts)
        tuned.scales = {weight: configs[weight].scale for weight in weights_of(experts) if weight in configs}
        tuned.lr_ratio = next(iter(configs.values())).lr_ratio
        for weight in tuned.scales:
            device = experts.get_parameter(weight).device
            tuned.give(shapes(experts, weight, configs[weight].r), saved, dtype, device)
        return tuned

    @property
    def weights(self) -> tuple[str, ...]:
        """The weights that have an update."""
        return tuple(self.scales)

    @property
    def additions(self) -> tuple[str, ...]:  # type: ignore[override]  # they follow from the weights
        return ("scales", "lr_ratio", *self.tuned())

    def low_ranks(self) -> dict[str, LowRank]:
        if self.merged or not self.active:
            return {}
        return {
            weight: LowRank(self.get_parameter(weight), None, *self.factors(weight), scale)
            for weight, scale in self.scales.items()
        }

    def tuned_splits(self) -> dict[str, TensorSplit]:
        """See TunedExperts: A of down with its inputs, B of the others with their outputs."""
        found: dict[str, TensorSplit] = {}
        for weight in self.scales:
            down = weight == "down_proj"
            found[f"{weight}_lora_A"] = along(self, weight, 2) if down else None
            found[f"{weight}_lora_B"] = None if down else along(self, weight, 1)
        return found

    def kept_features(self) -> KeptFeatures:
        """For each copy of a token: the input, which A reads, and what it makes of it."""
        return KeptFeatures(input=True, inner=sum(self.factors(weight)[0].shape[1] for weight in self.scales))

    def weight_changes(self) -> dict[str, WeightChange]:
        """s B_e A_e, transposed where the weights are."""
        found = {}
        for weight, scale in self.scales.items():
            a, b = self.factors(weight)
            delta = scale * (b @ a)
            delta = delta.transpose(1, 2) if cast("Any", self).is_transposed else delta
            found[weight] = WeightChange(self.get_parameter(weight), delta, delta)
        return found

    def merged_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {name: summed(own, delta, dtype) for name, (own, delta, _) in self.weight_changes().items()}

    def extra_repr(self) -> str:
        """The weights with their ranks."""
        ranks = (f"{weight} r={self.factors(weight)[0].shape[1]}" for weight in self.scales)
        return f"{super().extra_repr()}, {', '.join(ranks)}".removeprefix(", ")

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The sum over the chosen experts of each token."""
        if self.merged or not self.active:
            return cast("Tensor", cast("Any", super()).forward(hidden, index, weights))
        own = cast("Any", self)
        up, down = weights_of(self)
        routes = routes_of(index, own.num_experts)
        inner = self._product(up, dispatch(hidden, routes), routes)
        inner = own._apply_gate(inner) if own.has_gate else own.act_fn(inner)
        share = routes.sorted(weights)[:, None]
        return combine(self._product(down, (inner * share).to(inner.dtype), routes, share), routes).to(
            hidden.dtype
        )

    def _product(self, weight: str, x: Tensor, routes: Routes, share: Tensor | None = None) -> Tensor:
        """x [m, in] sorted by expert times the weights, and their biases times a share [m, 1]: [m, out]."""
        own, bias = self.get_parameter(weight), getattr(self, f"{weight}_bias", None)
        transposed = cast("Any", self).is_transposed
        y = grouped(x, own, routes.ends, turned=not transposed)
        if bias is not None:
            each = bias[routes.groups]
            y = (y + (each if share is None else each * share)).to(y.dtype)
        if weight not in self.scales:
            return y
        a, b = self.factors(weight)
        low = grouped(x, a.transpose(1, 2), routes.ends)
        return (y + grouped(low, b.transpose(1, 2), routes.ends) * self.scales[weight]).to(y.dtype)


def refuse_unfit(name: str, config: LoraConfig) -> None:
    """Raise UsageError for settings that are not computed on experts. name: of one of their weights."""
    wrong = next(
        (
            word
            for word, set_ in (("dropout", config.dropout), ("init: pissa", config.init == "pissa"))
            if set_
        ),
        None,
    )
    if wrong is not None:
        remedy = f"leave {wrong.partition(':')[0]} out, or name experts in `exclude`"
        raise UsageError(f"lora on experts has no {wrong}", where=name, remedy=remedy)
