"""LoRA factors of several names in one module: of the weights of experts, or of the parts of one linear."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from petune.models.tuned_linear import TunedLayer


class NamedFactors(TunedLayer):
    """Factors `<name>_lora_A` [..., r, in] and `<name>_lora_B` [..., out, r] for each name. scales: of the
    update, by name; lr_ratio: see LoraConfig."""

    scales: dict[str, float]
    lr_ratio: float | None

    def give(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        saved: Mapping[str, Tensor] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make factors of these shapes, by their names here: as `saved`, else drawn."""
        for name, shape in shapes.items():
            value = torch.empty(shape, dtype=dtype, device=device) if saved is None else saved[name]
            setattr(self, name, nn.Parameter(value.to(device, dtype)))
            if saved is None:
                self.draw(name)

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B of a name."""
        return getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")

    def tuned(self) -> dict[str, nn.Parameter]:
        """The factors of each name."""
        names = (f"{name}_lora_{side}" for name in self.scales for side in "AB")
        return {name: self.get_parameter(name) for name in names}

    @torch.no_grad()
    def draw(self, name: str) -> None:
        """Fill a factor anew, as that of a linear of its own; their product is zero."""
        factor = self.get_parameter(name)
        if name.endswith("A"):
            bound = 1 / math.sqrt(factor.shape[-1])
            factor.uniform_(-bound, bound)
        else:
            factor.zero_()

    def rates(self) -> dict[str, float]:
        """Those of the factors B, where they have one, as LoraLayer's."""
        return {} if self.lr_ratio is None else {f"{name}_lora_B": self.lr_ratio for name in self.scales}
