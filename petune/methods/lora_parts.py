"""LoRA by parts, beside a linear that is several (q, k and v, or gate and up, in one weight of a checkpoint):
as MergedLinear of loralib (Hu et al. 2021, arXiv:2106.09685), each tuned part has factors of its own.

        y_p = W_p x + b_p + s_p B_p A_p dropout(x)      A_p [r_p, in] ~ U(-1/sqrt(in), 1/sqrt(in)),
                                                        B_p [outputs of p, r_p] = 0

It computes what LoRA would beside a linear for each part, and each draws dropout for itself. In files it is
plain LoRA of rank sum r_p beside the whole, A one below the other, B block-diagonal, so that readers who know
nothing of parts compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from petune.errors import FileError
from petune.methods.configs import LoraConfig
from petune.methods.lora_factors import NamedFactors
from petune.models.joined import JoinedLinear
from petune.models.spec import CutKind, Member, TensorSplit
from petune.models.tuned_linear import KeptFeatures, TunedLinear, parameter, tuned_layers
from petune.models.tuned_parts import LowRank


def shapes(joined: JoinedLinear, role: str, r: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that trains beside a part, by its name in the layer."""
    inputs = cast("Tensor", joined.module.weight).shape[0 if isinstance(joined.module, Conv1D) else 1]
    return {f"{role}_lora_A": (r, inputs), f"{role}_lora_B": (joined.lengths[role], r)}


class LoraParts(NamedFactors, TunedLinear):
    """What the forms of both classes of linears share. lengths: outputs of every part, in order; names of
    its factors are those of tuned parts, in that order."""

    lengths: dict[str, int]
    dropout: float

    @classmethod
    def around(
        cls,
        joined: JoinedLinear,
        configs: Mapping[str, LoraConfig],
        dtype: torch.dtype,
        saved: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """The tuned form of a linear, sharing its parameters; `configs` by part, the rest as
        `LoraLayer.around`. dtype: of the factors."""
        tuned = cls.of(joined.module)
        tuned.lengths = dict(joined.lengths)
        tuned.scales = {role: configs[role].scale for role in joined.lengths if role in configs}
        first = next(iter(configs.values()))
        tuned.dropout, tuned.lr_ratio = first.dropout, first.lr_ratio
        for role in tuned.scales:
            tuned.give(shapes(joined, role, configs[role].r), saved, dtype, tuned.weight.device)
        return tuned

    @property
    def additions(self) -> tuple[str, ...]:  # type: ignore[override]  # they follow from the parts
        return ("lengths", "scales", "dropout", "lr_ratio", *self.tuned())

    @property
    def kind(self) -> str:
        return f"{self.base.__name__} with LoRA by parts"

    @property
    def rank(self) -> int:
        """Of the plain LoRA that it is in files."""
        return sum(len(self.factors(role)[0]) for role in self.scales)

    @property
    def scale(self) -> float:
        """Of that."""
        return next(iter(self.scales.values()))

    def splits(self, cut: CutKind) -> dict[str, TensorSplit]:
        """By columns each B follows the outputs of its part, and A is whole. No linear that is several is cut
        by rows."""
        assert cut == "column", "it is the way into a region"
        found: dict[str, TensorSplit] = {"weight": 0, "bias": 0}
        for number, role in enumerate(self.lengths):
            if role in self.scales:
                found |= {f"{role}_lora_A": None, f"{role}_lora_B": Member(0, number)}
        return found

    def cut_to(self, outputs: Sequence[int]) -> None:
        self.lengths = dict(zip(self.lengths, outputs, strict=True))

    def kept_features(self) -> KeptFeatures:
        """The input, one for every A but with dropout, which each draws for itself, and what they make of
        it."""
        factors = [self.factors(role)[0] for role in self.scales]
        others = sum(a.shape[1] for a in factors[1:]) if self.dropout else 0
        return KeptFeatures(input=True, inner=self.rank + others)

    def delta(self) -> Tensor:
        """The update of `weight`, rows of one part below those of another; zero where nothing is tuned."""
        rows = []
        for role, length in self.lengths.items():
            if role in self.scales:
                a, b = self.factors(role)
                rows.append(self.scales[role] * (b @ a))
            else:
                like = self.factors(next(iter(self.scales)))[0]
                rows.append(like.new_zeros(length, like.shape[1]))
        return torch.cat(rows)

    def passes_by(self) -> bool:
        """Whether the base layer's own forward, with the weight as it is, is all there is to compute."""
        return self.merged or not self.active

    def forward(self, x: Tensor) -> Tensor:
        """The base map plus what the parts add, x [..., in] -> [..., out], in the base layer's dtype."""
        y = cast("Tensor", super().forward(x))
        if self.passes_by():
            return y
        pieces, read = [], self._read(x)
        for (role, _), own in zip(self.lengths.items(), y.split([*self.lengths.values()], -1), strict=True):
            if role in self.scales:
                a, b = self.factors(role)
                low = F.linear(F.dropout(read, self.dropout, self.training), a)
                own = (own + F.linear(low, b) * self.scales[role]).to(y.dtype)
            pieces.append(own)
        return torch.cat(pieces, -1)

    def _read(self, x: Tensor) -> Tensor:
        """x in the dtype that the products with each A are made in, so that one copy is kept for all; where
        something drops out of it first, in the factors'."""
        kind, drops = x.device.type, self.training and self.dropout > 0
        rounds = torch.is_autocast_enabled(kind) and x.dtype != torch.float64 and not drops
        dtype = self.factors(next(iter(self.scales)))[0].dtype
        return x.to(torch.get_autocast_dtype(kind) if rounds else dtype)

    def extra_repr(self) -> str:
        """The base layer's own words and the parts with their ranks."""
        ranks = (f"{role} r={len(self.factors(role)[0])}" for role in self.scales)
        return f"{super().extra_repr()}, {', '.join(ranks)}"


class LoraPartsLinear(LoraParts, nn.Linear):
    """nn.Linear with LoRA by parts. x [..., in] -> [..., out], dtype of the base layer's output."""

    base = nn.Linear

    def low_rank(self) -> LowRank:
        """Weight and bias, of which each part has its rows, and the factors of those that are tuned."""
        whole, passed = LowRank(parameter(self, "weight"), parameter(self, "bias")), self.passes_by()
        parts: list[LowRank] = []
        for role, rows in self.lengths.items():
            part = whole._replace(rows=rows, leads=not parts)
            if role in self.scales and not passed:
                a, b = parameter(self, f"{role}_lora_A"), parameter(self, f"{role}_lora_B")
                part = part._replace(a=a, b=b, scale=self.scales[role], dropout=self.dropout)
            parts.append(part)
        return whole._replace(parts=tuple(parts))


class LoraPartsConv1D(LoraParts, Conv1D):  # type: ignore[misc]  # as LoraConv1D
    """transformers' Conv1D, whose weight is stored [in, out], with LoRA by parts."""

    base = Conv1D

    def delta(self) -> Tensor:
        """The update in Conv1D's transposed layout, [in, out]."""
        return super().delta().T

    __repr__ = nn.Module.__repr__  # as LoraConv1D


FORMS: Mapping[type[nn.Module], type[LoraParts]] = {nn.Linear: LoraPartsLinear, Conv1D: LoraPartsConv1D}


# ---------------------------------------------------------------- in files


def in_one_form(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tuned `state` of a model with plain LoRA in the place of parts: `lora_A` [sum of ranks, in] and
    `lora_B` [out, sum of ranks], block-diagonal. Where scales differ, the difference is in B."""
    found = dict(state)
    for name, layer in tuned_layers(model):
        if not isinstance(layer, LoraParts):
            continue
        pairs = {
            role: (found.pop(f"{name}.{role}_lora_A"), found.pop(f"{name}.{role}_lora_B"))
            for role in layer.scales
        }
        found[f"{name}.lora_A"] = torch.cat([a for a, _ in pairs.values()])
        like, at, first = found[f"{name}.lora_A"], 0, 0
        whole = like.new_zeros(sum(layer.lengths.values()), len(like))
        for role, length in layer.lengths.items():
            if role in pairs:
                b, ratio = pairs[role][1], layer.scales[role] / layer.scale
                whole[first : first + length, at : at + b.shape[1]] = b if ratio == 1 else b * ratio
                at += b.shape[1]
            first += length
        found[f"{name}.lora_B"] = whole
    return found


def from_one_form(
    factors: tuple[Tensor, Tensor],
    scale: float,
    joined: JoinedLinear,
    configs: Mapping[str, LoraConfig],
    where: str,
) -> dict[str, Tensor]:
    """The way back, {name in the layer: tensor}, of A [sum of ranks, in] and B [out, sum of ranks] of that
    scale.

    configs: by part. where: of the file, for what is said. Raises FileError for factors that are not those of
    such parts.
    """
    a, b = factors
    ranks = {role: configs[role].r for role in joined.lengths if role in configs}
    found: dict[str, Tensor] = {}
    rest, at, first = b.clone(), 0, 0
    for role, length in joined.lengths.items():
        if role in ranks and at + ranks[role] <= len(a):
            own, ratio = slice(at, at + ranks[role]), scale / configs[role].scale
            block = rest[first : first + length, own]
            found[f"{role}_lora_A"] = a[own].clone()
            found[f"{role}_lora_B"] = block.clone() if ratio == 1 else block * ratio
            block.zero_()
            at += ranks[role]
        first += length
    if at != len(a) or len(found) != 2 * len(ranks) or bool(rest.any()):
        what = "these factors are not those of the parts that petune.json names"
        expected = ", ".join(f"{role} r={rank}" for role, rank in ranks.items()) + ", B block-diagonal"
        remedy = "use another copy; without petune.json it is read as one LoRA of the whole linear"
        raise FileError(what, where=where, expected=expected, found=f"r={len(a)}", remedy=remedy)
    return found
