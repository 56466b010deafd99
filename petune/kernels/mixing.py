"""A level of a ladder begins where two states meet at a gate: one autograd node, which keeps both of them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.kernels.dispatch import Ops


def mixed(ops: Ops | None, state: Tensor, below: Tensor, gate: Tensor, temperature: float) -> Tensor:
    """g * state + (1 - g) * below with g = sigmoid(gate / temperature); state, below [batch, seq, width],
    gate [].

    ops: what makes it one operation; None, or states of two dtypes, for plain torch.
    """
    if ops is not None and state.dtype == below.dtype:
        return cast("Tensor", _Mix.apply(ops, temperature, state, below, gate))  # type: ignore[no-untyped-call]  # torch's
    g = torch.sigmoid(gate / temperature)
    return g * state + (1 - g) * below


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Ops, temperature: float, state: Tensor, below: Tensor, gate: Tensor) -> Tensor:
        ctx.ops, ctx.temperature = ops, temperature
        ctx.save_for_backward(state, below, gate)
        return cast("Tensor", ops.mix(state, below, gate, temperature))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        state, below, gate = ctx.saved_tensors
        dstate, dbelow, dgate = ctx.ops.mix_backward(dy, state, below, gate, ctx.temperature)
        return None, None, dstate, dbelow, dgate.to(gate.dtype)
