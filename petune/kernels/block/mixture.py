"""A mixture of experts as its steps see it: the tensors of one call, and the gradients of grouped weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from petune.kernels.block.rows import Rows, Sink
from petune.kernels.grouped import outer
from petune.models.experts import RoutesHook, Spread, low_ranks_of, spread_of
from petune.models.tuned_linear import LowRank

OF_MIXTURE = 8  # of a mixture among those of a block, in this order; an update's a and b behind its weight
ROUTER, UP, DOWN, GATE = 0, 1, 4, 7


class MixturePart(NamedTuple):
    """One mixture as it is at one moment. router [E, width]; up, down: LowRank of weights [E, out, in], A
    [E, r, in] and B [E, out, r]; gate [1, width] of the shared expert, or None. listeners: told the index
    [tokens, chosen] of every forward pass. spread: where the experts of other ranks are."""

    router: Tensor
    up: LowRank
    down: LowRank
    gate: Tensor | None = None
    listeners: Sequence[Callable[[Tensor], None]] = ()
    spread: Spread | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd must know of."""
        up, down = self.up, self.down
        return self.router, up.weight, up.a, up.b, down.weight, down.a, down.b, self.gate

    def with_tensors(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> MixturePart:
        """The same made of other tensors, in the dtype of the computation; factors A with their scale."""
        router, *rest, gate = tensors
        up, down = (_rounded(own, rest[at : at + 3], dtype) for at, own in ((0, self.up), (3, self.down)))
        router, gate = cast("Tensor", router).to(dtype), None if gate is None else gate.to(dtype)
        return MixturePart(router, up, down, gate, self.listeners, self.spread)


def _rounded(own: LowRank, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> LowRank:
    weight, a, b = tensors
    assert weight is not None
    if a is None or b is None:
        return LowRank(weight.to(dtype))
    scaled = torch.mul(a, own.scale, out=torch.empty_like(a, dtype=dtype))
    return LowRank(weight.to(dtype), None, scaled, b.to(dtype), own.scale)


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
        return MixturePart(router, *found, gate, listeners, spread_of(self.experts))


def learn(
    sink: Sink,
    first: int,
    part: LowRank,
    ends: Tensor,
    dy: Tensor,
    s: Tensor | None,
    ds: Tensor | None,
    x: Rows,
    x_rows: Tensor | None = None,
    dy_rows: Tensor | None = None,
) -> None:
    """Add the gradients of what trains of a grouped product, whose tensors are `first` and the two behind it.
    x_rows, dy_rows: the row of each that a sorted row reads; None where it is sorted."""
    if sink.needs[first]:
        sink.add(first, outer(dy, x.matrix(), ends, x_rows=dy_rows, dy_rows=x_rows))
    if s is None or ds is None or part.a is None:
        return
    if sink.needs[first + 1]:
        sink.add(first + 1, outer(ds, x.matrix(), ends, dy_rows=x_rows).mul_(part.scale))
    if sink.needs[first + 2]:
        sink.add(first + 2, outer(dy, s, ends, x_rows=dy_rows))
