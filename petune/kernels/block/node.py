"""The autograd node of a fused block, both of whose passes are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.errors import UsageError
from petune.kernels.block.call import Call, factors_of
from petune.kernels.block.lent_steps import LENT
from petune.kernels.block.rows import Sink
from petune.kernels.block.steps import Values
from petune.kernels.block.turns import alone
from petune.kernels.configs import Rung
from petune.kernels.memory.offload import Parked
from petune.rng.context import running


class Node(torch.autograd.Function):
    """One call of a fused block: Node.apply(call, *inputs, *tensors) gives its hidden states, with what it
    lends to later blocks, [m, 2 kv_heads d], where it does."""

    @staticmethod
    def forward(ctx: Any, call: Call, *values: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        count = len(call.spec.program.inputs)
        inputs, tensors = cast("Sequence[Tensor]", values[:count]), values[count:]
        y, kept, factors = forward(call, inputs, tensors)
        lent, kept = without_lent(kept)
        ctx.call, ctx.inputs = call, [(one.shape, one.dtype) for one in inputs]
        ctx.numbers = len(tensors), len(factors)
        ctx.late = None if running().passing is None else running().passing.late
        if any(ctx.needs_input_grad):
            ctx.parked = park(call, kept)
            flat, ctx.names = flattened(kept)
            ctx.save_for_backward(*tensors, *factors, *flat)
        y = y.view(inputs[0].shape)
        return y if lent is None else (y, lent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, lent: Tensor | None = None) -> tuple[Tensor | None, ...]:
        call, (count, factors) = ctx.call, ctx.numbers
        saved = ctx.saved_tensors
        tensors, made = saved[:count], saved[count : count + factors]
        kept = unflattened(saved[count + factors :], ctx.names)
        kept = fetched(call, kept, ctx.parked)
        ctx.parked = None  # its host memory is for the next step, though the graph may live on
        first = 1 + len(ctx.inputs)
        given, needs = ctx.needs_input_grad[1:first], ctx.needs_input_grad[first:]
        # of a weight that is made of others autograd still has to make theirs
        every = () if ctx.late is None else enumerate(tensors)
        sink = Sink(needs, [at for at, own in every if own is not None and own.is_leaf])
        groups = call.groups(tensors, made)
        with torch.autocast(dy.device.type, enabled=False):
            found, _ = alone(
                call.backward(rows_of(dy), kept, groups, tensors, needs, given, sink=sink, lent=lent)
            )
            grads = call.gradients(groups, tensors, sink)
        if ctx.late is not None:
            ctx.late += [(tensors[at], products) for at, products in sink.waiting.items()]
        own = [
            None if grad is None else grad.view(shape).to(dtype)
            for grad, (shape, dtype) in zip(found, ctx.inputs, strict=True)
        ]
        return None, *own, *grads


def passed(
    call: Call, inputs: Sequence[Tensor], tensors: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """What a call gives, of the shape of its hidden states, and what it lends, None for nothing."""
    if torch.is_grad_enabled():
        out: Any = Node.apply(call, *inputs, *tensors)  # type: ignore[no-untyped-call]  # torch's
        return out if isinstance(out, tuple) else (out, None)
    call = replace(call, rung=Rung("input"))  # nothing is kept for a backward pass
    y, kept, _ = forward(call, inputs, tensors)
    return y.view(inputs[0].shape), kept.get(LENT)


def forward(
    call: Call, inputs: Sequence[Tensor], tensors: Sequence[Tensor | None]
) -> tuple[Tensor, Values, list[Tensor | None]]:
    """`call.forward` of the program's inputs, hidden states [..., width] and a bias as it is, under any
    autocast, and the factors of its groups."""
    names = call.spec.program.inputs
    rows = [one if name == "bias" else rows_of(one) for name, one in zip(names, inputs, strict=True)]
    with torch.autocast(inputs[0].device.type, enabled=False):
        groups = call.groups(tensors)
        return *alone(call.forward(rows, groups, tensors)), factors_of(groups)


def without_lent(kept: Values) -> tuple[Tensor | None, Values]:
    """What a block hands to later ones, None for nothing, and what it keeps for its own way back."""
    return (kept[LENT], kept | {LENT: None}) if LENT in kept else (None, kept)


def rows_of(x: Tensor) -> Tensor:
    """[..., width] as a matrix whose last dim is dense: the gradient of a sum, one number, is not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def park(call: Call, kept: Values) -> Parked | None:
    """What the rung sends to the host, taken out of `kept`."""
    attended = tuple(attend.a for attend in call.spec.program.attends)
    names = {"none": (), "input": ("x",), "attention": ("x", *attended)}[call.rung.offload]
    sent = {name: kept.pop(name) for name in names if kept.get(name) is not None}
    if not sent or call.spec.store is None:
        kept |= sent
        return None
    return call.spec.store.park(sent)


def fetched(call: Call, kept: Values, parked: Parked | None) -> Values:
    """What was kept, with what was parked. Raises UsageError where an earlier backward pass has taken it."""
    if parked is not None:
        return kept | call.spec.store.fetch(parked)  # type: ignore[union-attr]  # which has parked it
    if "x" not in kept:
        raise UsageError(
            "what this block had parked in host memory is gone after the first backward pass",
            remedy="set memory: {offload: none} to go back through a graph twice",
        )
    return kept


def flattened(kept: Values) -> tuple[list[Tensor | None], list[tuple[str, int | None, Any]]]:
    """Tensors to save; of each value its name, place in a tuple or None, and itself if it is no tensor."""
    flat: list[Tensor | None] = []
    names: list[tuple[str, int | None, Any]] = []
    for name, value in kept.items():
        for at, one in enumerate(value) if isinstance(value, tuple) and value else [(None, value)]:
            tensor = one if isinstance(one, Tensor) else None
            flat.append(tensor)
            names.append((name, at, None if tensor is not None else one))
    return flat, names


def unflattened(flat: Sequence[Tensor | None], names: Sequence[tuple[str, int | None, Any]]) -> Values:
    """What was `flattened`."""
    kept: Values = {}
    for value, (name, at, other) in zip(flat, names, strict=True):
        value = other if value is None else value
        kept[name] = value if at is None else (*kept.get(name, ()), value)
    return kept
