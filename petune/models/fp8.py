"""Eight-bit floats (float8_e4m3fn): quantisation by rows, and a frozen weight that is held in them.

A weight [n, k] has one float32 scale for each of its rows, its outputs, and W = scale * q is what both
products see. The forward product sums along a row, so the scale multiplies its result. The backward product
sums over rows: there the scale goes into the gradient before that is quantised, dy W = (dy * scale) q. One
matrix of bytes therefore serves both. Activations and gradients are quantised as they come, a scale a row;
products are summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from petune.models.form import ScaledRows

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


@lru_cache
def values(device: torch.device) -> Tensor:
    """The number that each byte stands for, float32 [256]."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def transposed(*parts: Tensor) -> Tensor:
    """float8_e4m3fn [n, k] each, one below the other, as [k, sum of n] in memory of its own; their rows are
    dense."""
    turned = [q.view(torch.uint8).T for q in parts]
    whole = turned[0].contiguous() if len(turned) == 1 else torch.cat(turned, 1)
    return whole.view(torch.float8_e4m3fn)


def product(
    left: tuple[Tensor, Tensor], y: Tensor, y_scale: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """x y^T of quantised matrices [m, k] and [n, k] with a scale a row, summed in float32 and rounded to
    `dtype`; `left` is x and its scale. out: where it is written, columns of a wider matrix, say."""
    x, x_scale = left
    if x.device.type == "cuda":
        given: dict[str, Any] = {} if out is None else {"out": out}
        return torch._scaled_mm(
            x, y.T, scale_a=x_scale, scale_b=y_scale.T, out_dtype=dtype, use_fast_accum=True, **given
        )
    wide = torch.promote_types(dtype, torch.float32)
    found = ((x.to(wide) * x_scale) @ (y.to(wide) * y_scale).T).to(dtype)
    return found if out is None else out.copy_(found)


def product_of_turned(dy: tuple[Tensor, Tensor], columns: Tensor, dtype: torch.dtype) -> Tensor:
    """dy W of a quantised dy * factors [m, n]. columns: W `transposed`, as products in eight bits sum along
    rows."""
    return product(dy, columns, torch.ones_like(columns[:, :1], dtype=torch.float32), dtype)


class Fp8(ScaledRows):
    """A frozen weight [n, k] in eight-bit floats, with products of its own; see petune.models.form.Form.

    q: float8_e4m3fn [n, k]; scale: float32 [n, 1]; dtype: of the weight that it stands for.
    """

    name: ClassVar[str] = "fp8"
    needs: ClassVar[str] = "a CUDA device of compute capability 8.9, bf16 weights, sizes divisible by 16"

    @classmethod
    def refused(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        """What is missing: devices multiply matrices of whole lines alone."""
        if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < (8, 9):
            return f"compute capability {'.'.join(map(str, has))}"
        if device.type == "cuda" and dtype != torch.bfloat16:
            return str(dtype).removeprefix("torch.")
        return f"a weight of {shape[0]} x {shape[1]}" if any(size % 16 for size in shape) else None

    @classmethod
    def quantised(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(q, scale), see `quantise`."""
        return quantise(weight)

    def linear(self, x: Tensor) -> Tensor:
        return self.multiply(quantise(x), x.dtype)

    def dlinear(self, dy: Tensor) -> Tensor:
        return product_of_turned(quantise(dy, self.factors), transposed(self.rows), dy.dtype)

    @property
    def rows(self) -> Tensor:
        """float8_e4m3fn [n, k] whose rows are dense: `q` itself, but for a view that is not."""
        return self.q if self.q.stride(1) == 1 else self.q.contiguous()

    @property
    def factors(self) -> Tensor:
        """What the columns of a gradient [m, n] are multiplied with before it is quantised for
        `product_of_turned`, [n]."""
        return self.scale[:, 0]

    def multiply(self, x: tuple[Tensor, Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """x W^T of a quantised x [m, k], in `out` where that is given."""
        return product(x, self.rows, self.scale, dtype, out)
