"""LoRA beside a frozen linear as one node of autograd, for layers that nothing has fused.

        y = x W^T + b + s (x A^T) B^T

Written out in operations, the update is made and added in matrices of their own, [rows, out] forward and
[rows, in] backward, each written to memory and read again: on a CPU a fifth of the layer's time. Here each is
added by the product that makes it. The sum is in the factors' dtype and rounded once; what is kept for the
backward pass is the input as it came and x A^T, [rows, r].

On a CPU, beside a bf16 base, products are of bf16, whose sums torch makes in float32: casts of x, y and their
gradients to the factors' float32 would cost more than the products. Factors and what r numbers a row become
are rounded to bf16 there, and so is a gradient of theirs, once, after its sum over all rows, as in autocast.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.models.frozen_weight import QuantisedWeight

_ONEDNN = torch.backends.mkldnn.is_available()
# numbers of a weight from which on oneDNN pays: each new number of rows costs it half a millisecond or more
_LARGE = 1 << 20


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor) -> bool:
    """Whether the node computes what the operations would: on plain tensors of matching dtypes, beside a base
    that does not train, where nobody else looks on (autocast, torch.compile, transforms of torch.func)."""
    return (
        x.dtype == weight.dtype
        and x.dim() > 1
        and not (weight.requires_grad or (bias is not None and bias.requires_grad))
        and not isinstance(weight, QuantisedWeight)
        and x.device == a.device
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """x [..., in] -> [..., out], in the dtype of x, for what `fits`."""
    if torch.is_grad_enabled() and (x.requires_grad or a.requires_grad or b.requires_grad):
        return cast("Tensor", _Node.apply(x, weight, bias, a, b, scale))  # type: ignore[no-untyped-call]  # torch's
    y = F.linear(x, weight, bias)
    if x.dtype == a.dtype and len(x) == x.dim() - 1 == 1:  # one token, where each call of torch's counts
        return y.addmm_(F.linear(x, a), b.t(), alpha=scale)
    return _add(y.flatten(0, -2), _low(x.flatten(0, -2), a), b.t(), scale).view(y.shape)


# Matrices of r rows lie with their long side in memory, [r, rows]: products that end in [rows, r], or read it
# so, take up to ten times as long.


def _low(rows: Tensor, a: Tensor) -> Tensor:
    """A x^T, [r, rows]."""
    dtype = _dtype(rows, a)
    return torch.mm(a.to(dtype), rows.to(dtype).t())


def _add(y: Tensor, low: Tensor, factor: Tensor, scale: float = 1.0) -> Tensor:
    """y + scale low^T factor for factor [r, ...], in the dtype of y, which may be changed."""
    return y.to(low.dtype).addmm_(low.t(), factor.to(low.dtype), alpha=scale).to(y.dtype)


def _whole(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W, [rows, out] by [out, in]: of float32 on a CPU by oneDNN, with which torch makes those of bf16 and
    which is up to a fifth faster than its own library there, but for few rows and small weights."""
    large = len(dy) >= 64 and weight.numel() >= _LARGE and _ONEDNN
    if not (large and dy.dtype == torch.float32 and dy.device.type == "cpu"):
        return torch.mm(dy, weight)
    product = torch.ops.mkldnn._linear_pointwise
    return cast("Tensor", product(dy, weight.t(), None, "none", [], ""))


def _dtype(rows: Tensor, factor: Tensor) -> torch.dtype:
    """What products of rows and factors are made in."""
    narrow = rows.dtype == torch.bfloat16 and rows.device.type == "cpu"
    return rows.dtype if narrow else factor.dtype


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        rows = x.flatten(0, -2)
        low = _low(rows, a)
        ctx.scale = scale
        ctx.save_for_backward(x, weight, a, b, low)
        y = _add(F.linear(rows, weight, bias), low, b.t(), scale)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        needs, rows = ctx.needs_input_grad, dy.flatten(0, -2)
        wide = rows.to(low.dtype)
        factor = b.to(low.dtype).t().contiguous()
        dlow = torch.addmm(low, factor, wide.t(), beta=0, alpha=ctx.scale)  # [r, rows]
        dx = da = db = None
        if needs[4]:  # before the product with the weight, while the cache holds the gradient
            db = torch.mm(low, wide).to(b.dtype).mul_(ctx.scale).t().contiguous()
        if needs[0]:
            dx = _add(_whole(rows, weight), dlow, a).view(x.shape)
        if needs[3]:
            da = torch.mm(dlow, x.flatten(0, -2).to(low.dtype)).to(a.dtype)
        return dx, None, None, da, db, None
