"""Low-rank products with an input of which each update drops elements of its own: no dropped copy of a matrix
is written.

Which elements stay is computed where they lie (petune.kernels.triton.dropout), three integer products and six
other instructions for each, about what reading them takes. What stays is multiplied as it is; 1 / (1 - p)
comes into the sum in float32.

Updates of one rank that drop alike, those of q, k and v say, are one launch of up to `TOGETHER`; a rank above
`residual.MAX_RANK` is computed as several updates that drop the same elements. Sums over a matrix's rows or
columns are shared between programs and added up in one order, as in petune.kernels.triton.activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.triton.dropout import placed, scaled, stays
from petune.kernels.triton.residual import MAX_RANK, Tile, multiprocessors, padded, shares, total
from petune.rng.dropout import Drop, threshold

TOGETHER = 3  # updates of a launch at most


# ------------------------------------------------------------------ what is launched together


@dataclass
class _Launch:
    """Updates of the same rank that drop with the same probability in the same places; ranks: those of all of
    them, from `start` on."""

    start: int
    rank: int
    scale: float
    hows: list[Drop]

    @property
    def ranks(self) -> slice:
        return slice(self.start, self.start + self.rank * len(self.hows))

    def takes(self, rank: int, scale: float, how: Drop) -> bool:
        """Whether an update may come with those that are here."""
        one = self.hows[0]
        where = (one.p, one.feature, one.numbers.data_ptr(), type(one.base))
        alike = where == (how.p, how.feature, how.numbers.data_ptr(), type(how.base))
        return len(self.hows) < TOGETHER and alike and (rank, scale) == (self.rank, self.scale)

    @property
    def draws(self) -> tuple[Any, ...]:
        """The places, the bases, the first feature, and what an element's hash has to reach."""
        one = self.hows[0]
        bases = [how.base for how in self.hows] + [one.base] * (TOGETHER - len(self.hows))
        return one.numbers, *bases, one.feature, threshold(one.p), self.scale * scaled(one)

    @property
    def constants(self) -> dict[str, Any]:
        """What a kernel is compiled for."""
        loaded = isinstance(self.hows[0].base, Tensor)
        return {"LOADED": loaded, "PARTS": len(self.hows), "RANK": self.rank, "R": padded(self.rank)}


def _launches(
    ranks: Sequence[int], hows: Sequence[Drop | None], scales: Sequence[float] | None = None
) -> list[_Launch]:
    found: list[_Launch] = []
    some, start = next(how for how in hows if how is not None), 0
    for rank, how, scale in zip(ranks, hows, scales or [1.0] * len(ranks), strict=True):
        drop = some._replace(p=0.0) if how is None else how
        pieces = -(-rank // MAX_RANK)
        for own in (rank * (at + 1) // pieces - rank * at // pieces for at in range(pieces)):
            if found and found[-1].takes(own, scale, drop):
                found[-1].hows.append(drop)
            else:
                found.append(_Launch(start, own, scale, [drop]))
            start += own
    return found


@triton.jit
def _of(at, first, second, third, LOADED: tl.constexpr, PARTS: tl.constexpr):
    """The base of update `at`."""
    found = tl.load(first) if LOADED else first
    if PARTS > 1:
        found = tl.where(at == 1, tl.load(second) if LOADED else second, found)
    if PARTS > 2:
        found = tl.where(at == 2, tl.load(third) if LOADED else third, found)
    return found


# ------------------------------------------------------------------ s = drop(x) a^T


def dropped_low(x: Tensor, a: Tensor, ranks: Sequence[int], hows: Sequence[Drop | None]) -> Tensor:
    """`petune.kernels.reference.dropped_low`."""
    if not len(x):
        return x.new_empty(0, len(a))
    pieces = [_low(x, a[one.ranks], one) for one in _launches(ranks, hows)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _low(x: Tensor, a: Tensor, one: _Launch) -> Tensor:
    (rows, columns), tile, count = x.shape, _low_tile(x.dtype), len(one.hows)
    walks = triton.cdiv(rows, tile.rows) * count
    split = shares(walks, triton.cdiv(columns, tile.columns), multiprocessors(x.device) * tile.resident)
    out = torch.empty((split, rows, len(a)), dtype=torch.float32 if split > 1 else x.dtype, device=x.device)
    _low_kernel[(walks * split,)](
        *(x, a, out, rows, columns, split, x.stride(0), a.stride(0), *one.draws),
        **one.constants, BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return total(out, x.dtype) if split > 1 else out[0]


def _low_tile(dtype: torch.dtype) -> Tile:
    return Tile(32, 32, 4, 2, 2) if dtype.itemsize == 4 else Tile(64, 64, 4, 3, 2)


@triton.jit(do_not_specialize=["rows", "split", "base", "base1", "base2", "feature", "least"])
def _low_kernel(
    x, a, out, rows, columns, split, x_stride, a_stride, numbers, base, base1, base2, feature, least, scale,
    LOADED: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    share, at = tl.program_id(0) % split, tl.program_id(0) // split % PARTS
    row = (tl.program_id(0) // split // PARTS).to(tl.int64) * BM + tl.arange(0, BM)
    place = placed(numbers, row, rows, _of(at, base, base1, base2, LOADED, PARTS), False)[:, None]
    k = tl.arange(0, R)
    a += at.to(tl.int64) * RANK * a_stride + k.to(tl.int64)[:, None] * a_stride
    found = tl.zeros((BM, R), tl.float32)
    for start in tl.range(share * BN, columns, split * BN, num_stages=STAGES):
        col = start + tl.arange(0, BN)
        inside = (row < rows)[:, None] & (col < columns)[None]
        value = tl.load(x + row[:, None] * x_stride + col[None], inside, 0.0)
        value = tl.where(stays(place, (feature + col)[None], least), value, 0.0).to(x.dtype.element_ty)
        factor = tl.load(a + col[None], (k < RANK)[:, None] & (col < columns)[None], 0.0)
        found = tl.dot(value, tl.trans(factor), found, input_precision="ieee")
    out += (share.to(tl.int64) * rows + row)[:, None] * (PARTS * RANK) + at * RANK + k[None]
    tl.store(out, (found * scale).to(out.dtype.element_ty), (row < rows)[:, None] & (k < RANK)[None])


# ------------------------------------------------------------------ scale * ds^T drop(x)


def dropped_low_backward(
    ds: Tensor, x: Tensor, ranks: Sequence[int], hows: Sequence[Drop | None], scales: Sequence[float]
) -> Tensor:
    """`petune.kernels.reference.dropped_low_backward`."""
    if not len(x):
        return torch.zeros(ds.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    pieces = [_low_backward(ds[:, one.ranks], x, one) for one in _launches(ranks, hows, scales)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _low_backward(ds: Tensor, x: Tensor, one: _Launch) -> Tensor:
    (rows, columns), tile, count = x.shape, _low_backward_tile(x.dtype), len(one.hows)
    walks = triton.cdiv(columns, tile.columns) * count
    split = shares(walks, triton.cdiv(rows, tile.rows), multiprocessors(x.device) * tile.resident)
    out = torch.empty((split, ds.shape[1], columns), dtype=torch.float32, device=x.device)
    _low_backward_kernel[(walks * split,)](
        *(ds, x, out, rows, columns, split, ds.stride(0), x.stride(0), *one.draws),
        **one.constants, BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return total(out, torch.float32)


def _low_backward_tile(dtype: torch.dtype) -> Tile:
    return Tile(32, 32, 8, 2, 2) if dtype.itemsize == 4 else Tile(64, 64, 4, 3, 4)


@triton.jit(do_not_specialize=["rows", "split", "base", "base1", "base2", "feature", "least"])
def _low_backward_kernel(
    ds, x, out, rows, columns, split, ds_stride, x_stride, numbers, base, base1, base2, feature, least, scale,
    LOADED: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(columns, BN)
    at, share = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS // tiles
    col = (tl.program_id(0) // PARTS % tiles) * BN + tl.arange(0, BN)
    added = _of(at, base, base1, base2, LOADED, PARTS)
    feature, k = (feature + col)[None], tl.arange(0, R)
    ds += at * RANK + k[None]
    found = tl.zeros((R, BN), tl.float32)
    for start in tl.range(share * BM, rows, split * BM, num_stages=STAGES):
        row = (start + tl.arange(0, BM)).to(tl.int64)
        live = (row < rows)[:, None]
        value = tl.load(x + row[:, None] * x_stride + col[None], live & (col < columns)[None], 0.0)
        place = placed(numbers, row, rows, added, False)[:, None]
        value = tl.where(stays(place, feature, least), value, 0.0).to(x.dtype.element_ty)
        left = tl.load(ds + row[:, None] * ds_stride, live & (k < RANK)[None], 0.0)
        found = tl.dot(tl.trans(left), value, found, input_precision="ieee")
    out += (share * PARTS + at).to(tl.int64) * RANK * columns + k.to(tl.int64)[:, None] * columns + col[None]
    tl.store(out, found * scale, (k < RANK)[:, None] & (col < columns)[None])


# ------------------------------------------------------------------ dx += drop(ds a)


def add_dropped_low_(
    dx: Tensor, ds: Tensor, a: Tensor, ranks: Sequence[int], hows: Sequence[Drop | None]
) -> Tensor:
    """`petune.kernels.reference.add_dropped_low_`; rounded once for every launch."""
    if dx.numel():
        for one in _launches(ranks, hows):
            _add(dx, ds[:, one.ranks], a[one.ranks], one)
    return dx


def _add(dx: Tensor, ds: Tensor, a: Tensor, one: _Launch) -> None:
    (rows, columns), tile = dx.shape, _add_tile(dx.dtype, len(one.hows))
    walks = triton.cdiv(rows, tile.rows)
    split = shares(walks, triton.cdiv(columns, tile.columns), multiprocessors(dx.device) * tile.resident)
    _add_kernel[(walks * split,)](
        *(dx, ds, a, rows, columns, split, dx.stride(0), ds.stride(0), a.stride(0), *one.draws),
        **one.constants, BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def _add_tile(dtype: torch.dtype, parts: int) -> Tile:
    if dtype.itemsize == 4:
        return Tile(32, 32, 8, 1, 2)
    return Tile(64, 32, 4, 3, 2) if parts > 2 else Tile(64, 64, 8, 3, 2)


@triton.jit(do_not_specialize=["rows", "split", "base", "base1", "base2", "feature", "least"])
def _add_kernel(
    dx, ds, a, rows, columns, split, dx_stride, ds_stride, a_stride, numbers, base, base1, base2, feature, least, scale,
    LOADED: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    share, row = tl.program_id(0) % split, (tl.program_id(0) // split).to(tl.int64) * BM + tl.arange(0, BM)
    k = tl.arange(0, R)
    ds += row[:, None] * ds_stride + k[None]
    a += k.to(tl.int64)[:, None] * a_stride
    some = (row < rows)[:, None] & (k < RANK)[None]
    place = placed(numbers, row, rows, base, LOADED)[:, None]
    left = tl.load(ds, some, 0.0)
    if PARTS > 1:
        place1, left1 = placed(numbers, row, rows, base1, LOADED)[:, None], tl.load(ds + RANK, some, 0.0)
    if PARTS > 2:
        place2, left2 = placed(numbers, row, rows, base2, LOADED)[:, None], tl.load(ds + 2 * RANK, some, 0.0)
    for start in tl.range(share * BN, columns, split * BN, num_stages=STAGES):
        col = start + tl.arange(0, BN)
        inside, factors = (
            (row < rows)[:, None] & (col < columns)[None],
            (k < RANK)[:, None] & (col < columns)[None],
        )
        feature_here, right = (feature + col)[None], a + col[None]
        value = tl.load(dx + row[:, None] * dx_stride + col[None], inside, 0.0).to(tl.float32)
        value += _update(left, right, factors, place, feature_here, least, scale)
        if PARTS > 1:
            value += _update(left1, right + RANK * a_stride, factors, place1, feature_here, least, scale)
        if PARTS > 2:
            value += _update(left2, right + 2 * RANK * a_stride, factors, place2, feature_here, least, scale)
        tl.store(dx + row[:, None] * dx_stride + col[None], value.to(dx.dtype.element_ty), inside)


@triton.jit
def _update(left, right, inside, place, feature, least, scale):
    """drop(ds a) on a tile."""
    product = tl.dot(left, tl.load(right, inside, 0.0), input_precision="ieee")
    return tl.where(stays(place, feature, least), product * scale, 0.0)
