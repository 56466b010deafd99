"""MiSS (Kang and Yin 2024, arXiv:2409.15371): one trained shard, shared by all shards of a weight's inputs.

        y = W x + b + D^T sum_k x_k          x_k: the k-th r features of x, the last ones filled up with zeros
        D [r, out] = 0 at the start, so a wrapped model computes exactly what the base did

It is a low-rank update whose A is known, identities side by side: nothing is multiplied by it or trained in
it, and of the input the backward pass needs nothing but the sum, r features. D is float32 whatever the
base's dtype. A cut by rows, after which a rank's shards may begin anywhere, is refused by name.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.errors import UsageError
from petune.methods.configs import MissConfig
from petune.methods.targets import select_layers
from petune.models.spec import CutKind, Family, TensorSplit
from petune.models.tuned_linear import KeptFeatures, TunedLinear
from petune.models.tuned_parts import LowRank

BLOCK = "miss_block"


class MissLinear(TunedLinear, nn.Linear):
    """nn.Linear with a shared shard. x [..., in] -> [..., out], dtype of the base layer's output."""

    base = nn.Linear
    additions: ClassVar[tuple[str, ...]] = (BLOCK, "dropout")
    miss_block: nn.Parameter
    dropout: float

    @classmethod
    def around(cls, layer: nn.Linear, config: MissConfig, saved: Tensor | None = None) -> Self:
        """The tuned form of `layer`, which shares its parameters and hooks; saved: its shard."""
        tuned, weight = cls.of(layer), layer.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        block = torch.zeros(config.r, layer.out_features) if saved is None else saved
        tuned.miss_block, tuned.dropout = nn.Parameter(block.to(weight.device, dtype)), config.dropout
        return tuned

    def tuned(self) -> dict[str, nn.Parameter]:
        """The shard."""
        return {BLOCK: self.miss_block}

    @torch.no_grad()
    def draw(self, name: str) -> None:
        """Zeros."""
        self.miss_block.zero_()

    def splits(self, cut: CutKind) -> dict[str, TensorSplit]:
        """By columns the shard follows the outputs. Raises UsageError by rows."""
        if cut == "row":
            remedy = "use dp, sp or pp, name other targets (q, k, v, gate, up), or use lora"
            what = "miss cannot cut a linear by its inputs: they are summed in shards from the first on"
            raise UsageError(what, remedy=remedy)
        return {"weight": 0, "bias": 0, BLOCK: 1}

    def kept_features(self) -> KeptFeatures:
        """The sum of the input's shards, r features."""
        return KeptFeatures(inner=len(self.miss_block))

    def low_rank(self) -> LowRank:
        """Weight, bias, the identities side by side and the shard."""
        base = LowRank(self.weight, self.bias, turned=True)
        if self.merged or not self.active:
            return base
        block = self.miss_block
        a = _identities(len(block), self.in_features, block.dtype, block.device)
        return base._replace(a=a, b=block, dropout=self.dropout)

    def delta(self) -> Tensor:
        """The shard beside itself, as wide as the weight, which merging adds to it."""
        shards = -(-self.in_features // len(self.miss_block))
        return self.miss_block.T.repeat(1, shards)[:, : self.in_features]

    def extra_repr(self) -> str:
        """The base layer's own words and the rank."""
        return f"{super().extra_repr()}, r={len(self.miss_block)}"

    def forward(self, x: Tensor) -> Tensor:
        """The base map plus the update."""
        y = F.linear(x, self.weight, self.bias)
        if self.merged or not self.active:
            return y
        r = len(self.miss_block)
        x = F.pad(x.to(self.miss_block.dtype), (0, -self.in_features % r))
        x = F.dropout(x, self.dropout, self.training)
        update: Tensor = x.unflatten(-1, (-1, r)).sum(-2) @ self.miss_block
        return (y + update).to(y.dtype)


@cache
def _identities(r: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[r, inputs]: identities side by side, the same object for all layers of a size."""
    with torch.inference_mode(False):
        return torch.eye(r, dtype=dtype, device=device).repeat(1, -(-inputs // r))[:, :inputs].contiguous()


def apply(model: nn.Module, family: Family | None, config: MissConfig, also_train: tuple[str, ...]) -> None:
    """Tune the targets. Raises UsageError for a target that is not nn.Linear, or has fewer inputs than r."""
    found = select_layers(model, family, config.targets, config.exclude, also_train)
    if not found:
        remedy = "take a name out of exclude, or name more targets"
        raise UsageError("miss has nothing to tune: targets less exclude is empty", remedy=remedy)
    for name, layer in found.items():
        if type(layer) is not nn.Linear:
            what = f"miss tunes torch.nn.Linear, not {type(layer).__name__}"
            raise UsageError(what, where=name, remedy="name other targets, or use lora")
        if layer.in_features < config.r:
            what = f"r {config.r} is more than the {layer.in_features} inputs of this linear"
            raise UsageError(what, where=name, remedy="choose a smaller r, or name it in `exclude`")
    for name, layer in found.items():
        assert isinstance(layer, nn.Linear)
        model.set_submodule(name, MissLinear.around(layer, config))
