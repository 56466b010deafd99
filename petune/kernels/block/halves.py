"""The autograd node of a fused block that ranks share, whose rows go through it as two calls in turns; see
turns.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.kernels.block.call import Call
from petune.kernels.block.node import fetched, flattened, park, rows_of, unflattened
from petune.kernels.block.rows import Sink
from petune.kernels.block.turns import Turns, together


def halves(rows: int) -> tuple[slice, slice]:
    """Those of a batch."""
    middle = (rows + 1) // 2
    return slice(0, middle), slice(middle, rows)


class Halves(torch.autograd.Function):
    """Halves.apply(a call of each half, hidden states [b, t, width], *tensors). What trains is summed over
    both in float32, as over tiles. Blocks that read an encoder or hand on a bias have none."""

    @staticmethod
    def forward(ctx: Any, calls: Sequence[Call], hidden: Tensor, *tensors: Tensor | None) -> Tensor:
        turns = Turns(hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            factors = calls[0].factors(tensors)
            found = together(
                *(
                    call.forward([rows_of(hidden[rows])], tensors, turns, factors)
                    for call, rows in zip(calls, halves(len(hidden)), strict=True)
                )
            )
        ctx.calls, ctx.dtype = calls, hidden.dtype
        if any(ctx.needs_input_grad):
            ctx.parked = [park(call, one) for call, (_, one, _) in zip(calls, found, strict=True)]
            kept = [flattened(one) for _, one, _ in found]
            ctx.names = [names for _, names in kept]
            ctx.counts = len(tensors), len(factors)
            ctx.save_for_backward(*tensors, *factors, *kept[0][0], *kept[1][0])
        return torch.cat([y for y, _, _ in found]).view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, (count, made) = ctx.saved_tensors, ctx.counts
        tensors, factors, rest = saved[:count], saved[count : count + made], saved[count + made :]
        middle = len(ctx.names[0])
        kept = [
            unflattened(flat, names)
            for flat, names in zip((rest[:middle], rest[middle:]), ctx.names, strict=True)
        ]
        for at in (1, 0):  # the last that was parked first
            kept[at] = fetched(ctx.calls[at], kept[at], ctx.parked[at])
        ctx.parked = [None, None]
        del saved, rest
        given, needs = ctx.needs_input_grad[1:2], ctx.needs_input_grad[2:]
        turns, sink = Turns(dy.device), Sink(needs)
        with torch.autocast(dy.device.type, enabled=False):
            found = together(
                *(
                    call.backward(rows_of(dy[rows]), own, factors, tensors, needs, given, turns, sink)
                    for call, own, rows in zip(ctx.calls, kept, halves(len(dy)), strict=True)
                )
            )
            first: Call = ctx.calls[0]
            grads = first.gradients(first.groups(tensors, factors), tensors, sink)
        parts = [part for (part,), _ in found if part is not None]
        dx = torch.cat(parts).view(dy.shape).to(ctx.dtype) if parts else None
        return None, dx, *grads
