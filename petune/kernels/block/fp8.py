"""Products with frozen weights in eight-bit floats (petune.models.fp8) in fused blocks: about twice the rate
of bf16 on Hopper, and not exact.

The weights are the layers' own and there is no other copy. Low-rank updates meet the product in float32 and
are rounded with it once; LoRA's own factors, norms, attention and the head stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petune.kernels.block.dense import PackedWeight
from petune.kernels.dispatch import Ops
from petune.kernels.reference import LowFactors
from petune.models.fp8 import Fp8, product_of_turned


class PackedFp8(PackedWeight):
    """Weights in eight bits, one below the other, and their bias [n] or None. Activations and gradients are
    quantised by `ops`, once for all of them."""

    rate = "matmul_fp8"

    def __init__(self, forms: Sequence[Fp8], bias: Tensor | None, ops: Ops) -> None:
        self.forms, self.bias, self.ops = forms, bias, ops

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x W^T, summed in float32 and rounded to `dtype`, [m, n]."""
        quantised, rows = self.ops.quantise(x), [len(form.rows) for form in self.forms]
        if len(rows) == 1:
            return self.forms[0].multiply(quantised, dtype)
        whole = x.new_empty(len(x), sum(rows), dtype=dtype)
        for form, out in zip(self.forms, whole.split(rows, 1), strict=True):
            form.multiply(quantised, dtype, out)
        return whole

    def linear(self, x: Tensor) -> Tensor:
        y = self._product(x, x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def linear32(self, x: Tensor) -> Tensor:
        y = self._product(x, torch.promote_types(x.dtype, torch.float32))
        return y if self.bias is None else y.add_(self.bias)

    def linear_low(self, x: Tensor, low: LowFactors, ops: Ops, inlet: Tensor | None) -> Tensor:
        product = self._product(x, torch.promote_types(x.dtype, torch.float32))
        y: Tensor = ops.add_low(None if self.bias is None else self.bias.expand_as(product), product, low)
        return y

    def dlinear(self, dy: Tensor) -> Tensor:
        columns = self.ops.transposed(*(form.rows for form in self.forms))
        factors = [form.factors for form in self.forms]
        quantised = self.ops.quantise(dy, factors[0] if len(factors) == 1 else torch.cat(factors))
        return product_of_turned(quantised, columns, dy.dtype)
