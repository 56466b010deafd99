"""(IA)^3 (Liu et al. 2022, arXiv:2205.05638): learned scales of keys, values and the inside of the MLP.

        y = l * (W x + b)          l [out, 1], of keys and values
        y = W (l * x) + b          l [1, in], of what enters the MLP's last linear

l = 1 at the start, so a wrapped model computes exactly what the base did. Scales are float32 whatever the
base's dtype.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.errors import UsageError
from petune.methods.configs import Ia3Config
from petune.methods.targets import select_layers
from petune.models.spec import CutKind, Family, TensorSplit
from petune.models.tuned_linear import KeptFeatures, TunedLinear, linear_splits
from petune.models.tuned_parts import LowRank, Scaling

SCALE = "ia3_l"


class Ia3Linear(TunedLinear, nn.Linear):
    """nn.Linear with learned scales. x [..., in] -> [..., out], dtype of the base layer's output."""

    base = nn.Linear
    additions: ClassVar[tuple[str, ...]] = (SCALE, "of_inputs")
    ia3_l: nn.Parameter
    of_inputs: bool

    @classmethod
    def around(cls, layer: nn.Linear, of_inputs: bool, saved: Tensor | None = None) -> Self:
        """The scaled form of `layer`, which shares its parameters and hooks; saved: its scales."""
        tuned, weight = cls.of(layer), layer.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        scale = torch.ones(cls.shape(layer, of_inputs)) if saved is None else saved
        tuned.ia3_l, tuned.of_inputs = nn.Parameter(scale.to(weight.device, dtype)), of_inputs
        return tuned

    @staticmethod
    def shape(layer: nn.Linear, of_inputs: bool) -> tuple[int, int]:
        """Of the scales, as they multiply the weight."""
        return (1, layer.in_features) if of_inputs else (layer.out_features, 1)

    def tuned(self) -> dict[str, nn.Parameter]:
        """The scales."""
        return {SCALE: self.ia3_l}

    @torch.no_grad()
    def draw(self, name: str) -> None:
        """Scales of one."""
        self.ia3_l.fill_(1)

    def splits(self, cut: CutKind) -> dict[str, TensorSplit]:
        """Scales follow the features that they scale where those are cut; whole ones scale each rank's term
        of the sum."""
        cuts_outputs = cut == "column"
        own = None if self.of_inputs == cuts_outputs else int(self.of_inputs)
        return linear_splits(cut) | {SCALE: own}

    def kept_features(self) -> KeptFeatures:
        """What is scaled: the input, and then its scaled form as well; or every output."""
        if self.of_inputs:
            return KeptFeatures(input=True, inner=self.in_features)
        return KeptFeatures(inner=self.out_features)

    def delta(self) -> Tensor:
        """(l - 1) W, what merging adds to the weight."""
        return (self.ia3_l - 1) * self.weight.to(self.ia3_l.dtype)

    def merged_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The weight, and the bias where it is scaled too."""
        merged = super().merged_tensors(dtype)
        if self.bias is not None and not self.of_inputs:
            merged["bias"] = (self.bias.detach() * self.ia3_l.detach()[:, 0]).to(dtype or self.bias.dtype)
        return merged

    def low_rank(self) -> LowRank:
        """Weight, bias and scales."""
        by = None if self.merged or not self.active else self.ia3_l
        scaling: Scaling = "inputs" if self.of_inputs else "outputs"
        return LowRank(self.weight, self.bias, by=by, scaling=scaling)

    def forward(self, x: Tensor) -> Tensor:
        """The base map of a scaled input, or its scaled output."""
        if self.merged or not self.active:
            return super().forward(x)
        if self.of_inputs:
            return super().forward((x * self.ia3_l[0]).to(x.dtype))
        y = F.linear(x, self.weight, self.bias)
        return (y * self.ia3_l[:, 0]).to(y.dtype)


def apply(model: nn.Module, family: Family | None, config: Ia3Config, also_train: tuple[str, ...]) -> None:
    """Scale the targets. Raises UsageError for a target that is not nn.Linear, and for an entry of `inputs`
    that is none of the targets."""
    layers = select_layers(model, family, config.targets, (), also_train)
    inputs = select_layers(model, family, config.inputs, (), also_train)
    if strange := [name for name in inputs if name not in layers]:
        raise UsageError("ia3.inputs names what is no target", where=strange[0], remedy="add it to targets")
    for name, layer in layers.items():
        if type(layer) is not nn.Linear:
            what = f"ia3 tunes torch.nn.Linear, not {type(layer).__name__}"
            raise UsageError(what, where=name, remedy="name other targets, or use lora")
        model.set_submodule(name, Ia3Linear.around(layer, name in inputs))
