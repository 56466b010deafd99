"""Grouped products: the rows of a matrix lie in groups one behind the other, and each group has a weight of
its own. Experts are computed by them, on the tokens that are sent to each, sorted by expert.

A group may be empty; its weight then has a gradient of zero. On a GPU in bfloat16 they are torch's grouped
products, elsewhere a loop over the groups that have rows. No row is added to twice, so results do not depend
on the order in which a device works.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.models.transition import applied, transition


class Routes(NamedTuple):
    """Which rows of tokens' copies go where, for `chosen` experts a token.

    order [m]: the copies, token by token, sorted by expert; inverse: the way back. ends [experts], int32: the
    sorted row before which each expert's end.
    """

    order: Tensor
    inverse: Tensor
    ends: Tensor
    chosen: int


def routes_of(index: Tensor, experts: int) -> Routes:
    """The routes of tokens to the experts index [tokens, chosen]; none is dropped, whoever is crowded."""
    ids, order = index.reshape(-1).sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device), right=True)
    return Routes(order, inverse, ends.int(), index.shape[-1])


def dispatch(x: Tensor, routes: Routes) -> Tensor:
    """A copy of its row x [tokens, n] for each expert of a token, sorted by expert: [m, n]."""
    return transition(x, _spread, _gathered, routes)


def combine(y: Tensor, routes: Routes) -> Tensor:
    """The sum over the copies y [m, n] of each token, [tokens, n]: the adjoint of `dispatch`."""
    return transition(y, _gathered, _spread, routes)


def _spread(x: Tensor, routes: Routes) -> Tensor:
    return x[routes.order // routes.chosen]


def _gathered(y: Tensor, routes: Routes) -> Tensor:
    return y[routes.inverse].view(-1, routes.chosen, y.shape[1]).sum(1)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows x [m, k] of each group times its weight, [m, n], in the dtype of the weight or that of autocast.

    weight: [groups, k, n], any strides. ends: [groups], int32, the row before which each group ends; the last
    is m. Both x and weight have gradients.
    """
    kind, dtype = x.device.type, weight.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return applied(_Grouped, x.to(dtype), weight.to(dtype), ends)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)
        return product(x, weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        dx = product(dy, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
        return dx, outer(x, dy, ends) if ctx.needs_input_grad[1] else None, None


def product(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    *,
    rows: Tensor | None = None,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """x[rows of g] weight[g] + low[rows of g] up[g], [m, n], rounded once where a kernel can.

    weight: [groups, k, n], any strides. rows [m]: the row of x that each row of the result reads, None where
    x [m, k] is sorted already. low [m, r], up [groups, r, n]: of a low-rank update, or None.
    """
    x = x if rows is None else x[rows]
    y = _product(x, weight, ends)
    return y if low is None or up is None else y.add_(_product(low, up, ends))


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _by_torch(x, weight):
        return F.grouped_mm(x, weight, offs=ends)
    y = x.new_empty(len(x), weight.shape[2])
    for group, first, end in _spans(ends):
        torch.mm(x[first:end], weight[group], out=y[first:end])
    return y


def outer(
    x: Tensor, dy: Tensor, ends: Tensor, *, x_rows: Tensor | None = None, dy_rows: Tensor | None = None
) -> Tensor:
    """x[rows of g]^T dy[rows of g], [groups, k, n]. x_rows, dy_rows: as `rows` of `product`."""
    x, dy = x if x_rows is None else x[x_rows], dy if dy_rows is None else dy[dy_rows]
    if _by_torch(x, dy):
        rows = torch.diff(ends, prepend=ends.new_zeros(1))  # what is written for none is nobody's promise
        return F.grouped_mm(x.T, dy, offs=ends).masked_fill_((rows == 0)[:, None, None], 0)
    found = x.new_zeros(len(ends), x.shape[1], dy.shape[1])
    for group, first, end in _spans(ends):
        torch.mm(x[first:end].T, dy[first:end], out=found[group])
    return found


def _spans(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end) of each group that has rows."""
    last = ends.tolist()
    firsts = [0, *last[:-1]]
    return [
        (group, first, end)
        for group, (first, end) in enumerate(zip(firsts, last, strict=True))
        if end > first
    ]


def _by_torch(*operands: Tensor) -> bool:
    """Whether torch's grouped products take these: on a GPU from Ampere on, in bfloat16, with rows or columns
    that begin at multiples of 16 bytes."""
    return all(
        one.is_cuda
        and torch.cuda.get_device_capability(one.device) >= (8, 0)
        and one.numel() > 0
        and one.dtype is torch.bfloat16
        and 1 in one.stride()[-2:]
        and max(one.stride()[-2:]) % 8 == 0
        and one.data_ptr() % 16 == 0
        for one in operands
    )
