"""The forms of fewer bytes in which the weights of experts can be held: each expert in a form of its own, as
if it were a linear, all of them side by side in the same few tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from petune.errors import UsageError
from petune.models.form import Form, ScaledRows
from petune.models.fp8 import Fp8, quantise
from petune.models.int8 import Int8
from petune.models.nf4 import Nf4


def cut_experts(name: str) -> UsageError:
    """The refusal of a cut through the columns of experts in the form of this name."""
    what = f"base_dtype: {name} holds experts whole, and this plan cuts their columns"
    return UsageError(what, where="base_dtype", remedy="leave base_dtype out, or use dp, sp or pp")


@dataclass(frozen=True)
class ExpertForm(Form):
    """Frozen weights [E, n, k]; see petune.models.form.Form. held: what one expert is held in, but each
    tensor of it with a dim of experts in front."""

    held: Form
    one: ClassVar[type[Form]]  # the form of one expert

    @classmethod
    def refused(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        """What is wrong with the weight of each."""
        return cls.one.refused(device, dtype, shape[1:])

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Self:
        """`weight` [E, n, k] quantised, one expert after the other."""
        like = cls.one.of(weight[0])
        made = cls(like.each(lambda value: value.new_empty(len(weight), *value.shape)))
        if not weight.is_meta:
            made.write(weight)
        return made

    def write(self, weight: Tensor) -> None:
        """Quantise other weights [E, n, k] into its memory, one expert after the other."""
        for number, dense in enumerate(weight):
            self.expert(number).write(dense)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # that of what it is held in
        """Of the weights that it stands for."""
        return self.held.dtype

    def to(self, dtype: torch.dtype) -> Self:
        return replace(self, held=self.held.to(dtype))

    def expert(self, number: int) -> Form:
        """The weight [n, k] of one expert, a view."""
        return self.held.each(lambda value: value[number])

    @property
    def shape(self) -> torch.Size:
        """(E, n, k)."""
        return torch.Size((len(self.tensors[0]), *self.expert(0).shape))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.held.tensors

    def each(self, act: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, held=self.held.each(act))

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Its experts from `start` on. Raises UsageError for a part of each of them."""
        if dim == 0:
            return self.each(lambda value: value.narrow(0, start, length))
        if length != self.shape[dim]:
            raise cut_experts(self.name)
        return self

    def dense_into(self, out: Tensor) -> None:
        """One expert after the other."""
        for number, own in enumerate(out):
            self.expert(number).dense_into(own)

    @property
    @abstractmethod
    def rows(self) -> Form | None:
        """The rows of all experts as one weight [E n, k], views; None where their scales do not lie so."""


@dataclass(frozen=True)
class ExpertsNf4(ExpertForm):
    """Experts in NF4."""

    name: ClassVar[str] = "nf4"
    needs: ClassVar[str] = Nf4.needs
    one: ClassVar[type[Form]] = Nf4

    @property
    def rows(self) -> None:
        """None: the scales of each expert have a mean, and blocks, of their own."""


@dataclass(frozen=True)
class _OfRows(ExpertForm):
    @property
    def rows(self) -> ScaledRows:
        found = self.held.each(lambda value: value.flatten(0, 1))
        assert isinstance(found, ScaledRows)
        return found

    def dense_into(self, out: Tensor) -> None:
        """All rows alike."""
        self.rows.dense_into(out.view(-1, out.shape[-1]))


@dataclass(frozen=True)
class ExpertsInt8(_OfRows):
    """Experts in eight-bit integers."""

    name: ClassVar[str] = "int8"
    needs: ClassVar[str] = Int8.needs
    one: ClassVar[type[Form]] = Int8


class DenseFp8(ScaledRows):
    """A weight in eight-bit floats whose products are those of its dense values: groups of rows have no
    products in eight bits."""

    name: ClassVar[str] = Fp8.name
    needs: ClassVar[str] = "sizes divisible by 16"

    @classmethod
    def refused(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        """As the linears beside it."""
        return Fp8.refused(device, dtype, shape)

    @classmethod
    def quantised(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See petune.models.fp8.quantise."""
        return quantise(weight)


@dataclass(frozen=True)
class ExpertsFp8(_OfRows):
    """Experts in eight-bit floats."""

    name: ClassVar[str] = "fp8"
    needs: ClassVar[str] = Fp8.needs
    one: ClassVar[type[Form]] = DenseFp8


EXPERT_FORMS: Mapping[str, type[ExpertForm]] = {
    one.name: one for one in (ExpertsFp8, ExpertsInt8, ExpertsNf4)
}  # as `base_dtype` names them
