"""Four-bit normal floats (NF4, Dettmers et al. 2023, arXiv:2305.14314) with scales that are quantised again,
and a frozen weight that is held in them: 4.13 bits a number.

Numbers lie row after row in blocks of 64. One is sixteen levels, quantiles of a normal distribution, times
the largest magnitude of its block; these scales, less their mean, lie in blocks of 256 and are eight bits
each, levels of a dynamic exponent times the largest of their block. All of it is bit for bit what
bitsandbytes 0.50 computes on a CPU (`quantize_4bit` with `compress_statistics`), which looks the level of a
scale up on a grid of 65,536 points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.errors import UsageError
from petune.models.form import Form

BLOCK, NESTED = 64, 256  # numbers of a scale, scales of a scale of them
AT_ONCE = 1 << 21  # numbers that are made dense, or quantised, at once
GRID = 65535  # steps from -1 to 1
_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


@lru_cache
def levels(device: torch.device) -> Tensor:
    """The sixteen values of a number in blocks whose largest magnitude is 1, float32 [16]."""
    return torch.tensor(_LEVELS, device=device)


@lru_cache
def dynamic_levels(device: torch.device) -> Tensor:
    """The 256 values of a scale in blocks whose largest magnitude is 1, float32 [256]: signs, decimal
    exponents from -6 to 0, and fractions that are the finer the larger the exponent (Dettmers 2016,
    arXiv:1511.04561)."""
    found = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2**exponent + 1, device="cpu")
        sizes = 10.0 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2)
        found += sizes.tolist() + (-sizes).tolist()
    return torch.tensor(sorted(found), device=device)


def _between(values: Tensor) -> Tensor:
    return (values[1:] + values[:-1]) / 2


def _pieces(flat: Tensor) -> list[slice]:
    """Of a weight, flat, one after the other; one of a weight without memory."""
    most = max(1, len(flat)) if flat.is_meta else AT_ONCE
    return [slice(at, min(at + most, len(flat))) for at in range(0, len(flat), most)]


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(two numbers a byte, the first in its upper half, uint8 [n, k / 2]; the scale of each block)."""
    flat, between = weight.reshape(-1), _between(levels(weight.device))
    q = torch.empty(len(flat) // 2, dtype=torch.uint8, device=weight.device)
    largest = torch.empty(len(flat) // BLOCK, device=weight.device)
    for piece in _pieces(flat):
        blocks = flat[piece].float().view(-1, BLOCK)
        own = blocks.abs().amax(1)
        scaled = (blocks * (1 / own.clamp(min=1e-38)).unsqueeze(1)).clamp(-1, 1)
        places = torch.bucketize(scaled.view(-1), between, out_int32=True).to(torch.uint8)
        q[piece.start // 2 : piece.stop // 2] = (places[::2] << 4) | places[1::2]
        largest[piece.start // BLOCK : piece.stop // BLOCK] = own
    return q.view(len(weight), -1), largest


def _quantised_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """(the place of each scale's level, uint8; the largest magnitude of each block of them)."""
    blocks = F.pad(scales, (0, -len(scales) % NESTED)).view(-1, NESTED)
    largest = blocks.abs().amax(1)
    scaled = blocks * torch.where(largest > 0, 1 / largest, 0).unsqueeze(1)
    on_grid = ((scaled.clamp(-1, 1) + 1) * 0.5 * GRID + 0.5).floor()
    places = torch.bucketize(-1 + 2 * on_grid / GRID, _between(dynamic_levels(scales.device)))
    places = torch.where(largest.unsqueeze(1) > 0, places, 0)
    return places.view(-1)[: len(scales)].to(torch.uint8), largest


def refuse_cut_block(start: int, length: int, inputs: int) -> None:
    """Raise UsageError where `length` of a weight's inputs, from `start` on, are not whole blocks."""
    if start % BLOCK or length % BLOCK:
        what = "base_dtype: nf4 holds inputs in blocks, and this part of them cuts one"
        expected = f"shares of inputs that are multiples of {BLOCK}"
        found = f"inputs {start} to {start + length} of {inputs}"
        remedy = "use base_dtype: int8, or shares of heads and columns that are"
        raise UsageError(what, where="base_dtype", expected=expected, found=found, remedy=remedy)


@dataclass(frozen=True)
class Nf4(Form):
    """A frozen weight [n, k] in NF4; see petune.models.form.Form.

    q: uint8 [n, k / 2], two numbers a byte; scales: uint8 [n, k / 64]; nested: float32, the scale of each
    block of `scales`; mean: float32 [1], of the scales. A slice has both of the whole weight, in which its
    first scale is number `first`, and each row is `stride` scales behind the one above; skips: (row, number),
    that and all below are so many more behind, where rows of the whole are left out above it.
    """

    q: Tensor
    scales: Tensor
    nested: Tensor
    mean: Tensor
    dtype: torch.dtype
    stride: int
    first: int = 0
    skips: tuple[tuple[int, int], ...] = ()
    name: ClassVar[str] = "nf4"
    needs: ClassVar[str] = f"weights with a multiple of {BLOCK} inputs"

    @classmethod
    def refused(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        """What is wrong with a weight of this kind, or None: blocks must not run over the end of a row."""
        return None if shape[1] % BLOCK == 0 else f"a weight of {shape[0]} x {shape[1]}"

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Nf4:
        q, largest = _quantised(weight.detach())
        mean = largest.mean()
        scales, nested = _quantised_scales(largest - mean)
        stride = weight.shape[1] // BLOCK
        return cls(q, scales.view(-1, stride), nested, mean.view(1), weight.dtype, stride)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.q), 2 * self.q.shape[1]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.scales, self.nested, self.mean

    def each(self, act: Callable[[Tensor], Tensor]) -> Nf4:
        q, scales, nested, mean = map(act, self.tensors)
        return replace(self, q=q, scales=scales, nested=nested, mean=mean)

    def narrow(self, dim: int, start: int, length: int) -> Nf4:
        """Its outputs or inputs from `start` on. Raises UsageError where a block would be cut."""
        unit = BLOCK if dim else 1
        if dim:
            refuse_cut_block(start, length, self.shape[1])
        q = self.q.narrow(dim, start // (1 + dim), length // (1 + dim))
        scales = self.scales.narrow(dim, start // unit, length // unit)
        if dim:
            return replace(self, q=q, scales=scales, first=self.first + start // unit)
        return self.with_rows((q, scales), start)

    def picked(self, spans: Sequence[tuple[int, int]]) -> Nf4:
        """See Form; a scale keeps its number in the whole."""
        runs = [run for span in spans for _, run in self.narrow(0, *span).runs()]
        row, number, skips = 0, runs[0].first, list[tuple[int, int]]()
        for run in runs:
            if run.first != number:
                skips.append((row, run.first - number))
            row, number = row + len(run.q), run.first + len(run.q) * self.stride
        return replace(super().picked(spans), first=runs[0].first, skips=tuple(skips))

    def runs(self) -> Iterator[tuple[int, Nf4]]:
        """(the first row, views of the rows) of each run of rows that are one behind the other in the
        whole."""
        begins = sorted({0, *(row for row, _ in self.skips if 0 < row < len(self.q))})
        for begin, end in zip(begins, [*begins[1:], len(self.q)], strict=True):
            own = self.narrow(0, begin, end - begin)
            left = sum(more for row, more in self.skips if row <= begin)
            yield begin, replace(own, first=own.first + left, skips=())

    @property
    def by_rows(self) -> tuple[Tensor, ...]:
        """Numbers and scales; what these are scaled by belongs to all rows."""
        return self.q, self.scales

    def with_rows(self, tensors: Sequence[Tensor], down: int = 0) -> Nf4:
        q, scales = tensors
        skips = tuple((row - down, more) for row, more in self.skips)  # those above too: rows may come back
        return replace(self, q=q, scales=scales, first=self.first + down * self.stride, skips=skips)

    def block_scales(self) -> Tensor:
        """The scale of each block as it multiplies, float32 [n, k / 64]."""
        rows, columns = self.scales.shape
        row = torch.arange(rows, device=self.q.device).unsqueeze(1) * self.stride + self.first
        for begin, more in self.skips:
            row[max(0, begin) :] += more
        block = (row + torch.arange(columns, device=self.q.device)) // NESTED
        level = dynamic_levels(self.q.device)[self.scales.int()]
        return (level * self.nested[block]).add_(self.mean)

    def dense_into(self, out: Tensor) -> None:
        """A level times the scale of its block, multiplied in float32."""
        scales, (rows, columns) = self.block_scales(), self.shape
        high, low = levels(self.q.device).repeat_interleave(16), levels(self.q.device).repeat(16)
        pairs = torch.stack((high, low), 1)
        at_once = max(1, AT_ONCE // max(1, columns))
        for at in range(0, rows, at_once):
            own = slice(at, at + at_once)
            values = pairs[self.q[own].int()].view(-1, columns // BLOCK, BLOCK)
            out[own] = (values * scales[own].unsqueeze(2)).view(-1, columns)
