"""A mixture of experts as its steps see it: the tensors of one call, and the gradients of grouped weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from petune.kernels.block.rows import LinearInput, Sink
from petune.kernels.grouped import outer, values_of
from petune.models.experts import RoutesHook, Spread, low_ranks_of, spread_of
from petune.models.tuned_parts import LowRank

OF_MIXTURE = 11  # of a mixture among those of a block, in this order; an update's a and b behind its weight
ROUTER, UP, DOWN, GATE, ROUTER_BIAS, UP_BIAS, DOWN_BIAS = 0, 1, 4, 7, 8, 9, 10


class MixturePart(NamedTuple):
    """One mixture as it is at one moment. router [E, width] and its bias [E] or None; up, down: LowRank of
    weights [E, out, in], or where they are transposed [E, in, out], biases [E, out], A [E, r, in] and B [E,
    out, r]; gate [1, width] of the shared expert, or None. listeners: told the index [tokens, chosen] of
    every forward pass. spread: where the experts of other ranks are."""

    router: Tensor
    up: LowRank
    down: LowRank
    gate: Tensor | None = None
    router_bias: Tensor | None = None
    transposed: bool = False
    listeners: Sequence[Callable[[Tensor], None]] = ()
    spread: Spread | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd must know of."""
        up, down = self.up, self.down
        weights = up.weight, up.a, up.b, down.weight, down.a, down.b
        return self.router, *weights, self.gate, self.router_bias, up.bias, down.bias

    def with_tensors(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> MixturePart:
        """The same made of other tensors, in the dtype of the computation; factors A with their scale."""
        plain = [None if one is None else one.to(dtype) for one in (*tensors[:UP], *tensors[GATE:])]
        router, gate, router_bias, *biases = plain
        sides = zip((UP, DOWN), (self.up, self.down), biases, strict=True)
        up, down = (_rounded(own, tensors[at : at + 3], bias, dtype) for at, own, bias in sides)
        return self._replace(
            router=cast("Tensor", router), up=up, down=down, gate=gate, router_bias=router_bias
        )

    def ahead(self, part: LowRank) -> Tensor:
        """The weight of `up` or `down` [E, in, out], made dense where it is quantised."""
        values = values_of(part.weight)
        return values if self.transposed else values.mT

    def back(self, part: LowRank) -> Tensor:
        """The same [E, out, in]."""
        values = values_of(part.weight)
        return values.mT if self.transposed else values


def _rounded(
    own: LowRank, tensors: Sequence[Tensor | None], bias: Tensor | None, dtype: torch.dtype
) -> LowRank:
    weight, a, b = tensors
    assert weight is not None
    if a is None or b is None:
        return LowRank(weight.to(dtype), bias)
    scaled = torch.mul(a, own.scale, out=torch.empty_like(a, dtype=dtype))
    return LowRank(weight.to(dtype), bias, scaled, b.to(dtype), own.scale)


def added(part: LowRank, s: Tensor | None, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(low, up) of what is added to a grouped product: s b^T and, each times what its row counts [M], the
    biases, which are one rank more."""
    b = None if part.b is None else part.b.mT
    if part.bias is None:
        return s, b
    column, row = counts[:, None].to(part.bias.dtype), part.bias[:, None]
    return (column, row) if s is None or b is None else (torch.cat([s, column], 1), torch.cat([b, row], 1))


@dataclass(frozen=True)
class Mixture:
    """Where the tensors of a mixture are. gate: of the shared expert, None without one."""

    router: nn.Module
    experts: nn.Module
    gate: nn.Linear | None = None

    @property
    def layers(self) -> list[nn.Module]:
        """The modules."""
        return [one for one in (self.router, self.experts, self.gate) if one is not None]

    def part(self) -> MixturePart:
        """The tensors as they are at this moment."""
        found = low_ranks_of(self.experts)
        assert found is not None, "experts have a fused form always or never"
        hooks = [one for one in self.experts._forward_pre_hooks.values() if isinstance(one, RoutesHook)]
        listeners = [lambda index, hook=hook: hook.hear(self.experts, index) for hook in hooks]
        router = cast("Tensor", self.router.weight)
        gate = None if self.gate is None else self.gate.weight
        bias = cast("Tensor | None", getattr(self.router, "bias", None))
        turned = bool(cast("Any", self.experts).is_transposed)
        return MixturePart(router, *found, gate, bias, turned, listeners, spread_of(self.experts))


def learn(
    sink: Sink,
    first: int,
    part: LowRank,
    ends: Tensor,
    dy: Tensor,
    s: Tensor | None,
    ds: Tensor | None,
    x: LinearInput,
    x_rows: Tensor | None = None,
    dy_rows: Tensor | None = None,
    transposed: bool = False,
) -> None:
    """Add the gradients of what trains of a grouped product, whose tensors are `first` and the two behind it.
    x_rows, dy_rows: the row of each that a sorted row reads; None where it is sorted."""
    if sink.needs[first]:
        sink.learn(first, _of_weights, dy, x.matrix(), ends, dy_rows, x_rows, transposed)
    if s is None or ds is None or part.a is None:
        return
    if sink.needs[first + 1]:
        sink.add(first + 1, outer(ds, x.matrix(), ends, dy_rows=x_rows).mul_(part.scale))
    if sink.needs[first + 2]:
        sink.add(first + 2, outer(dy, s, ends, x_rows=dy_rows))


def _of_weights(
    dy: Tensor, x: Tensor, ends: Tensor, dy_rows: Tensor | None, x_rows: Tensor | None, transposed: bool
) -> Tensor:
    found = outer(dy, x, ends, x_rows=dy_rows, dy_rows=x_rows)
    return found.mT if transposed else found


def learn_bias(
    sink: Sink, at: int, part: LowRank, ends: Tensor, dy: Tensor, counts: Tensor, rows: Tensor | None = None
) -> None:
    """Add the gradient of biases, whose place is `at`, of rows that count so much [M]."""
    if part.bias is not None and sink.needs[at]:
        sink.add(at, outer(counts[:, None].to(dy.dtype), dy, ends, dy_rows=rows)[:, 0])
