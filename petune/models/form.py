"""The forms of fewer bytes in which a frozen weight can be held: what all have, and what those share that
have a scale for each row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

AT_ONCE = 1 << 24  # numbers that are made dense at once
# By kind of device, what writes a form's values faster than its own `dense_into`, the same to the bit
DENSE_INTO: dict[str, Callable[[Form, Tensor], None]] = {}


class Form(ABC):
    """A weight [n, k] that does not train, in a form of fewer bytes; it stands for a weight of `dtype`.

    Its products are those of the dense weight, whose values are made for each of them and dropped, unless it
    has products of its own.
    """

    name: ClassVar[str]  # as `base_dtype` has it
    needs: ClassVar[str]  # of a device and of a weight
    dtype: torch.dtype

    @classmethod
    @abstractmethod
    def refused(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        """What of a device, or of a weight of this dtype and shape, is not what it `needs`, or None."""

    @classmethod
    @abstractmethod
    def of(cls, weight: Tensor) -> Self:
        """`weight` [n, k] quantised."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(n, k)."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What it is held in; the first has n rows."""

    @abstractmethod
    def each(self, act: Callable[[Tensor], Tensor]) -> Self:
        """The same made of act(tensor) for each of its tensors: a copy, or a move to another device."""

    @abstractmethod
    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Its outputs (dim 0) or inputs (dim 1) from `start` on, `length` of them: views. Nothing is
        quantised again. Raises UsageError for a slice that it cannot be cut into."""

    @abstractmethod
    def dense_into(self, out: Tensor) -> None:
        """Write the weight [n, k] that its products see into `out`, rounded to the dtype of that."""

    @property
    def by_rows(self) -> tuple[Tensor, ...]:
        """Those of its tensors that have a part for each row, in order; the others belong to all rows."""
        return self.tensors

    def with_rows(self, tensors: Sequence[Tensor], down: int = 0) -> Self:
        """The same weight with other rows of it, in `tensors` in place of `by_rows`, of which the first
        stands `down` rows below its own first."""
        own = iter(tensors)
        return self.each(lambda _: next(own))

    def picked(self, spans: Sequence[tuple[int, int]]) -> Self:
        """The rows of several spans, (first, length), one behind the other, in memory of their own. Raises
        UsageError for a form whose rows are not held one by one."""
        own = [
            torch.cat([_bytes(value.narrow(0, first, length)) for first, length in spans]).view(value.dtype)
            for value in self.by_rows
        ]
        return self.with_rows(own)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row in `by_rows`."""
        return sum(value.itemsize * value.shape[1:].numel() for value in self.by_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(value.nbytes for value in self.tensors)

    def to(self, dtype: torch.dtype) -> Self:
        """The same tensors, standing for a weight of another dtype."""
        return replace(self, dtype=dtype)  # type: ignore[type-var]  # every form is a dataclass

    def dense(self) -> Tensor:
        """The weight [n, k] that its products see, rounded to `dtype`."""
        return self._in(self.dtype)

    def _in(self, dtype: torch.dtype) -> Tensor:
        made = torch.empty(self.shape, dtype=dtype, device=self.tensors[0].device)
        known = {} if torch.compiler.is_compiling() else DENSE_INTO  # which compiled code cannot look into
        known.get(made.device.type, type(self).dense_into)(self, made)
        return made

    def write(self, weight: Tensor) -> None:
        """Quantise another weight [n, k] into its memory."""
        self.take(self.of(weight))

    @torch.no_grad()
    def take(self, other: Form) -> None:
        """Copy what another weight of this form and shape is held in."""
        for own, new in zip(self.tensors, other.tensors, strict=True):
            own.copy_(new)

    def linear(self, x: Tensor) -> Tensor:
        """x W^T, [m, k] -> [m, n]."""
        return x @ self._in(x.dtype).T

    def dlinear(self, dy: Tensor) -> Tensor:
        """dy W, [m, n] -> [m, k]."""
        return dy @ self._in(dy.dtype)


def _bytes(value: Tensor) -> Tensor:
    """Its rows as bytes, as torch lays no eight-bit floats one behind the other."""
    return value.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class ScaledRows(Form):
    """A weight scale * q with q [n, k] of a byte a number and scale float32 [n, 1]."""

    q: Tensor
    scale: Tensor
    dtype: torch.dtype

    @classmethod
    def quantised(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(q, scale) of a weight [n, k]."""
        raise NotImplementedError

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Self:
        return cls(*cls.quantised(weight.detach()), weight.dtype)

    @classmethod
    def together(cls, forms: Sequence[Self]) -> Self:
        """The rows of several weights of one dtype, one below the other, in memory of their own."""
        q = torch.cat([form.q.view(torch.uint8) for form in forms]).view(forms[0].q.dtype)
        return cls(q, torch.cat([form.scale for form in forms]), forms[0].dtype)

    def __reduce__(self) -> Any:
        """Eight-bit floats as plain bytes: torch cannot unpickle them."""
        held = self.q.view(torch.uint8) if self.q.is_floating_point() else self.q
        return of_bytes, (type(self), held, self.q.dtype, self.scale, self.dtype)

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.scale

    def each(self, act: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, q=act(self.q), scale=act(self.scale))

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Its outputs or inputs from `start` on, with the scales of whole rows."""
        q = self.q.narrow(dim, start, length)
        return replace(self, q=q, scale=self.scale if dim else self.scale.narrow(0, start, length))

    def dense_into(self, out: Tensor) -> None:
        """scale * q, multiplied in float32, or in float64 where `out` has it."""
        rows, columns = self.shape
        at_once = max(1, AT_ONCE // max(1, columns))
        for at in range(0, rows, at_once):
            own = slice(at, at + at_once)
            wide = self.q[own].to(torch.promote_types(out.dtype, torch.float32))
            out[own] = wide.mul_(self.scale[own])


def of_bytes(
    kind: type[ScaledRows], q: Tensor, held: torch.dtype, scale: Tensor, dtype: torch.dtype
) -> ScaledRows:
    """The form that a file holds, see `ScaledRows.__reduce__`."""
    return kind(q.view(held), scale, dtype)
