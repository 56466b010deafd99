"""Routed experts cut over the ranks of the ep axis, whole ones on each: what a rank holds of them, and how
tokens reach the ranks of their experts and come back.

    x [tokens, width], index, share      the router's, of own tokens
    a row for each rank                  that has some of a token's experts, however many
      -> all-to-all of unequal parts     rows that other ranks' tokens sent here, with what they have chosen
    the experts that are here            as one process computes them, and the sum over those of a row
      -> all-to-all back, and the sum over a token's ranks

Shares are multiplied in by the ranks of the experts, so what goes and comes is a row for each rank and not
one for each expert. A way moves rows and sums them, so its adjoint is the way back. The gradients of what an
expert has are then those of all tokens of the ranks that share it, and nothing of it is summed over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from petune.errors import UsageError
from petune.kernels.grouped import combine, combined, dispatch
from petune.models.boundary import BoundaryHook, SharedByCopies
from petune.models.experts import Spread, Way, is_experts, put_spread
from petune.models.routes import Routes, routes_of
from petune.models.transition import transition
from petune.parallel.collectives import MaybeGroup, Sizes, least_of
from petune.parallel.mesh import Coordinate, Mesh
from petune.parallel.plan import ParallelPlan
from petune.parallel.tensor.shard_params import Slice, narrow


@dataclass(frozen=True)
class ExpertRanks(SharedByCopies, Spread):
    """Experts of each rank of `group`, and which of them this is."""

    counts: Sizes
    index: int
    group: MaybeGroup = None

    def way(self, index: Tensor) -> tuple[Way, Routes]:
        """See petune.models.experts.Spread. It waits once for the device, as messages have a length."""
        ranks, own = len(self.counts), self.counts[self.index]
        owner, numbers, places = _tables(self.counts, self.index, index.device)
        goes = (owner[index][..., None] == places).sum(1)  # copies, [tokens, ranks]
        there = goes > 0
        going = torch.stack([there.sum(0), goes.sum(0)], 1)  # rows, and copies among them
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going, group=cast("Any", self.group))
        sent, rows, copies = torch.cat([going[:, 0], coming.T.flatten()]).view(3, ranks).tolist()
        routes = routes_of(places.where(there, ranks), ranks, sum(sent))
        way = Way(tuple(sent), tuple(rows), routes.tokens, routes)
        here = numbers[self.there(index, way)]
        if not sum(rows):  # nobody's row goes to the first expert
            here.fill_(own)[0, 0] = 0
        return way, routes_of(here, own, max(1, sum(copies)))

    def there(self, x: Tensor, way: Way) -> Tensor:
        return self._moved(x[way.tokens], way.sent, way.received)

    def back(self, y: Tensor, way: Way) -> Tensor:
        return combined(self._moved(y[: sum(way.received)], way.received, way.sent), way.routes)

    def _moved(self, x: Tensor, sent: Sizes, received: Sizes) -> Tensor:
        """Parts of x sent to each rank, and what came from each; a row of zeros if that is nothing."""
        found, own = x.new_empty(max(1, sum(received)), *x.shape[1:]), sum(received)
        if own == 0:
            found.zero_()
        group = cast("Any", self.group)
        dist.all_to_all_single(found[:own], x.contiguous(), list(received), list(sent), group=group)
        return found

    def least(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """As that of a boundary: the least of each number among the ranks."""
        return least_of(numbers, device, self.group)


@cache
def _tables(counts: Sizes, index: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of each expert the rank that has it, and its number on the rank `index`, that of none where it is on
    another, [experts]; and all ranks."""
    ranks, own, first = torch.arange(len(counts)), counts[index], sum(counts[:index])
    numbers = torch.full((sum(counts),), own)
    numbers[first : first + own] = torch.arange(own)
    return ranks.repeat_interleave(torch.tensor(counts)).to(device), numbers.to(device), ranks.to(device)


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
            narrow(module, own, 0, [plan.experts], at.ep, name, slices, "ep")
        cast("Any", module).num_experts = plan.experts[at.ep]
        put_spread(module, ExpertRanks(plan.experts, at.ep))
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
        spread = ExpertRanks(mesh.plan.experts, mesh.at.ep, mesh.groups["ep"])
        put_spread(module, spread)
        hooks = SpreadHook(spread)
        module.register_forward_pre_hook(hooks.before)
        module.register_forward_hook(hooks.after)


class SpreadHook(BoundaryHook):
    """Hooks around experts: they are called with copies of the rows that were sent here, one expert a copy,
    and what they give goes back. now: of the running call, which the second hook takes from the first."""

    def __init__(self, spread: ExpertRanks) -> None:
        self.spread = spread
        self.now: tuple[Way, Routes] | None = None

    def before(self, module: nn.Module, args: Any) -> Any:
        """Send rows: (x [tokens, width], index and shares [tokens, chosen]) -> the same of copies here."""
        x, index, share = args
        self.now = way, routes = self.spread.way(index)
        here, shares = cast("Any", _Sent).apply(x, share, self.spread, way)
        return dispatch(here, routes), routes.groups[:, None], routes.sorted(shares)[:, None]

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Sum what the experts gave over a row's copies, and bring it back."""
        assert self.now is not None, "experts are left without having been entered"
        (way, routes), self.now = self.now, None
        return transition(combine(output, routes), self.spread.back, self.spread.there, way)


class _Sent(Function):
    """Rows and their shares, in one: so they go back in one order on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor, spread: ExpertRanks, way: Way) -> tuple[Tensor, Tensor]:
        ctx.spread, ctx.way = spread, way
        weights = spread.there(share, way)
        return spread.there(x, way), weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dshare: Tensor) -> tuple[Tensor | None, ...]:
        grads = zip((dx, dshare), ctx.needs_input_grad, strict=False)
        return *(ctx.spread.back(grad, ctx.way) if needed else None for grad, needed in grads), None, None
