"""Products with frozen weights in four bits, or in eight-bit integers, in fused blocks: the weights of a
group are made dense where they are multiplied, and dropped.

What is multiplied is rounded to the dtype of the computation, as a dense weight would be, so all products are
those of a dense base with these values, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from petune.kernels.block.dense import Dense, PackedWeight, wide_rows
from petune.kernels.dispatch import Ops
from petune.kernels.reference import LowFactors
from petune.models.form import Form


class PackedForms(PackedWeight):
    """Forms of weights [n, k], one below the other, and their bias or None. room: columns for the factors b
    behind what is made dense."""

    def __init__(self, forms: Sequence[Form], bias: Tensor | None, ops: Ops, room: int = 0) -> None:
        self.forms, self.bias, self.ops, self.room = forms, bias, ops, room

    @property
    def made(self) -> float:
        return sum(form.nbytes for form in self.forms) / sum(form.shape.numel() for form in self.forms)

    def _dense(self, like: Tensor, rank: int = 0) -> Dense:
        """In the dtype of `like`, with room for a factor of `rank` where there may be some."""
        room = rank if rank <= self.room else 0
        rows, k = [form.shape[0] for form in self.forms], self.forms[0].shape[1]
        whole = wide_rows(like.new_empty, sum(rows), k + room)
        for form, out in zip(self.forms, whole[:, :k].split(rows), strict=True):
            self.ops.dense_into(form, out)
        bias = None if self.bias is None else self.bias.to(whole.dtype)  # one that trains is float32
        return Dense(whole[:, :k], bias, whole if room else None)

    def linear(self, x: Tensor) -> Tensor:
        return self._dense(x).linear(x)

    def linear32(self, x: Tensor) -> Tensor:
        return self._dense(x).linear32(x)

    def inlet(self, m: int, rank: int) -> Tensor | None:
        if rank > self.room:
            return None
        first = self.forms[0]
        return wide_rows(partial(first.tensors[0].new_empty, dtype=first.dtype), m, first.shape[1] + rank)

    def linear_low(self, x: Tensor, low: LowFactors, ops: Ops, inlet: Tensor | None) -> Tensor:
        return self._dense(x, low[0].shape[1]).linear_low(x, low, ops, inlet)

    def dlinear(self, dy: Tensor) -> Tensor:
        return self._dense(dy).dlinear(dy)

    def dlinear_with(self, dy: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self._dense(dy, b.shape[1]).dlinear_with(dy, b)


class TurnedForm(PackedForms):
    """The form of a weight that is stored [k, n], as transformers' Conv1D has it, in eight-bit floats too: as
    there, its values are multiplied. There is no room for factors."""

    def _dense(self, like: Tensor, rank: int = 0) -> Dense:
        """Turned, a view of what is made."""
        (form,) = self.forms
        made = like.new_empty(form.shape)
        self.ops.dense_into(form, made)
        return Dense(made.T, self.bias)

    def inlet(self, m: int, rank: int) -> Tensor | None:
        return None
