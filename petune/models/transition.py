"""A function and its adjoint as one operation that autograd knows: tensors in, a tensor out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable


def transition(x: Tensor, ahead: Callable[..., Tensor], back: Callable[..., Tensor], *where: Any) -> Tensor:
    """`ahead(x, *where)`, whose backward is `back(grad, *where)`."""
    return applied(_Transition, x, ahead, back, *where)


def applied(function: type[Function], *args: Any) -> Tensor:
    """`function.apply(*args)`, for a function of one output."""
    found: Tensor = function.apply(*args)
    return found


class _Transition(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ahead: Callable[..., Tensor], back: Callable[..., Tensor], *where: Any
    ) -> Tensor:
        ctx.back, ctx.where = back, where
        return ahead(x, *where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, *ctx.where), None, None, *[None] * len(ctx.where)
