"""Products with frozen weights in eight-bit floats (petune.models.fp8) in fused blocks: about twice the rate
of bf16 on Hopper, and not exact.

The weights are the layers' own and there is no other copy. Low-rank updates meet the product in float32 and
are rounded with it once; LoRA's own factors, norms, attention and the head stay as they are.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from petune.kernels.dispatch import Ops
from petune.kernels.reference import Low
from petune.models.fp8 import Fp8


class PackedFp8:
    """A weight in eight bits and its bias [n] or None; see petune.kernels.block.linear.PackedWeight.
    Activations and gradients are quantised by `ops`."""

    rate: ClassVar[Literal["matmul_fp8"]] = "matmul_fp8"
    made: ClassVar[float] = 0

    def __init__(self, form: Fp8, bias: Tensor | None, ops: Ops) -> None:
        self.form, self.bias, self.ops = form, bias, ops

    def linear(self, x: Tensor) -> Tensor:
        """See PackedWeight."""
        y = self.form.multiply(self.ops.quantise(x), x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def linear32(self, x: Tensor) -> Tensor:
        """See PackedWeight."""
        y = self.form.multiply(self.ops.quantise(x), torch.promote_types(x.dtype, torch.float32))
        return y if self.bias is None else y.add_(self.bias)

    def inlet(self, m: int, rank: int) -> Tensor | None:
        """See PackedWeight."""
        return None

    def linear_low(self, x: Tensor, low: Low, ops: Ops, inlet: Tensor | None) -> Tensor:
        """See PackedWeight."""
        product = self.form.multiply(self.ops.quantise(x), torch.promote_types(x.dtype, torch.float32))
        y: Tensor = ops.add_low(None if self.bias is None else self.bias.expand_as(product), product, low)
        return y

    def dlinear(self, dy: Tensor) -> Tensor:
        """See PackedWeight."""
        columns = self.ops.transposed(self.form.rows)
        return self.form.multiply_back(self.ops.quantise(dy, self.form.factors), columns, dy.dtype)

    def dlinear_with(self, dy: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See PackedWeight."""
        return self.dlinear(dy), dy @ b
