"""A tuned linear, and the bottleneck behind it, as fused kernels compute them: tensors and how they meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# What a scaled linear multiplies by its vector: outputs but for the bias, of rows that are first brought to
# length 1; outputs; or inputs
Scaling = Literal["lengths", "outputs", "inputs"]
TENSORS = 5  # of a `LowRank` that may train


class LowRank(NamedTuple):
    """A linear map with a low-rank update, x W^T + bias + scale (dropout(x) A^T) B^T, as fused kernels
    compute it.

    weight [n, k], bias [n] or None; A [r, k] and B [n, r], both None without an update; scale and dropout are
    of the update. turned: b is B^T [r, n]; transposed: weight is W^T [k, n]. scaling: what `by`, a vector of
    n or k numbers of any shape, multiplies, None for nothing; by is None while the tuning is passed by.
    parts: of a linear that is several, one behind the other, with no factors beside theirs; each has the
    weight and bias of all. rows: of a part, how many of theirs are its own; leads: whether it is the first,
    which answers for them.
    """

    weight: Tensor
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    dropout: float = 0.0
    by: Tensor | None = None
    scaling: Scaling | None = None
    turned: bool = False
    transposed: bool = False
    parts: tuple[LowRank, ...] = ()
    rows: int | None = None
    leads: bool = True

    @property
    def inputs(self) -> int:
        """How many it has, k."""
        return self.weight.shape[0 if self.transposed else 1]

    @property
    def upright(self) -> Tensor:
        """W [n, k], a view; of a quantised one that is transposed a copy of its values."""
        return self.weight.T if self.transposed else self.weight

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd must know of, in the order `with_tensors` takes them."""
        base = (self.weight, self.bias) if self.leads else (None, None)
        return *base, self.a, self.b, self.by

    @property
    def each(self) -> tuple[LowRank, ...]:
        """Its parts, or itself where it is one."""
        return self.parts or (self,)

    @property
    def apart(self) -> list[LowRank]:
        """The same, each a linear of its own, whose weight and bias are views."""
        if not self.parts:
            return [self]
        sizes = [part.outputs for part in self.parts]
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        own = zip(self.parts, self.weight.split(sizes), biases, strict=True)
        return [part._replace(weight=weight, bias=bias, rows=None, leads=True) for part, weight, bias in own]

    @property
    def outputs(self) -> int:
        """How many it has, n."""
        return self.weight.shape[1 if self.transposed else 0] if self.rows is None else self.rows

    @property
    def scales_outputs(self) -> bool:
        """Whether its result is scaled, or would be if its tuning were not passed by."""
        return self.scaling in ("lengths", "outputs")

    @property
    def spares_bias(self) -> bool:
        """Whether its result is scaled now, but for the bias."""
        return self.scaling == "lengths" and self.by is not None

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> LowRank:
        """The same linear made of other tensors."""
        weight, bias, a, b, by = tensors
        if not self.leads:
            return self._replace(a=a, b=b, by=by)
        assert weight is not None
        return self._replace(weight=weight, bias=bias, a=a, b=b, by=by)

    def to(self, dtype: torch.dtype) -> LowRank:
        """The same with weight and bias in another dtype; A and B are rounded where they are stacked."""
        if self.weight.dtype == dtype or not self.leads:
            return self
        return self._replace(
            weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype)
        )


class BottleneckPart(NamedTuple):
    """A small network that adds to a linear's result y: y + scale up(dropout(act(down(z)))), where z is y or,
    of one that is beside the sub-layer, what the block adds the sub-layer to. With of_sum y is the sum of
    both, and z the same, normed where there is a norm behind the sum.

    features: of the bottleneck. activation: by the name of its kernel, else its own: there is no fused form.
    tensors: weight [features, n] and bias of `down`, weight [n, features] and bias of `up`; None while the
    tuning is passed by.
    """

    features: int
    activation: str
    dropout: float = 0.0
    tensors: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    scale: float = 1.0
    beside: bool = False
    of_sum: bool = False

    def with_tensors(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> BottleneckPart:
        """The same made of other tensors, rounded to a dtype, with the scale in those of `up`."""
        if self.tensors is None:
            return self
        down, down_bias, *ups = (value for value in tensors if value is not None)
        up, up_bias = (value if self.scale == 1 else value * self.scale for value in ups)
        return self._replace(tensors=(down.to(dtype), down_bias.to(dtype), up.to(dtype), up_bias.to(dtype)))
