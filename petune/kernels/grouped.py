"""Grouped products: the rows of a matrix lie in groups one behind the other, and each group has a weight of
its own. Experts are computed by them, on the tokens that are sent to each, sorted by expert.

A group may be empty; its weight then has a gradient of zero. On a GPU products are Triton's kernels or, in
bfloat16, torch's grouped products, elsewhere a loop (grouped_reference.py). No row is added to twice, so
results do not depend on the order in which a device works.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.kernels import grouped_reference, reference
from petune.kernels.dispatch import refusal
from petune.kernels.grouped_reference import by_torch
from petune.kernels.reference import Act
from petune.models.form import Form
from petune.models.frozen_weight import QuantisedWeight
from petune.models.routes import Routes
from petune.models.transition import applied, transition

NARROW = 64  # columns or rows of a matrix up to which a product takes as long as reading the other operand


def dispatch(x: Tensor, routes: Routes) -> Tensor:
    """A copy of its row x [tokens, n] for each group of a token, sorted by group: [m, n]."""
    return transition(x, _spread, _gathered, routes)


def combine(y: Tensor, routes: Routes) -> Tensor:
    """The sum over the copies y [m, n] of each token, [tokens, n]: the adjoint of `dispatch`."""
    return transition(y, _gathered, _spread, routes)


def _spread(x: Tensor, routes: Routes) -> Tensor:
    return x[routes.tokens]


def _gathered(y: Tensor, routes: Routes) -> Tensor:
    return combined(y, routes)


def grouped(x: Tensor, weight: Tensor, ends: Tensor, turned: bool = False) -> Tensor:
    """Rows x [m, k] of each group times its weight, [m, n], in the dtype of the weight or that of autocast.

    weight: [groups, k, n], any strides, or where it is turned [groups, n, k]. ends: [groups], int32, the row
    before which each group ends; the last is m. Both x and weight have gradients. A quantised weight is made
    dense for each product, and dropped.
    """
    kind, dtype = x.device.type, weight.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    x, weight = x.to(dtype), weight.to(dtype)
    if isinstance(weight, QuantisedWeight):
        return transition(x, _by_values, _by_values_back, weight.form, ends, turned)
    return applied(_Grouped, x, weight.transpose(1, 2) if turned else weight, ends)


def _by_values(x: Tensor, form: Form, ends: Tensor, turned: bool) -> Tensor:
    values = _values(form)
    return product(x, values.transpose(1, 2) if turned else values, ends)


def _by_values_back(dy: Tensor, form: Form, ends: Tensor, turned: bool) -> Tensor:
    return _by_values(dy, form, ends, not turned)


def values_of(weight: Tensor) -> Tensor:
    """A weight [groups, n, k] for one product: a quantised one made dense, any other itself."""
    return _values(weight.form) if isinstance(weight, QuantisedWeight) else weight


def _values(form: Form) -> Tensor:
    made = torch.empty(form.shape, dtype=form.dtype, device=form.tensors[0].device)
    kernels = _kernels("dequantise", made)
    (reference if kernels is grouped_reference else kernels).dense_into(form, made)
    return made


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


# ------------------------------------------------------------------ which form computes


def product(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    *,
    rows: Tensor | None = None,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """`grouped_reference.product`, [m, n], by the form that is fastest here."""
    # a kernel that reads rows by index writes no copy of them, one that adds the update rounds once
    alone = rows is None and low is None and min(weight.shape[1:]) > NARROW and by_torch(x, weight)
    form = grouped_reference if alone else _kernels("grouped", x, weight, low, up)
    y: Tensor = form.product(x, weight, ends, rows=rows, low=low, up=up)
    return y


def outer(
    x: Tensor, dy: Tensor, ends: Tensor, *, x_rows: Tensor | None = None, dy_rows: Tensor | None = None
) -> Tensor:
    """`grouped_reference.outer`, [groups, k, n], by the form that is fastest here."""
    wide = min(x.shape[1], dy.shape[1]) > NARROW and by_torch(x, dy)  # a weight's gradient, not a factor's
    form = grouped_reference if wide else _kernels("grouped", x, dy)
    found: Tensor = form.outer(x, dy, ends, x_rows=x_rows, dy_rows=dy_rows)
    return found


def combined(y: Tensor, routes: Routes, weights: Tensor | None = None) -> Tensor:
    """The sum over the copies y [m, n] of each token, each times its of weights [tokens, chosen], rounded
    once: [tokens, n]. Copies that are missing count nothing."""
    found: Tensor = _kernels("routed", y).combined(y, routes.inverse, routes.chosen, weights)
    return found


def gated(gate_up: Tensor, share: Tensor, act: Act) -> Tensor:
    """`grouped_reference.gated`, [m, c], by a kernel where there is one."""
    found: Tensor = _kernels("routed", gate_up).gated(gate_up, share, act)
    return found


def dgated(dm: Tensor, gate_up: Tensor, share: Tensor, act: Act) -> tuple[Tensor, Tensor, Tensor]:
    """`grouped_reference.dgated`, by a kernel where there is one."""
    found: tuple[Tensor, Tensor, Tensor] = _kernels("routed", dm, gate_up).dgated(dm, gate_up, share, act)
    return found


def _kernels(name: str, *operands: Tensor | None) -> ModuleType:
    """The module of Triton's forms where they can run on these operands; else that of torch's, as where
    torch.compile reads."""
    kinds = {(one.device, one.dtype) for one in operands if one is not None}
    if len(kinds) > 1 or torch.compiler.is_compiling():
        return grouped_reference
    return _form(name, *kinds.pop())


@lru_cache
def _form(name: str, device: torch.device, dtype: torch.dtype) -> ModuleType:
    if refusal(device, dtype) is not None:
        return grouped_reference
    return import_module(f"petune.kernels.triton.{name}")
