"""DoRA (Liu et al. 2024, arXiv:2402.09353): LoRA turns the rows of a weight, and a trained vector gives them
their length.

        V = W + (alpha / r) B A;    y = (m / ||V||) * (V x) + b          m [out] = ||W|| at the start, norms
                                    of rows [in]

The norm is a constant to autograd, as in the paper's section 4.3, and the bias is not scaled. With dropout,
x' = dropout(x), as peft has it: y = W x + b + (m / ||V|| - 1) W x' + (m / ||V||) (alpha / r) B A x'. At the
start B A = 0 and m = ||V||, so a wrapped model computes exactly what the base did. A norm is of a whole row,
so a cut by rows, which leaves no rank a whole row, is refused by name. ||V|| is made of narrow products
(petune.models.row_lengths); no matrix as large as W is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.errors import UsageError
from petune.methods import lora
from petune.methods.configs import DoraConfig
from petune.models.row_lengths import lengths_of, squares_of
from petune.models.spec import CutKind, Family, TensorSplit
from petune.models.tuned_linear import KeptFeatures, parameter
from petune.models.tuned_parts import LowRank


class DoraLinear(lora.LoraLayer, nn.Linear):
    """nn.Linear with a DoRA update. x [..., in] -> [..., out], dtype of the base layer's output. It has no
    fused form with dropout, which is a second product with the weight."""

    base = nn.Linear
    additions = (*lora.LoraLayer.additions, "lora_magnitude_vector")
    of_rows = ("lora_magnitude_vector",)
    lora_magnitude_vector: nn.Parameter

    @classmethod
    def shapes(cls, layer: nn.Module, r: int) -> dict[str, tuple[int, ...]]:
        """Those of LoRA's factors and of the vector m [out]."""
        factors = super().shapes(layer, r)
        return factors | {"lora_magnitude_vector": factors["lora_B"][:1]}

    @torch.no_grad()
    def draw(self, name: str) -> None:
        """As LoRA's, and m: the norms of the rows as they are."""
        if name in self.of_rows:
            self.lora_magnitude_vector.copy_(squares_of(self.weight).sqrt())
        else:
            super().draw(name)

    def tuned(self) -> dict[str, nn.Parameter]:
        """The two factors and the vector of lengths."""
        return super().tuned() | {"lora_magnitude_vector": self.lora_magnitude_vector}

    def splits(self, cut: CutKind) -> dict[str, TensorSplit]:
        """By columns m follows the outputs. Raises UsageError by rows, where no rank sees the whole of a
        row."""
        if cut == "row":
            remedy = "use dp, sp or pp, name other targets (q, k, v, gate, up), or use lora"
            what = "dora cannot cut a linear by its inputs: it needs the norms of whole rows of the weight"
            raise UsageError(what, remedy=remedy)
        return super().splits(cut) | {"lora_magnitude_vector": 0}

    def kept_features(self) -> KeptFeatures:
        """The input, r features of it, and every output before it is scaled."""
        return KeptFeatures(input=True, inner=self.lora_A.shape[0] + self.out_features)

    def delta(self) -> Tensor:
        """(m / ||V||) V - W, which merging adds to the weight."""
        weight = self.weight.to(self.lora_A.dtype)
        return self._lengths()[:, None] * (weight + super().delta()) - weight

    def row_norms(self) -> Tensor:
        """||V|| [out], a constant to autograd, in the factors' dtype."""
        kind = "cpu" if self.weight.is_meta else self.weight.device.type  # of a model that is only planned
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            return lengths_of(self.weight, self.scale * self.lora_A, self.lora_B)

    @property
    def kind(self) -> str:
        return "DoraLinear with dropout" if self.dropout else "DoraLinear"

    def low_rank(self) -> LowRank | None:
        """Weight, bias, factors and lengths."""
        if self.dropout:
            return None
        base = LowRank(parameter(self, "weight"), parameter(self, "bias"), scaling="lengths")
        if self.passes_by():
            return base
        return base._replace(
            a=parameter(self, "lora_A"),
            b=parameter(self, "lora_B"),
            scale=self.scale,
            by=parameter(self, "lora_magnitude_vector"),
        )

    def _lengths(self) -> Tensor:
        """m / ||V|| [out]; a row of zeros, whose norm is 0, stays one."""
        norms = self.row_norms()
        return self.lora_magnitude_vector / norms.clamp_min(torch.finfo(norms.dtype).tiny)

    def forward(self, x: Tensor) -> Tensor:
        """The base map, plus what its turned and scaled rows add."""
        y = F.linear(x, self.weight, self.bias)
        if self.passes_by():
            return y
        dropped = F.dropout(x.to(self.lora_A.dtype), self.dropout, self.training)
        base = y if self.bias is None else y - self.bias
        if self.dropout and self.training:
            base = F.linear(dropped.to(x.dtype), self.weight)
        update = F.linear(F.linear(dropped, self.lora_A), self.lora_B) * self.scale
        return (y + update + (self._lengths() - 1) * (base + update)).to(y.dtype)


LAYERS: lora.Layers = {nn.Linear: DoraLinear}


def apply(model: nn.Module, family: Family | None, config: DoraConfig, also_train: tuple[str, ...]) -> None:
    """Replace every target by its DoRA form. Raises UsageError for a target that is not nn.Linear, and for
    init: pissa."""
    if config.init != "auto":
        remedy = "use method lora, or init: auto"
        raise UsageError("dora has no start from principal components", where="init", remedy=remedy)
    lora.apply(model, family, config, also_train, LAYERS)
