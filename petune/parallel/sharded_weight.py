"""A quantised weight that FSDP2 spreads over ranks by rows, as it does any other: a rank holds its rows of
what the weight is held in, and these are what is gathered.

FSDP2 asks the tensor itself what it sends and what it makes of what has come (`fsdp_pre_all_gather` and
`fsdp_post_all_gather`), so gathering, freeing and their order are its own. The whole weight is a plain
`QuantisedWeight` over the memory that FSDP fills and frees; nothing is made dense or quantised again.
What belongs to all rows (the scales of NF4's scales, four bytes for 16,384 numbers) lies whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from petune.models.form import Form
from petune.models.frozen_weight import QuantisedWeight


class ShardedWeight(QuantisedWeight):
    """Some rows of a frozen weight that has `rows` of them, or all, which FSDP2 is to cut: what it does to a
    tensor to lay out shards keeps the form here, and everything else is as of any quantised weight."""

    rows: int

    @staticmethod
    def __new__(cls, form: Form, rows: int, *, part: bool = False) -> Self:
        """Of a form, whose memory it shares."""
        made = QuantisedWeight.__new__(cls, form, part=part)
        made.rows = rows
        return made

    @classmethod  # torch calls it so, whatever its own signature says
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has wider types
        """What FSDP2 does to lay out shards (see _LAID_OUT), else as QuantisedWeight."""
        if args and isinstance(args[0], cls) and (lay := _LAID_OUT.get(func)) is not None:
            return lay(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def whole(self) -> int:
        """Bytes of all rows."""
        return self.form.row_nbytes * self.rows

    def begin_at(self, row: int) -> None:
        """Take what is here for the rows from `row` on of the weight that was cut."""
        self.form = self.form.with_rows(self.form.by_rows, row)
        self.part = len(self) != self.rows

    # the signature with a mesh alone: under the longer one FSDP2 refuses shards of unequal size, as it
    # expects tensors of the shape of the weight
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], int]:
        """What this rank sends, of equal length on all of them, and the number of its first row."""
        size = -(-self.rows // mesh.size())
        return tuple(_lengthened(value, size) for value in self.form.by_rows), size * mesh.get_local_rank()

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], first: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight over what has come, which FSDP2 narrows to its rows; it does so once, as later it
        fills the same memory again."""
        if out is not None:
            return None
        return self.gathered(outputs, first), ()

    def gathered(self, wholes: Sequence[Tensor], first: int) -> ShardedWeight:
        """The weight whose rows lie in `wholes`, of which this rank has those from `first` on."""
        return ShardedWeight(self.form.with_rows(wholes, -first), self.rows)


def _lengthened(value: Tensor, rows: int) -> Tensor:
    """The same rows, and zeros below them."""
    if len(value) == rows:
        return value
    made = value.new_zeros(rows, *value.shape[1:])
    made[: len(value)] = value
    return made


# ------------------------------------------------------------------ what FSDP2 does to lay out shards


def _shared(weight: ShardedWeight, *_: Any, **__: Any) -> ShardedWeight:
    return ShardedWeight(weight.form, weight.rows, part=weight.part)


def _like(weight: ShardedWeight, *, device: Any = None, **_: Any) -> ShardedWeight:
    """In memory that holds nothing."""
    form = weight.form.each(lambda value: torch.empty_like(value, device=device))
    return ShardedWeight(form, weight.rows, part=weight.part)


def _zeros(weight: ShardedWeight, size: Sequence[int], **_: Any) -> ShardedWeight:
    """With another number of rows, which hold nothing yet."""
    rows = [value.new_zeros(size[0], *value.shape[1:]) for value in weight.form.by_rows]
    return ShardedWeight(weight.form.with_rows(rows), weight.rows, part=True)


def _sliced(
    weight: ShardedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ShardedWeight:
    assert dim == 0 and step == 1, "shards are cut by rows"
    first, last, _ = slice(start, end).indices(len(weight))
    return ShardedWeight(weight.form.narrow(0, first, max(0, last - first)), weight.rows, part=True)


def _split(weight: ShardedWeight, size: int, dim: int = 0) -> list[ShardedWeight]:
    return [_sliced(weight, dim, at, at + size) for at in range(0, len(weight), size)]


def _copied(weight: ShardedWeight, source: Tensor, non_blocking: bool = False) -> ShardedWeight:
    """Rows of the same weight, with which it shares what belongs to all rows."""
    assert isinstance(source, ShardedWeight), "shards are filled by `hold`"
    for own, new in zip(weight.form.by_rows, source.form.by_rows, strict=True):
        own.copy_(new)
    return weight


def _whole(
    weight: ShardedWeight, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> QuantisedWeight:
    """What was gathered, without the zeros below it."""
    return QuantisedWeight(weight.form.narrow(0, 0, size[0]))


_ATEN = torch.ops.aten
_LAID_OUT: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _shared,
    _ATEN.alias.default: _shared,
    _ATEN.view.default: _shared,  # FSDP2 remembers memory by it
    _ATEN.empty_like.default: _like,
    _ATEN.new_zeros.default: _zeros,
    _ATEN.slice.Tensor: _sliced,
    _ATEN.split.Tensor: _split,
    _ATEN.copy_.default: _copied,
    _ATEN.as_strided.default: _whole,
}
