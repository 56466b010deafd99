"""Dropout by index in one kernel: an element is read once and written once, and whether it stays is computed
where it lies.

The arithmetic is that of `petune.rng.dropout`, whose masks these are to the bit. Importing this module makes
it the one that drops whatever `petune.rng.dropout` is asked to drop on a CUDA device, models of plain Hugging
Face layers included.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from petune.rng.dropout import FUSED, MIX, MIX32, Drop, threshold

_A, _B = (tl.constexpr(multiplier) for multiplier in MIX)
_C, _D = (tl.constexpr(multiplier) for multiplier in MIX32)
_NUMBERS = 2048  # of a program at least: 16 a thread


@triton.jit
def hashed(number):
    """`petune.rng.dropout._hashed`."""
    number = (number ^ (number >> 30)) * _A
    number = (number ^ (number >> 27)) * _B
    return number ^ (number >> 31)


@triton.jit
def factors(place, feature, least, scale):
    """float32: `scale` where an element stays, 0 where not; see `stays`."""
    return tl.where(stays(place, feature, least), scale, 0.0)


@triton.jit
def stays(place, feature, least):
    """Whether elements stay, of hashes int64 of places and features int32 in shapes that broadcast."""
    value = feature * ((place >> 32).to(tl.int32) | 1) + place.to(tl.int32)
    value = (value ^ (value >> 16)) * _C
    value = (value ^ (value >> 13)) * _D
    return value >= least


@triton.jit
def placed(numbers, row, rows, base, LOADED: tl.constexpr):
    """The hashes int64 of rows of a matrix. LOADED: base is the address of it."""
    added = tl.load(base) if LOADED else base
    return hashed(tl.load(numbers + row, row < rows, 0) + added)


@triton.jit(do_not_specialize=["rows", "base", "feature", "least"])
def _drop(
    x, numbers, y, rows, columns, x_stride, base, feature, least, scale,
    LOADED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = placed(numbers, row, rows, base, LOADED)
    factor = factors(place[:, None], (feature + column)[None], least, scale)
    there, inside = row[:, None], (row < rows)[:, None] & (column < columns)[None]
    # A product, not a choice: what is dropped but not finite leaves its trace, as in torch's own dropout.
    values = tl.load(x + there * x_stride + column[None], inside, 0.0).to(tl.float32) * factor
    tl.store(y + there * columns + column[None], values.to(y.dtype.element_ty), inside)


def drop(x: Tensor, how: Drop | None) -> Tensor:
    """`reference.drop`; float32, bfloat16 or float16. Strided rows give a dense result."""
    if how is None or how.p == 0:
        return x
    rows, columns = x.shape
    y = x.new_empty(rows, columns)
    if y.numel():
        per, block = _tile(columns)
        numbers, *drawn = draw_of(how)
        _drop[(triton.cdiv(rows, per), triton.cdiv(columns, block))](
            *(x, numbers, y, rows, columns, x.stride(0), *drawn),
            *(isinstance(how.base, Tensor), per, block), num_warps=4,
        )  # fmt: skip
    return y


def draw_of(how: Drop | None, absent: Tensor | None = None) -> tuple[Any, ...]:
    """What a kernel reads of a draw: numbers, base, feature, what an int32 has to reach, and what is left is
    multiplied by; `absent` for numbers of none."""
    if how is None:
        return absent, 0, 0, 0, 1.0
    return how.numbers, how.base, how.feature, threshold(how.p), scaled(how)


def scaled(how: Drop) -> float:
    """What is left is multiplied by."""
    return 1 / (1 - how.p) if how.p < 1 else 0.0


def _tile(columns: int) -> tuple[int, int]:
    """(rows of a program, columns of it)."""
    block = min(triton.next_power_of_2(columns), _NUMBERS)
    return _NUMBERS // block, block


FUSED["cuda"] = drop
