"""Frozen weights as eight-bit floats (e4m3): about twice the rate of bf16 on Hopper, and not exact.

Each row of a matrix has a scale of its own. The forward product sums over the columns of W and the backward one over its rows, so W is
held twice, quantised along each; activations and gradients are quantised as they come. Products are summed in float32, low-rank updates
among them, and rounded to bf16. LoRA's own factors, norms, attention and the head stay as they are, and so do the weights in bf16: state,
`unfuse` and a merge promise them to the bit, and neither matrix of fp8 has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import ClassVar, Literal

import torch
from torch import Tensor

from petune.errors import UsageError
from petune.kernels.dispatch import Ops
from petune.kernels.reference import Low
from petune.models.tuned_linear import LowRank


class Eight:
    """A frozen weight [n, k] and its bias [n] or None, in the place of petune.kernels.block.linear.Dense."""

    rate: ClassVar[Literal["matmul_fp8"]] = "matmul_fp8"
    repacks: ClassVar[bool] = False
    recordable: ClassVar[bool] = False  # it is made again when the weight has changed

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops, parts: Sequence[LowRank]) -> None:
        self.weight, self.ops, self.bias = weight, ops, bias
        self.refresh(parts)

    @property
    def shape(self) -> tuple[int, int]:
        """See FrozenWeight."""
        return self.by_output.shape[0], self.by_output.shape[1]

    @property
    def nbytes(self) -> int:
        """See FrozenWeight: both matrices and their scales."""
        return sum(one.nbytes for one in (self.by_output, self.output_scale, self.by_input, self.input_scale))

    def dense(self) -> Tensor:
        """See FrozenWeight: as the forward product sees it; the backward one, quantised by inputs, sees another."""
        found: Tensor = (self.by_output.float() * self.output_scale).to(self.weight.dtype)
        return found

    def narrow(self, dim: int, start: int, length: int) -> Eight:
        """See FrozenWeight. Nothing is quantised again: a scale of rows is the whole row's."""
        found = copy(self)
        found.weight = self.weight.narrow(dim, start, length)
        found.by_output = self.by_output.narrow(dim, start, length).contiguous()
        found.by_input = self.by_input.narrow(1 - dim, start, length).contiguous()
        if dim == 0:
            found.output_scale = self.output_scale.narrow(0, start, length).contiguous()
            found.bias = None if self.bias is None else self.bias.narrow(0, start, length)
        else:
            found.input_scale, found.bias = self.input_scale.narrow(0, start, length).contiguous(), None
        return found

    def stale(self, parts: Sequence[LowRank]) -> bool:
        """See FrozenWeight."""
        return self.seen != _versions(parts)

    @torch.no_grad()
    def refresh(self, parts: Sequence[LowRank]) -> None:
        """See FrozenWeight: quantise the weight."""
        self.by_output, self.output_scale = self.ops.quantise(self.weight)
        self.by_input, self.input_scale = self.ops.quantise(self.weight.T.contiguous())
        self.seen = _versions(parts)

    def linear(self, x: Tensor) -> Tensor:
        """See petune.kernels.block.linear.FrozenWeight."""
        y = _product(self.ops.quantise(x), self.by_output, self.output_scale, x.dtype)
        return y if self.bias is None else y.add_(self.bias)

    def linear32(self, x: Tensor) -> Tensor:
        """See petune.kernels.block.linear.FrozenWeight."""
        y = _product(self.ops.quantise(x), self.by_output, self.output_scale, torch.float32)
        return y if self.bias is None else y.add_(self.bias)

    def inlet(self, m: int, rank: int) -> Tensor | None:
        """See petune.kernels.block.linear.FrozenWeight."""
        return None

    def linear_low(self, x: Tensor, low: Low, ops: Ops, inlet: Tensor | None) -> Tensor:
        """See petune.kernels.block.linear.FrozenWeight."""
        product = _product(self.ops.quantise(x), self.by_output, self.output_scale, torch.float32)
        y: Tensor = ops.add_low(None if self.bias is None else self.bias.expand_as(product), product, low)
        return y

    def dlinear(self, dy: Tensor) -> Tensor:
        """See petune.kernels.block.linear.FrozenWeight."""
        return _product(self.ops.quantise(dy), self.by_input, self.input_scale, dy.dtype)

    def dlinear_with(self, dy: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See petune.kernels.block.linear.FrozenWeight."""
        return self.dlinear(dy), dy @ b


def _versions(parts: Sequence[LowRank]) -> tuple[int, ...]:
    """How often each weight was written; writes through a view of it count."""
    return tuple(part.weight._version for part in parts)


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
