"""Eight-bit floats (float8_e4m3fn): quantisation by rows, and a frozen weight that is held in them.

A weight [n, k] has one float32 scale for each of its rows, its outputs, and W = scale * q is what both
products see. The forward product sums along a row, so the scale multiplies its result. The backward product
sums over rows: there the scale goes into the gradient before that is quantised, dy W = (dy * scale) q. One
matrix of bytes therefore serves both. Activations and gradients are quantised as they come, a scale a row;
products are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

LARGEST = 448  # of float8_e4m3fn


def quantise(x: Tensor, by: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(q, scale): x [m, n] as float8_e4m3fn with one float32 scale a row [m, 1], so that x ~ q * scale and a
    row's largest is 448.

    by: float32 [n], which columns are multiplied with first.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide if by is None else wide * by
    scale = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-12).float()
    return (wide / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def transposed(q: Tensor) -> Tensor:
    """float8_e4m3fn [n, k] as [k, n] in memory of its own; rows of `q` are dense."""
    return q.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)


def product(left: tuple[Tensor, Tensor], y: Tensor, y_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x y^T of quantised matrices [m, k] and [n, k] with a scale a row, summed in float32 and rounded to
    `dtype`; `left` is x and its scale."""
    x, x_scale = left
    if x.device.type == "cuda":
        return torch._scaled_mm(
            x, y.T, scale_a=x_scale, scale_b=y_scale.T, out_dtype=dtype, use_fast_accum=True
        )
    wide = torch.promote_types(dtype, torch.float32)
    return ((x.to(wide) * x_scale) @ (y.to(wide) * y_scale).T).to(dtype)


@dataclass(frozen=True)
class Fp8:
    """A frozen weight [n, k] in eight-bit floats; see petune.models.frozen_weight.FrozenWeight.

    q: float8_e4m3fn [n, k]; scale: float32 [n, 1]; dtype: of the weight that it stands for.
    """

    q: Tensor
    scale: Tensor
    dtype: torch.dtype
    name: ClassVar[str] = "fp8"

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Fp8:
        """`weight` [n, k] quantised."""
        return cls(*quantise(weight.detach()), weight.dtype)

    @classmethod
    def together(cls, forms: Sequence[Fp8]) -> Fp8:
        """The rows of several weights of one dtype, one below the other, in memory of their own."""
        q = torch.cat([form.q.view(torch.uint8) for form in forms]).view(torch.float8_e4m3fn)
        return cls(q, torch.cat([form.scale for form in forms]), forms[0].dtype)

    def __reduce__(self) -> Any:
        """As plain bytes: torch cannot unpickle eight-bit floats."""
        return _of_bytes, (self.q.view(torch.uint8), self.scale, self.dtype)

    @property
    def shape(self) -> torch.Size:
        """(n, k)."""
        return self.q.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it is held in."""
        return self.q, self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(value.nbytes for value in self.tensors)

    def each(self, act: Callable[[Tensor], Tensor]) -> Fp8:
        """The same made of act(tensor) for each of its tensors: a copy, or a move to another device."""
        return replace(self, q=act(self.q), scale=act(self.scale))

    def to(self, dtype: torch.dtype) -> Fp8:
        """The same eight-bit floats, standing for a weight of another dtype."""
        return replace(self, dtype=dtype)

    def dense(self) -> Tensor:
        """The weight [n, k] that its products see, rounded to its dtype."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return (self.q.to(wide) * self.scale).to(self.dtype)

    def narrow(self, dim: int, start: int, length: int) -> Fp8:
        """Its outputs (dim 0) or inputs (dim 1) from `start` on, `length` of them: views, with the scales of
        whole rows."""
        q = self.q.narrow(dim, start, length)
        return replace(self, q=q, scale=self.scale if dim else self.scale.narrow(0, start, length))

    @torch.no_grad()
    def write(self, weight: Tensor) -> None:
        """Quantise another weight [n, k] into the memory of this one."""
        for own, new in zip(self.tensors, quantise(weight.detach()), strict=True):
            own.copy_(new)

    def linear(self, x: Tensor) -> Tensor:
        """x W^T, [m, k] -> [m, n]."""
        return self.multiply(quantise(x), x.dtype)

    def dlinear(self, dy: Tensor) -> Tensor:
        """dy W, [m, n] -> [m, k]."""
        return self.multiply_back(quantise(dy, self.factors), transposed(self.rows), dy.dtype)

    @property
    def rows(self) -> Tensor:
        """float8_e4m3fn [n, k] whose rows are dense: `q` itself, but for a view that is not."""
        return self.q if self.q.stride(1) == 1 else self.q.contiguous()

    @property
    def factors(self) -> Tensor:
        """What the columns of a gradient [m, n] are multiplied with before it is quantised for
        `multiply_back`, [n]."""
        return self.scale[:, 0]

    def multiply(self, x: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """x W^T of a quantised x [m, k]."""
        return product(x, self.rows, self.scale, dtype)

    def multiply_back(self, dy: tuple[Tensor, Tensor], columns: Tensor, dtype: torch.dtype) -> Tensor:
        """dy W of a quantised dy * factors [m, n]. columns: the transposed `rows`, as products in eight bits
        sum along rows."""
        return product(dy, columns, torch.ones_like(columns[:, :1], dtype=torch.float32), dtype)


def _of_bytes(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8:
    return Fp8(q.view(torch.float8_e4m3fn), scale, dtype)
