"""Operations as ops of torch.library under `petune::`, which torch.compile and export see as single nodes:
what fused single modules (petune.kernels.single_modules) are made of.

`lora_linear` and `rms_norm` mean what petune.kernels.reference says, with plain arguments: what would be None
is a tensor without elements, and no input is changed or given back. They run as Triton's kernels where those
can, else as the reference, in the dtype of their inputs; autocast changes `lora_linear` alone. Gradients are
written by hand and cannot be differentiated again.
"""

# What functions say they return is the schema of an op; None becomes a tensor on its way out, and what Ops
# gives is Any.
# mypy: disable-error-code="no-any-return, return-value"

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, custom_op

from petune.kernels.block.dense import matmul32
from petune.kernels.dispatch import Ops, reference_ops, select
from petune.kernels.reference import LowFactors

Gradients = tuple[Tensor | None, ...]  # one for each argument of an op


# ------------------------------------------------------------------ registration


def _op(shapes: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function under its name; `shapes` gives uninitialised results for the same arguments.

    It computes without autocast; a last dim that is not dense is made so, and None among the results an empty
    tensor.
    """

    def register(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(args[0].device.type, enabled=False):
                found = function(
                    *map(_dense, args), **{name: _dense(value) for name, value in kwargs.items()}
                )
            return _apart(args[0], found) if isinstance(found, tuple) else found

        op = custom_op(f"petune::{function.__name__}", run, mutates_args=())
        op.register_fake(shapes)
        return op

    return register


def _apart(x: Tensor, found: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Results as an op may give them: None as an empty tensor, and no two in one storage, as small ones of a
    kernel are."""
    seen: set[int] = set()
    own = []
    for one in found:
        value = x.new_empty(0) if one is None else one
        place = value.untyped_storage().data_ptr()
        own.append(value.clone() if value.numel() and place in seen else value)
        seen.add(place)
    return tuple(own)


def _dense(value: Any) -> Any:
    strided = isinstance(value, Tensor) and value.dim() > 0 and value.stride(-1) != 1
    return value.contiguous() if strided else value


def _gradient(
    op: Any, keep: Callable[[Any, Sequence[Any], Any], None]
) -> Callable[[Callable[..., Gradients]], None]:
    """Register a function as the gradient of `op`; `keep(ctx, inputs, output)` saves what it needs."""

    def register(backward: Callable[..., Gradients]) -> None:
        def run(ctx: Any, *grads: Tensor | None) -> Gradients:
            device = next(grad.device.type for grad in grads if grad is not None)
            with torch.autocast(device, enabled=False):
                return backward(ctx, *grads)

        op.register_autograd(run, setup_context=lambda ctx, inputs, output: keep(ctx, inputs, output))

    return register


def _ops(x: Tensor) -> Ops:
    return select("auto", x.device, x.dtype) or reference_ops()


def _made(value: Tensor | None, tensor: Tensor | None, needed: bool = True) -> Tensor | None:
    """The gradient of `tensor`, in its dtype, if it is needed."""
    return value.to(tensor.dtype) if needed and value is not None and tensor is not None else None


def _same(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _wide(x: Tensor, *shape: int) -> Tensor:
    """A result in float32, or float64 for float64."""
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


# ------------------------------------------------------------------ norms


def _sum(dy: Tensor, wanted: bool) -> Tensor:
    return _wide(dy, dy.shape[1]) if wanted else dy.new_empty(0)


@_op(lambda x, weight, eps: (_same(x), _wide(x, x.shape[0])))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, 1 / rms); the second has no gradient."""
    return _ops(x).rms_norm(x, weight, eps)[:2]


@_op(lambda dy, x, weight, rstd, weight_grad: (_same(dy), _sum(dy, weight_grad)))
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, weight_grad: bool
) -> tuple[Tensor, Tensor]:
    """(gradient of x, of weight)."""
    return _ops(dy).rms_norm_backward(dy, x, weight, rstd, None, weight_grad)


def _keep_norm(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


@_gradient(rms_norm, _keep_norm)
def _(ctx: Any, dy: Tensor, _: None) -> Gradients:
    (x, weight, rstd), needed = ctx.saved_tensors, ctx.needs_input_grad[1]
    dx, dweight = rms_norm_backward(dy, x, weight, rstd, needed)
    return dx, _made(dweight, weight, needed), None


# ------------------------------------------------------------------ LoRA


@_op(lambda x, weight, *args: x.new_empty(x.shape[0], weight.shape[0]))
def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """x W^T + bias + scale (x A^T) B^T, [m, n].

    x [m, k], weight [n, k] and bias [n] have one dtype, that of the computation, to which autocast casts
    them; A [r, k] and B [n, r] may have another. The backward pass computes x A^T again.
    """
    s = x @ (a * scale).to(x.dtype).T
    return _ops(x).linear_low(x, weight, bias, (s, b.to(x.dtype)))


def lora_gradients(
    dy: Tensor,
    x: Tensor,
    s: Tensor,
    weight: Tensor,
    low: LowFactors,
    scale: float,
    needs: Sequence[bool],
    dropped: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias, A and B that `needs` asks for, all but the first summed in float32
    (float64 for float64).

    dy [m, n], x [m, k], weight [n, k] and low = (scale A, B) in the dtype of the computation; s [m, r] =
    dropped(x) (scale A)^T.
    """
    a, b = low
    ds = dy @ b
    dx = dy @ weight if needs[0] else None
    if dx is not None:
        dx = dx.addmm_(ds, a) if dropped is None else dx.add_(dropped(ds @ a))
    return (
        dx,
        matmul32(dy.T, x) if needs[1] else None,
        dy.sum(0, dtype=_wide(dy).dtype) if needs[2] else None,
        matmul32(ds.T, x if dropped is None else dropped(x), scale) if needs[3] else None,
        matmul32(dy.T, s) if needs[4] else None,
    )


def _lora_shapes(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, needs: Any
) -> Any:
    tensors = zip((x, weight, bias, a, b), needs, strict=True)
    return tuple(dy.new_empty(0) if one is None or not needed else _same(one) for one, needed in tensors)


@_op(_lora_shapes)
def lora_linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, bias, A and B that `needs` asks for, each in its tensor's dtype."""
    low = (a * scale).to(x.dtype), b.to(x.dtype)
    found = lora_gradients(dy, x, x @ low[0].T, weight, low, scale, needs)
    return tuple(_made(value, tensor) for value, tensor in zip(found, (x, weight, bias, a, b), strict=True))


def _keep_lora(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


@_gradient(lora_linear, _keep_lora)
def _(ctx: Any, dy: Tensor) -> Gradients:
    needs = list(ctx.needs_input_grad[:5])
    found = lora_linear_backward(dy, *ctx.saved_tensors, ctx.scale, needs)
    return *(value if needed else None for value, needed in zip(found, needs, strict=True)), None


def _under_autocast(device: str) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        eligible = [
            one if one is None or one.dtype == torch.float64 else one.to(dtype) for one in (x, weight, bias)
        ]
        with torch.autocast(device, enabled=False):
            y: Tensor = lora_linear(*eligible, *rest)
        return y

    return run


# register_autocast would want one dtype for ever, and cast the factors too, whose gradients would be rounded
# with them.
_library = Library("petune", "FRAGMENT")
for _device in ("CPU", "CUDA"):
    _library.impl("lora_linear", _under_autocast(_device.lower()), f"Autocast{_device}")
