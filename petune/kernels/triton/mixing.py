"""The gate of a ladder's level: two states mixed by the sigmoid of one number, forward and back.

Both passes read and write every element once. The gradient of the gate is a sum over all elements: each
program leaves its part in float32, and torch adds the parts up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a program
WARPS = 4


def mix(state: Tensor, below: Tensor, gate: Tensor, temperature: float) -> Tensor:
    """`petune.kernels.reference.mix`."""
    state, below = state.contiguous(), below.contiguous()
    y, size = torch.empty_like(below), below.numel()
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        _mix_kernel[grid](state, below, gate, y, size, 1 / temperature, BLOCK=BLOCK, num_warps=WARPS)
    return y


def mix_backward(
    dy: Tensor, state: Tensor, below: Tensor, gate: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`petune.kernels.reference.mix_backward`."""
    dy, state, below = dy.contiguous(), state.contiguous(), below.contiguous()
    dstate, dbelow, size = torch.empty_like(dy), torch.empty_like(dy), dy.numel()
    if not size:
        return dstate, dbelow, gate.new_zeros((), dtype=torch.float32)
    grid = (triton.cdiv(size, BLOCK),)
    parts = torch.empty(grid, dtype=torch.float32, device=dy.device)
    _mix_backward_kernel[grid](
        *(dy, state, below, gate, dstate, dbelow, parts, size, 1 / temperature), BLOCK=BLOCK, num_warps=WARPS
    )
    return dstate, dbelow, parts.sum()


@triton.jit
def _opened(gate, sharpness):
    return 1 / (1 + tl.exp(-tl.load(gate).to(tl.float32) * sharpness))


@triton.jit(do_not_specialize=["size"])
def _mix_kernel(state, below, gate, y, size, sharpness, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, g = at < size, _opened(gate, sharpness)
    own = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(below + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (g * own + (1 - g) * other).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size"])
def _mix_backward_kernel(
    dy, state, below, gate, dstate, dbelow, parts, size, sharpness, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, g = at < size, _opened(gate, sharpness)
    grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(below + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dstate + at, (g * grad).to(dstate.dtype.element_ty), mask=inside)
    tl.store(dbelow + at, ((1 - g) * grad).to(dbelow.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0), tl.sum(grad * (own - other), 0) * g * (1 - g) * sharpness)
