"""Frozen weights as eight-bit floats (e4m3): about twice the rate of bf16 on Hopper, and not exact.

Each row of a matrix has a scale of its own. The forward product sums over the columns of W and the backward one over its rows, so W is
held twice, quantised along each; activations and gradients are quantised as they come. Products are summed in float32, low-rank updates
among them, and rounded to bf16. LoRA's own factors, norms, attention, the head and the weights that a merge reads stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from petune.errors import UsageError
from petune.kernels.dispatch import Ops
from petune.kernels.reference import Low


class Eight:
    """A frozen weight [n, k] and its bias [n] or None, in the place of petune.kernels.block.linear.Dense."""

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops, versions: tuple[int, ...]) -> None:
        self.weight, self.ops, self.bias = weight, ops, bias
        self.seen: tuple[int, ...] | None = None
        self.refresh(versions)

    @torch.no_grad()
    def refresh(self, versions: tuple[int, ...]) -> None:
        """Quantise the weight again if it was written since: `versions` are those of the parameters that lie in it."""
        if self.seen != versions:
            self.by_output, self.output_scale = self.ops.quantise(self.weight)
            self.by_input, self.input_scale = self.ops.quantise(self.weight.T.contiguous())
            self.seen = versions

    def linear(self, x: Tensor) -> Tensor:
        """See petune.kernels.block.linear.Base."""
        y = _product(self.ops.quantise(x), self.by_output, self.output_scale, x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def inlet(self, m: int, rank: int) -> Tensor | None:
        """See petune.kernels.block.linear.Base."""
        return None

    def linear_low(self, x: Tensor, low: Low, ops: Ops, inlet: Tensor | None) -> Tensor:
        """See petune.kernels.block.linear.Base."""
        product = _product(self.ops.quantise(x), self.by_output, self.output_scale, torch.float32)
        y: Tensor = ops.add_low(None if self.bias is None else self.bias.expand_as(product), product, low)
        return y

    def dlinear(self, dy: Tensor) -> Tensor:
        """See petune.kernels.block.linear.Base."""
        return _product(self.ops.quantise(dy), self.by_input, self.input_scale, dy.dtype)

    def dlinear_with(self, dy: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See petune.kernels.block.linear.Base."""
        return self.dlinear(dy), dy @ b


def _product(left: tuple[Tensor, Tensor], y: Tensor, y_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x y^T of two quantised matrices with a scale per row, [m, n]; `left` is x and its scale."""
    x, x_scale = left
    if x.device.type == "cuda":
        return torch._scaled_mm(x, y.T, scale_a=x_scale, scale_b=y_scale.T, out_dtype=dtype, use_fast_accum=True)
    return ((x.float() * x_scale) @ (y.float() * y_scale).T).to(dtype)


def refuse_eight(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Raise UsageError where fp8 products cannot be had: they need compute capability 8.9, bf16 models and sizes divisible by 16."""
    found = None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        found = f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"
    elif device.type == "cuda" and dtype != torch.bfloat16:
        found = str(dtype).removeprefix("torch.")
    elif any(size % 16 for size in sizes):
        found = f"a weight of {sizes[0]} x {sizes[1]}"
    if found is not None:
        expected = "a CUDA device of compute capability 8.9, bf16 weights, sizes divisible by 16"
        raise UsageError("base_dtype: fp8 cannot be had here", where="base_dtype", expected=expected, found=found, remedy="leave it out")
