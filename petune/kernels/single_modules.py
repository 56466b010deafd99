"""Fused forms of single modules, for blocks that have no fused form: families without a table of norms,
blocks cut by a plan, other models.

A tuned linear becomes one autograd node, which keeps its input as it came and one matrix [rows, r], where the
layer's own forward keeps its input twice or three times; an RMS norm becomes one that keeps its input and a
number per row; transformers' tanh-approximated GELU, ten operations there, becomes torch's own. LayerNorm and
exact GELU are one kernel each in torch already.

The class of a module is exchanged for a subclass of it, as that of a fused block is: names, state and hooks
stay, so what a parallel plan has cut and hooked works on. A call that a node cannot do goes to the module's
own forward.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import NewGELUActivation

from petune.kernels import reference, torch_ops
from petune.kernels.block.module import FusedBlock
from petune.kernels.dispatch import Ops
from petune.kernels.norm_probe import eps_of, rms_offset
from petune.log import say
from petune.models.frozen_weight import form_in
from petune.models.tuned_linear import TunedLinear, class_of, low_rank_of, made_of
from petune.models.tuned_parts import LowRank
from petune.rng.context import bound
from petune.rng.dropout import Drop, draw, places

# ------------------------------------------------------------------ nodes


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        ops: Ops,
        how: Drop | None,
    ) -> Tensor:
        dtype = _dtype(x, weight)
        with _without_autocast(x):
            low_a, low_b = torch.mul(a, scale, out=a.new_empty(a.shape, dtype=dtype)), _cast(b, dtype)
            rows = _cast(_matrix(x), dtype)
            s = (rows if how is None else ops.drop(rows, how)) @ low_a.T
            y: Tensor = ops.linear_low(
                rows, _cast(weight, dtype), None if bias is None else _cast(bias, dtype), (s, low_b)
            )
        numbers, *ctx.draw = how or (None,)
        ctx.scale, ctx.ops = scale, ops
        ctx.save_for_backward(x, weight, bias, a, b, low_a, low_b, s, numbers)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, a, b, low_a, low_b, s, numbers = ctx.saved_tensors
        dropped = None if numbers is None else lambda rows: ctx.ops.drop(rows, Drop(numbers, *ctx.draw))
        rows, low = _cast(_matrix(x), s.dtype), (low_a, low_b)
        with _without_autocast(dy):
            dx, *found = torch_ops.lora_gradients(
                _matrix(dy), rows, s, _cast(weight, s.dtype), low, ctx.scale, ctx.needs_input_grad, dropped
            )
        grads = [
            None if grad is None else _cast(grad, one.dtype)
            for grad, one in zip(found, (weight, bias, a, b), strict=True)
        ]
        return None if dx is None else _cast(dx, x.dtype).view(x.shape), *grads, None, None, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, ops: Ops) -> Tensor:
        y, rstd, _ = ops.rms_norm(_matrix(x), weight, eps)
        ctx.ops = ops
        ctx.save_for_backward(x, weight, rstd)
        return cast("Tensor", y).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = ctx.ops.rms_norm_backward(
            _matrix(dy), _matrix(x), weight, rstd, None, ctx.needs_input_grad[1]
        )
        return dx.view(x.shape), None if dweight is None else dweight.to(weight.dtype), None, None


def _matrix(x: Tensor) -> Tensor:
    """`x` [..., k] as [rows, k], its last dim dense."""
    rows = x[None] if x.dim() == 1 else x.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _without_autocast(x: Tensor) -> Any:
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """What torch.nn.functional.linear computes in; None where it raises an error."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    return weight.dtype if x.dtype == weight.dtype else None


def lora_linear(x: Tensor, part: LowRank, ops: Ops, how: Drop | None = None) -> Tensor:
    """x W^T + bias + scale (dropped(x) A^T) B^T, [..., k] -> [..., n], as one node.

    x, W and bias of one dtype, or under autocast, which then says the dtype of computation and result; the
    factors of any. how: the dropout of x, whose rows are its places; torch.compile, which sees the op
    `petune::lora_linear`, cannot have it.
    """
    if not torch.compiler.is_compiling():
        y: Tensor = _LoraLinear.apply(x, *part.tensors[:4], part.scale, ops, how)  # type: ignore[no-untyped-call]  # torch's
        return y
    y = torch_ops.lora_linear(_matrix(x), *part.tensors[:4], part.scale)
    return y.view(*x.shape[:-1], part.weight.shape[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float, ops: Ops) -> Tensor:
    """x / rms(x) * weight over the last dim of [..., n], as one node; weight [n] of x's dtype or wider."""
    if not torch.compiler.is_compiling():
        y: Tensor = _RmsNorm.apply(x, weight, eps, ops)  # type: ignore[no-untyped-call]  # torch's
        return y
    return cast("Tensor", torch_ops.rms_norm(_matrix(x), weight, eps)[0]).view(x.shape)


# ------------------------------------------------------------------ modules


class FusedSite(nn.Module):
    """Mixed in before the class of a module; `ops` are what its node computes with."""

    ops: ClassVar[Ops]

    def __reduce__(self) -> tuple[Any, ...]:
        form, kind = type(self).__bases__
        return _blank, (form, *made_of(kind), self.ops), self.__dict__  # its own class is made at run time


class FusedLora(FusedSite):
    """A linear with an update, or one of each of its parts, which are then as many linears of one input."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own argument and result."""
        whole = cast("LowRank", cast("TunedLinear", self).low_rank())
        drops = self.training and any(part.dropout > 0 for part in whole.each)
        if (
            all(part.a is None for part in whole.each)
            or _dtype(x, whole.weight) is None
            or (drops and (torch.compiler.is_compiling() or x.dim() not in (2, 3)))
        ):
            return cast("Tensor", super().forward(x))
        made = [self._of(x, part) for part in whole.apart]
        return made[0] if len(made) == 1 else torch.cat(made, -1)

    def _of(self, x: Tensor, part: LowRank) -> Tensor:
        """What one of them gives."""
        if part.a is None:
            return F.linear(x, part.weight, part.bias)
        p = part.dropout if self.training else 0.0
        return lora_linear(x, part, self.ops, _draw(x, p) if p else None)


def _draw(x: Tensor, p: float) -> Drop:
    """The draw of torch's dropout of `x` [rows, k] or [rows, tokens, k], see petune.rng.dropout.drop."""
    if x.dim() == 3:
        return draw(places(x.shape[0], x.shape[1], x.device), p)
    with bound(token=0):  # a row without tokens has no place among them
        numbers = places(x.shape[0], 1, x.device)
    return draw(numbers, p)


class FusedNorm(FusedSite):
    """An RMS norm of transformers' making."""

    weight: Tensor
    offset: ClassVar[float] = 0.0  # what is added to its weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The norm's own argument and result."""
        if hidden_states.dtype != self.weight.dtype:  # the result's dtype is then the norm's own affair
            return cast("Tensor", super().forward(hidden_states))
        weight = reference.wide(self.weight) + self.offset if self.offset else self.weight
        return rms_norm(hidden_states, weight, cast("float", eps_of(self)), self.ops)


class FusedShiftedNorm(FusedNorm):
    """An RMS norm that scales by 1 + weight, as Gemma's do."""

    offset = 1.0


class FusedGelu(FusedSite):
    """transformers' NewGELUActivation."""

    def forward(self, input: Tensor) -> Tensor:
        """GELU by tanh, any shape."""
        return F.gelu(input, approximate="tanh")


# ------------------------------------------------------------------ the pass


def fuse_sites(model: nn.Module, ops: Ops) -> int:
    """Fuse tuned linears, RMS norms and tanh GELUs that are in no fused block, or in what one calls; returns
    how many. Idempotent, undone by `unfuse_sites`."""
    blocks = [block for block in model.modules() if isinstance(block, FusedBlock)]
    called = {id(module) for block in blocks for core in block.spec.called for module in core.layers}
    inside = {id(module) for block in blocks for module in block.modules()} - called
    modules = [module for module in model.modules() if id(module) not in inside]
    found: list[tuple[Any, Any]] = [
        (module, form) for module in modules if (form := _form(module)) is not None
    ]
    for module, form in found:
        module.__class__ = _fused_class(form, module.__class__, ops)
    if strangers := {
        type(module).__name__
        for module in modules
        if isinstance(module, TunedLinear) and low_rank_of(module) is None and id(module) not in called
    }:
        say(
            "kernels: not fused, as they have no fused form (`low_rank` gives none):"
            f" {', '.join(sorted(strangers))}"
        )
    return len(found)


def unfuse_sites(model: nn.Module) -> None:
    """The classes again that `fuse_sites` has exchanged."""
    for module in model.modules():
        if isinstance(module, FusedSite):
            module.__class__ = type(module).__bases__[1]


def _form(module: nn.Module) -> type[FusedSite] | None:
    """What `module` can become."""
    if isinstance(module, FusedSite):
        return None
    if isinstance(module, TunedLinear) and low_rank_of(module) is not None and form_in(module.weight) is None:
        return FusedLora
    if type(module) is NewGELUActivation:
        return FusedGelu
    if isinstance(module, nn.RMSNorm):  # one kernel in torch already
        return None
    return {None: None, 0.0: FusedNorm, 1.0: FusedShiftedNorm}[rms_offset(module)]


def _blank(form: Any, own: Any, kind: Any, ops: Ops) -> Any:
    made = _fused_class(form, class_of(own, kind), ops)
    return made.__new__(made)


@cache
def _fused_class(form: Any, kind: Any, ops: Ops) -> Any:
    """The subclass of `kind` whose forward is that of `form`; what `kind` says of itself holds for it too."""
    known = {"low_rank": kind.low_rank} if form is FusedLora else {}
    return type(f"Fused{kind.__name__}", (form, kind), {"__module__": kind.__module__, "ops": ops} | known)
