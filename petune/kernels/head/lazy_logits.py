"""A tensor that stands for logits which nobody may need: it knows hidden states and how a head makes logits,
or their loss, of them.

Its cross-entropy is taken in one step (petune.kernels.head.linear_cross_entropy); whatever else touches it
gets the logits, made then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from petune.errors import UsageError
from petune.kernels.head.linear_cross_entropy import IGNORED

# hidden, bias [v], labels, smoothing, softcap, count, whether of each row -> scalar, or [rows]
LogitsLoss = Callable[[Tensor, Tensor | None, Tensor, float, float, Tensor | None, bool], Tensor]
CAPPING = 3  # operations of a soft cap


@dataclass(frozen=True)
class Origin:
    """What unmade logits are made of: hidden [..., k] and the bias that the model has added to what the head
    makes of it, and then as many of the operations of softcap * tanh(logits / softcap) as `capped` says.

    loss: the cross-entropy by the head in the modes of its forward pass; whole: whether logits are of the
    whole vocabulary, or of a slice, while labels are of the whole; differentiated: whether that pass recorded
    gradients; linear: whether the head adds no bias of its own, so that a multiple of its logits is one of
    hidden states.
    """

    hidden: Tensor
    loss: LogitsLoss
    whole: bool
    differentiated: bool
    bias: Tensor | None = None
    softcap: float = 0.0
    capped: int = 0
    linear: bool = False

    def times(self, factor: float) -> Origin | None:
        """That of the logits times a number, None where they are no multiple of hidden states."""
        if not self.linear or self.bias is not None or self.capped:
            return None
        return replace(self, hidden=self.hidden * factor)

    @property
    def settled(self) -> Origin:
        """The same where a division that no tanh has followed is no part of a soft cap."""
        quotient = replace(self, capped=0, softcap=0.0).times(1 / self.softcap) if self.capped == 1 else None
        return quotient or self

    @property
    def between(self) -> bool:
        """Whether some operations of a soft cap are still to come."""
        return 0 < self.capped < CAPPING


class Unmade(Tensor):
    """Logits [..., v] of a fused head: a tensor without memory that becomes real, once, when more than its
    loss is asked for.

    Reshaping, widening, adding a bias of the vocabulary, a soft cap, a multiple and
    `torch.nn.functional.cross_entropy`
    leave it unmade; any other operation computes the logits with the head as it is then, and goes on with
    those, their gradient included. Until that it requires none itself.
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
        if rule is not None and args and unmade(args[0]):
            result = rule(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(Unmade, Unmade.materialise, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has wider types
        """Only what goes round torch's Python comes here, too late to record a gradient."""
        raise RuntimeError(
            f"{func} wants logits that were not made; call petune.kernels.head.hooks.unfuse_head(model) ahead"
            " of the forward"
        )


def unmade(value: Any) -> bool:
    """Whether `value` is logits that nobody has looked at."""
    return isinstance(value, Unmade) and value.made is None


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
    if kwargs or not isinstance(other, Tensor) or isinstance(other, Unmade) or logits.origin.capped:
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


def _put_off_cap(step: int, func: Any, logits: Unmade, *args: Any) -> Any:
    """Operation `step` of a soft cap c (Gemma 2: Riviere et al. 2024, arXiv:2408.00118): logits / c, tanh,
    and times c; or a multiple of the logits, as `Origin.times` and `settled` say."""
    origin = logits.origin
    if step == 2 and isinstance(args[0], int | float) and (scaled := origin.times(args[0])) is not None:
        return Unmade(scaled, logits.shape[-1], logits.dtype, lambda: func(logits.materialise(), *args))
    cap = origin.softcap if step == 1 else args[0]
    fits = isinstance(cap, int | float) and cap > 0 and (step == 0 or cap == origin.softcap)
    if origin.capped != step or len(args) != (step != 1) or not fits:
        return NotImplemented
    made = replace(origin, softcap=float(cap), capped=step + 1)
    return Unmade(made, logits.shape[-1], logits.dtype, lambda: func(logits.materialise(), *args))


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
    own dtype, alike. Raises UsageError for another one of a slice, which has not all classes."""
    origin = logits.origin.settled
    plain = (
        weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    )
    if not plain or logits.dim() != 2 or target.dim() != 1 or origin.between:
        if origin.whole:
            return NotImplemented
        what = "the loss of a vocabulary that is cut across ranks is the plain cross-entropy of rows"
        expected = "without class weights, labels by number"
        raise UsageError(what, expected=expected, remedy="set vocabulary: false")
    labels = target.masked_fill(target == ignore_index, IGNORED) if ignore_index >= 0 else target
    count = (labels >= 0).sum() if reduction == "mean" else None
    each = reduction == "none"
    return origin.loss(origin.hidden, origin.bias, labels, label_smoothing, origin.softcap, count, each)


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
    **dict.fromkeys((Tensor.__truediv__, Tensor.div, torch.div), partial(_put_off_cap, 0)),
    **dict.fromkeys((Tensor.tanh, torch.tanh), partial(_put_off_cap, 1)),
    **dict.fromkeys((Tensor.__mul__, Tensor.mul, torch.mul), partial(_put_off_cap, 2)),
    F.cross_entropy: _fused,
}
