"""How long a share of a part of the work takes on a device: costs are those of petune.kernels.memory.op_cost,
seconds those of `Rates`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from petune.estimate.workload import MatmulWork, WorkPart
from petune.kernels.memory.block_cost import Rates
from petune.kernels.memory.op_cost import (
    Cost,
    CostKind,
    KernelCost,
    activate,
    activate_backward,
    adamw,
    attention,
    attention_backward,
    cast,
    costing,
    cross_entropy_,
    grouped,
    low_rank,
    matmul,
    rms_norm,
    rms_norm_backward,
    stepwise_rms_norm,
)

WIDE = 4  # bytes of a number that trains, of its gradient and of each of its states
Straight = tuple[float, float]  # seconds that are there for any share, and those of the whole beside


@dataclass(frozen=True)
class LinearTime:
    """Seconds of a share of a part, forward and backward, and those of its update."""

    forward: Straight
    backward: Straight
    update: float


@cache
def line(rates: Rates, part: WorkPart, rows: float) -> LinearTime:
    """Seconds of a part on a device, over so many rows."""
    ahead = _forward(part, rows) if part.forward else ()
    back = _backward(part, rows) if part.returned else ()
    without = replace(rates, launch=0.0)
    length = part.tokens

    def way(work: tuple[KernelCost, ...]) -> Straight:
        return rates.launch * sum(one.times for one in work), without.seconds(work, length)

    update = without.seconds(costing(KernelCost("update", "memory", adamw(part.tuned, WIDE))), length)
    return LinearTime(way(ahead), way(back), update)


def line_of(rates: Rates, parts: Mapping[WorkPart, float], rows: float) -> Straight:
    """Seconds of both passes of some parts on a device, with how many there are of each."""
    lines = [(line(rates, part, rows), times) for part, times in parts.items()]
    ways = [(way, times) for one, times in lines for way in (one.forward, one.backward)]
    return sum(times * fixed for (fixed, _), times in ways), sum(times * slope for (_, slope), times in ways)


def seconds_at(one: Straight, share: float) -> float:
    """Seconds of a share on such a line."""
    return one[0] + share * one[1]


def _forward(part: WorkPart, rows: float) -> tuple[KernelCost, ...]:
    tokens, size = rows * part.tokens * part.copies, part.itemsize
    found = [_product(one, rows * part.keys if one.across else tokens, size) for one in part.products]
    found += [("memory", cast(one.numbers, WIDE, size)) for one in part.products if one.trained]
    if part.heads:
        keys = None if part.keys == part.tokens else part.keys
        found.append(("attention", attention(tokens, part.tokens, *part.heads, part.causal, size, keys)))
    if part.columns:
        found.append(("memory", activate(tokens, part.columns, part.gated, size)))
    if part.stepwise:
        found += [("memory", one) for one in stepwise_rms_norm(tokens, part.width, size)[0]] * part.norms
    else:
        found += [("memory", rms_norm(tokens, part.width, size, residual=True))] * part.norms
    if part.vocabulary:
        found.append(("memory", cross_entropy_(tokens, part.vocabulary, 4)))
    if part.place == "embedding":
        found.append(("memory", Cost(0, 2 * size * tokens * part.width)))
    return _operations(part, found)


def _backward(part: WorkPart, rows: float) -> tuple[KernelCost, ...]:
    """Gradients of what came in, and of what trains."""
    tokens, size = rows * part.tokens * part.copies, part.itemsize
    found: list[tuple[CostKind, Cost]] = []
    for one in part.products:
        kind, cost = _product(one, rows * part.keys if one.across else tokens, size)
        found.append((kind, cost))
        if one.trained:  # rounded anew; its gradient is wide
            found.append(("memory", cast(one.numbers, WIDE, size)))
            found.append((kind, cost + Cost(0, (WIDE - size) * one.numbers)))
    if part.heads:
        keys = None if part.keys == part.tokens else part.keys
        cost = attention_backward(tokens, part.tokens, *part.heads, part.causal, size, keys)
        found.append(("attention_backward", cost))
    if part.columns:
        found.append(("memory", activate_backward(tokens, part.columns, part.gated, size)))
    if part.stepwise:
        found += [("memory", one) for one in stepwise_rms_norm(tokens, part.width, size)[1]] * part.norms
    else:
        found += [("memory", rms_norm_backward(tokens, part.width, size, dresidual=True))] * part.norms
    if part.table:
        found.append(("memory", Cost(0, 2 * size * tokens * part.width)))
    return _operations(part, found)


def _product(one: MatmulWork, tokens: float, itemsize: int) -> tuple[CostKind, Cost]:
    if one.experts > 1:
        kind: CostKind = "narrow" if one.narrow else "grouped"
        return kind, grouped(tokens, one.inner, one.columns, one.experts, itemsize)
    if one.narrow:
        wide, low = max(one.inner, one.columns), min(one.inner, one.columns)
        return "narrow", low_rank(tokens, wide, low, itemsize)
    return "matmul", matmul(tokens, one.inner, one.columns, itemsize)


def _operations(part: WorkPart, found: list[tuple[CostKind, Cost]]) -> tuple[KernelCost, ...]:
    return costing(*(KernelCost(part.place, kind, cost) for kind, cost in found))
