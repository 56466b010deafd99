"""A tensor that stands for logits which nobody may need: it knows hidden states and how a head makes logits,
or their loss, of them.

Its cross-entropy is taken in one step (petune.kernels.head.linear_cross_entropy); whatever else touches it
gets the logits, made then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from petune.kernels.head.linear_cross_entropy import IGNORED

# hidden, bias [v], labels, smoothing, count -> scalar
Loss = Callable[[Tensor, Tensor | None, Tensor, float, Tensor | None], Tensor]


@dataclass(frozen=True)
class Origin:
    """What unmade logits are made of: hidden [..., k] and the bias that the model has added to what the head
    makes of it.

    loss: the cross-entropy by the head in the modes of its forward pass, which can be smoothed if it
    `smooths`; differentiated: whether that pass recorded gradients.
    """

    hidden: Tensor
    loss: Loss
    smooths: bool
    differentiated: bool
    bias: Tensor | None = None


class Unmade(Tensor):
    """Logits [..., v] of a fused head: a tensor without memory that becomes real, once, when more than its
    loss is asked for.

    Reshaping, widening, adding a bias of the vocabulary and `torch.nn.functional.cross_entropy` leave it
    unmade; any other operation computes the logits with the head as it is then, and goes on with those, their
    gradient included. Until that it requires none itself.
    """

    origin: Origin
    make: Callable[[], Tensor]
    made: Tensor | None

    @staticmethod
    def __new__(cls, origin: Origin, width: int, dtype: torch.dtype, make: Callable[[], Tensor]) -> Self:
        """Logits of `width` classes and `dtype`, which `make` makes."""
        shape = (*origin.hidden.shape[:-1], width)
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=origin.hidden.device)
        self.origin, self.make, self.made = origin, make, None
        return self

    def materialise(self) -> Tensor:
        """The logits."""
        if self.made is None:
            # a first look without gradients must not cost a later one its own
            with torch.set_grad_enabled(self.origin.differentiated):
                self.made = self.make()
        return self.made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Facts are known, a few operations are put off, and all others make the logits."""
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None and args and isinstance(args[0], Unmade) and args[0].made is None:
            result = rule(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(Unmade, Unmade.materialise, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Only what goes round torch's Python comes here, too late to record a gradient."""
        raise RuntimeError(
            f"{func} wants logits that were not made; call petune.kernels.head.hooks.unfuse_head(model) ahead"
            " of the forward"
        )


def _put_off(func: Any, logits: Unmade, *args: Any, **kwargs: Any) -> Any:
    """A change of shape or dtype that keeps rows whole."""
    ghost = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *args, **kwargs)
    if ghost.shape[-1:] != logits.shape[-1:]:
        return NotImplemented
    hidden = logits.origin.hidden
    origin = replace(logits.origin, hidden=hidden.reshape(*ghost.shape[:-1], hidden.shape[-1]))
    return Unmade(origin, logits.shape[-1], ghost.dtype, lambda: func(logits.materialise(), *args, **kwargs))


def _put_off_bias(func: Any, logits: Unmade, other: Any, **kwargs: Any) -> Any:
    """A bias of the vocabulary, such as BART's `final_logits_bias`."""
    if kwargs or not isinstance(other, Tensor) or isinstance(other, Unmade):
        return NotImplemented
    if (
        other.numel() != logits.shape[-1]
        or other.shape[-1:] != logits.shape[-1:]
        or other.dim() > logits.dim()
    ):
        return NotImplemented
    bias = other.flatten() if logits.origin.bias is None else logits.origin.bias + other.flatten()
    dtype = torch.promote_types(logits.dtype, other.dtype)
    return Unmade(
        replace(logits.origin, bias=bias), logits.shape[-1], dtype, lambda: func(logits.materialise(), other)
    )


def _fused(
    func: Any,
    logits: Unmade,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`cross_entropy` of rows and their classes. Of the float32 that a bfloat16 head is widened to, or of its
    own dtype, alike."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    if not plain or logits.dim() != 2 or target.dim() != 1 or (label_smoothing and not logits.origin.smooths):
        return NotImplemented
    labels = target.masked_fill(target == ignore_index, IGNORED) if ignore_index >= 0 else target
    count = (labels >= 0).sum() if reduction == "mean" else None
    return logits.origin.loss(logits.origin.hidden, logits.origin.bias, labels, label_smoothing, count)


_FACTS = {
    *(
        cast("Any", fact).__get__
        for fact in (
            Tensor.shape,
            Tensor.dtype,
            Tensor.device,
            Tensor.ndim,
            Tensor.requires_grad,
            Tensor.is_cuda,
        )
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point),
}
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.float, Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.contiguous), _put_off),
    **dict.fromkeys((Tensor.__add__, Tensor.add, torch.add), _put_off_bias),
    F.cross_entropy: _fused,
}
