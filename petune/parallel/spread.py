"""Routed experts cut over the ranks of the ep axis, whole ones on each: what a rank holds of them, and how
copies of tokens reach the ranks of their experts and come back.

    x [tokens, width], index, share      the router's, of own tokens
    copies, sorted by expert             each rank's lie one behind the other
      -> all-to-all of unequal parts     copies that other ranks' tokens sent here, with their shares
    the experts that are here            as one process computes them, one expert a copy
      -> all-to-all back, and the sum over a token's copies

A way only moves rows, so its adjoint is the way back. The gradients of what an expert has are then those of
all tokens of the ranks that share it, and nothing of it is summed over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from petune.errors import UsageError
from petune.kernels.grouped import Routes, combine, dispatch, routes_of
from petune.models.boundary import BoundaryHook
from petune.models.experts import Way, is_experts, put_spread
from petune.models.transition import transition
from petune.parallel.collectives import Group, Sizes, least_of
from petune.parallel.mesh import Coordinate, Mesh
from petune.parallel.plan import ParallelPlan
from petune.parallel.tensor.shard_params import Slice, narrow


@dataclass(frozen=True)
class Spread:
    """Experts of each rank of `group`, and which of them this is. A copy of the model has the same one, as a
    process group cannot be copied."""

    counts: Sizes
    index: int
    group: Group = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Spread:
        return self

    def way(self, ends: Tensor) -> Way:
        """See petune.models.experts.Spread. It waits for the device, as messages have a length."""
        rows, own, ranks = ends.diff(prepend=ends.new_zeros(1)), self.counts[self.index], len(self.counts)
        found = rows.new_empty(ranks * own)
        dist.all_to_all_single(found, rows, [own] * ranks, list(self.counts), group=cast("Any", self.group))
        here = found.view(ranks, own).cpu()
        sent = tuple(int(part.sum()) for part in rows.cpu().split(list(self.counts)))
        numbers = torch.arange(own).repeat(ranks).repeat_interleave(here.flatten().long())
        numbers = numbers if len(numbers) else numbers.new_zeros(1)
        return Way(sent, tuple(here.sum(1).tolist()), numbers.to(ends.device))

    def there(self, x: Tensor, way: Way) -> Tensor:
        """See petune.models.experts.Spread."""
        return self._moved(x, way.sent, way.received, len(way.experts))

    def back(self, y: Tensor, way: Way) -> Tensor:
        """See petune.models.experts.Spread."""
        return self._moved(y[: sum(way.received)], way.received, way.sent, sum(way.sent))

    def _moved(self, x: Tensor, sent: Sizes, received: Sizes, rows: int) -> Tensor:
        """Parts of x sent to each rank, and what came from each, above rows of zeros where that is less."""
        found, own = x.new_zeros(rows, *x.shape[1:]), sum(received)
        group = cast("Any", self.group)
        dist.all_to_all_single(found[:own], x.contiguous(), list(received), list(sent), group=group)
        return found

    def least(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """As that of a boundary: the least of each number among the ranks."""
        return least_of(numbers, device, self.group)


# ------------------------------------------------------------------ what a rank holds


def cut_experts(model: nn.Module, plan: ParallelPlan, at: Coordinate) -> dict[str, Slice]:
    """Narrow all that experts have to those of the rank `at`, in place; how each tensor lies across the ep
    axis. Works on meta tensors. Raises UsageError for a mixture that is not known."""
    slices: dict[str, Slice] = {}
    if plan.ep == 1:
        return slices
    for name, module in _mixtures(model):
        for own, value in list(module.named_parameters()):
            if value.shape[:1] != (sum(plan.experts),):
                expected, found = f"{sum(plan.experts)} experts in front", str(list(value.shape))
                what = "a tensor of experts is not cut by them"
                raise UsageError(what, where=f"{name}.{own}", expected=expected, found=found)
            narrow(module, own, 0, plan.experts, at.ep, name, slices, "ep")
        cast("Any", module).num_experts = plan.experts[at.ep]
        put_spread(module, Spread(plan.experts, at.ep))
    return slices


def _mixtures(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    if not found:
        what = "the experts of this model are not of a known form, so they cannot be cut"
        raise UsageError(what, where="parallel.ep", found=type(model).__name__, remedy="use dp")
    return found


# ------------------------------------------------------------------ the model's own modules


def cross_experts(model: nn.Module, mesh: Mesh) -> None:
    """Hook the ways of tokens on a model that `cut_experts` has narrowed."""
    if mesh.plan.ep == 1:
        return
    for _, module in _mixtures(model):
        spread = Spread(mesh.plan.experts, mesh.at.ep, mesh.groups["ep"])
        put_spread(module, spread)
        hooks = Ways(spread)
        module.register_forward_pre_hook(hooks.before)
        module.register_forward_hook(hooks.after)


class Ways(BoundaryHook):
    """Hooks around experts: they are called with the copies that were sent here, and what they give goes
    back. now: of the running call, which the second hook takes from the first."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self.now: tuple[Routes, Way] | None = None

    def before(self, module: nn.Module, args: Any) -> Any:
        """Send copies: (x [tokens, width], index and shares [tokens, chosen]) -> the same of what is here."""
        x, index, share = args
        routes = routes_of(index, sum(self.spread.counts))
        self.now = routes, way = routes, self.spread.way(routes.ends)
        here, weights = cast("Any", _Sent).apply(dispatch(x, routes), routes.sorted(share), self.spread, way)
        return here, way.experts[:, None], weights[:, None]

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Bring back what the experts gave, and sum it over a token's copies."""
        assert self.now is not None, "experts are left without having been entered"
        (routes, way), self.now = self.now, None
        return combine(transition(output, self.spread.back, self.spread.there, way), routes)


class _Sent(Function):
    """Copies and their shares, in one: so they go back in one order on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor, spread: Spread, way: Way) -> tuple[Tensor, Tensor]:
        ctx.spread, ctx.way = spread, way
        weights = spread.there(share, way)
        return spread.there(x, way), weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dshare: Tensor) -> tuple[Tensor | None, ...]:
        grads = zip((dx, dshare), ctx.needs_input_grad, strict=False)
        return *(ctx.spread.back(grad, ctx.way) if needed else None for grad, needed in grads), None, None
