"""LoRA beside a frozen linear as one node of autograd, for layers that nothing has fused.

        y = x W^T + b + s (x A^T) B^T

Written out in operations, the update is made and added in matrices of their own, [rows, out] forward and
[rows, in] backward, each written to memory and read again: on a CPU a fifth of the layer's time. Here each is
added by the product that makes it. The sum is in the factors' dtype and rounded once; what is kept for the
backward pass is the input as it came and x A^T, [rows, r].
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.models.frozen_weight import QuantisedWeight


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
        return cast("Tensor", _Node.apply(x, weight, bias, a, b, scale))  # type: ignore[no-untyped-call]
    y = F.linear(x, weight, bias)
    if x.dtype == a.dtype and len(x) == x.dim() - 1 == 1:  # one token, where each call of torch's counts
        return y.addmm_(F.linear(x, a), b.t(), alpha=scale)
    return _add(y.flatten(0, -2), _low(x.flatten(0, -2), a), b, scale).view(y.shape)


# Matrices of r rows lie with their long side in memory, [r, rows]: products that end in [rows, r], or read it
# so, take up to ten times as long.


def _low(rows: Tensor, a: Tensor) -> Tensor:
    """A x^T, [r, rows]."""
    return torch.mm(a, rows.to(a.dtype).t())


def _add(y: Tensor, low: Tensor, b: Tensor, scale: float) -> Tensor:
    """y + scale low^T B^T, summed in B's dtype and rounded to that of y, which may be changed."""
    return y.to(b.dtype).addmm_(low.t(), b.t(), alpha=scale).to(y.dtype)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        rows = x.flatten(0, -2)
        low = _low(rows, a)
        ctx.scale = scale
        ctx.save_for_backward(x, weight, a, b, low)
        y = _add(F.linear(rows, weight, bias), low, b, scale)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        needs, rows = ctx.needs_input_grad, dy.flatten(0, -2)
        wide = rows.to(b.dtype)
        dlow = torch.mm(b.t().contiguous(), wide.t()).mul_(ctx.scale)  # [r, rows]
        dx = da = db = None
        if needs[0]:
            dx = torch.mm(rows, weight)
            dx = dx.to(a.dtype).addmm_(dlow.t(), a).to(x.dtype).view(x.shape)
        if needs[3]:
            da = torch.mm(dlow, x.flatten(0, -2).to(a.dtype))
        if needs[4]:
            db = torch.mm(low, wide).mul_(ctx.scale).t().contiguous()
        return dx, None, None, da, db, None
