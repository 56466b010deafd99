"""Eight-bit integers with a scale for each row: a frozen weight that is held in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from petune.models.form import ScaledRows

LARGEST = 127


class Int8(ScaledRows):
    """A frozen weight [n, k] in eight-bit integers, scale * q, a row's largest magnitude as 127; see
    petune.models.form.Form.

    q: int8 [n, k]; scale: float32 [n, 1]; dtype: of the weight that it stands for.
    """

    name: ClassVar[str] = "int8"
    needs: ClassVar[str] = "any weight"

    @classmethod
    def refused(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Nothing is."""

    @classmethod
    def quantised(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(q, scale), rounded to nearest."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        scale = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-12).float()
        return (wide / scale).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale
