"""Products of rows that lie in groups, each with a weight of its own group.

Where a group ends is known on the device alone. A launch therefore has as many programs as the groups could
have tiles of rows at most, and each program finds its group: it counts the tiles of all groups, a few hundred
numbers. The programs that are left over stop there. Programs beside each other work on the same group, so a
weight comes from memory once.

Rows may be read by their number, so that no sorted copy of them is written, and a low-rank update is added
before the sum is rounded. A last tile reads its group's last row in the place of rows behind it.

A gradient of factors sums a group's rows in one program for each tile of it, in their order: nothing is
added up atomically, and the same call gives the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.triton.residual import MAX_RANK, dense_rows, power_of


class GroupedTile(NamedTuple):
    """Rows and columns of a program's result, and how many products of each it sums at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# ------------------------------------------------------------------ x W + low up


def product(
    x: Tensor, weight: Tensor, ends: Tensor, *, rows: Tensor | None = None, low: Tensor | None = None,
    up: Tensor | None = None, tile: GroupedTile | None = None,
) -> Tensor:  # fmt: skip
    """`petune.kernels.grouped_reference.product`, rounded once; tile: None for the rule's."""
    m, (groups, k, n) = len(x if rows is None else rows), weight.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    tile = tile or product_tile(m, k, n, groups, x.dtype)
    x, low, rank = dense_rows(x), None if low is None else dense_rows(low), 0 if low is None else low.shape[1]
    tiles = min(m, (m + groups * (tile.rows - 1)) // tile.rows)
    _product_kernel[(tiles * triton.cdiv(n, tile.columns),)](
        *(x, weight, ends, rows, low, up, y, groups, k, weight.stride(0), 0 if up is None else up.stride(0)),
        **_product_form(tile, groups, k, n, rank), **_strides(x, weight, low, up),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def product_tile(m: int, k: int, n: int, groups: int, dtype: torch.dtype) -> GroupedTile:
    """Of a product of m rows: narrow ones wait for memory, so many small programs read at once; of wide ones
    a tile as large as registers hold, but for groups of few rows."""
    if dtype.itemsize == 4:
        tile = GroupedTile(32, power_of(n, 64), 32, 4, 2)
    elif n <= MAX_RANK:
        tile = GroupedTile(64, power_of(n, MAX_RANK), 128, 4, 4)
    elif m < 96 * groups:
        tile = GroupedTile(64, 128, 64, 4, 4)
    elif n < 512:
        tile = GroupedTile(128, 128, 64, 8, 4)
    else:
        tile = GroupedTile(128, 256, 64, 8, 3)
    return tile._replace(depth=power_of(k, tile.depth))


def _strides(x: Tensor, weight: Tensor, low: Tensor | None, up: Tensor | None) -> dict[str, int]:
    """Those of a model's sizes. As constants they tell the compiler how many bytes it may read at once, for
    ranks below 16 too."""
    w_row, w_col = weight.stride()[1:]
    up_row, up_col = (0, 0) if up is None else up.stride()[1:]
    of_low = {"LOW_ROW": 0 if low is None else low.stride(0), "UP_ROW": up_row, "UP_COL": up_col}
    return {"X_ROW": x.stride(0), "W_ROW": w_row, "W_COL": w_col} | of_low


def _product_form(tile: GroupedTile, groups: int, k: int, n: int, rank: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    sizes = {
        "N": n,
        "RANK": rank,
        "R": power_of(rank, MAX_RANK),
        "GROUPS": max(32, power_of(groups)),
    }
    even = k % tile.depth == 0 and n % tile.columns == 0
    return sizes | {"EVEN": even, "BM": tile.rows, "BN": tile.columns, "BK": tile.depth}


@triton.jit
def _product_kernel(
    x, weight, ends, rows, low, up, y, groups, k, w_group, up_group,
    N: tl.constexpr, X_ROW: tl.constexpr, W_ROW: tl.constexpr, W_COL: tl.constexpr,
    LOW_ROW: tl.constexpr, UP_ROW: tl.constexpr, UP_COL: tl.constexpr,
    GROUPS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    group, tile = _group_of(ends, tl.program_id(0) // across, groups, GROUPS, BM)
    if group >= groups:
        return
    start, end = _span(ends, group)
    row = start + tile * BM + tl.arange(0, BM)
    col = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    source = tl.minimum(row, end - 1)
    if rows is not None:
        source = tl.load(rows + source)
    inner = tl.arange(0, BK)
    left = x + source.to(tl.int64)[:, None] * X_ROW + inner[None, :]
    right = weight + group.to(tl.int64) * w_group + inner[:, None] * W_ROW + col[None, :] * W_COL
    live, inside = (row < end)[:, None], (col < N)[None, :]
    if RANK:
        low += row.to(tl.int64)[:, None] * LOW_ROW
        up += group.to(tl.int64) * up_group + col[None, :] * UP_COL
        left_low, right_up = _factors(low, up, UP_ROW, 0, live, inside, RANK, R)
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        if EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            some = at + inner < k
            a = tl.load(left, mask=some[None, :], other=0.0)
            b = tl.load(right, mask=some[:, None] & inside, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += BK
        right += BK * W_ROW
    if RANK:
        # chosen here, what is on its way since before the loop is not waited for there
        rank = tl.arange(0, R)
        left_low = tl.where((rank < RANK)[None, :], left_low, 0.0)
        right_up = tl.where((rank < RANK)[:, None], right_up, 0.0)
        total = tl.dot(left_low, right_up, total, input_precision="ieee")
        for first in range(R, RANK, R):
            left_low, right_up = _factors(low, up, UP_ROW, first, live, inside, RANK, R)
            total = tl.dot(left_low, right_up, total, input_precision="ieee")
    place = y + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=live & inside)


@triton.jit
def _factors(low, up, UP_ROW: tl.constexpr, first, live, inside, RANK: tl.constexpr, R: tl.constexpr):
    """R ranks from `first` on: the rows of low, the columns of up."""
    rank = first + tl.arange(0, R)
    left = tl.load(low + rank[None, :], mask=live & (rank < RANK)[None, :], other=0.0)
    return left, tl.load(up + rank[:, None] * UP_ROW, mask=(rank < RANK)[:, None] & inside, other=0.0)


@triton.jit
def _group_of(ends, tile, groups, GROUPS: tl.constexpr, BM: tl.constexpr):
    """(the group that a tile of BM rows belongs to, the tile's number in it), of all groups' tiles one behind
    the other; the number of a group that is not there for tiles behind the last."""
    at = tl.arange(0, GROUPS)
    end = tl.load(ends + at, mask=at < groups, other=0)
    start = tl.load(ends + at - 1, mask=(at > 0) & (at < groups), other=0)
    behind = tl.cumsum((end - start + BM - 1) // BM, 0)
    before = behind <= tile
    return tl.sum(before.to(tl.int32), 0), tile - tl.max(tl.where(before, behind, 0), 0)


@triton.jit
def _span(ends, group):
    """(the first row of a group, the row behind its last)."""
    return tl.load(ends + group - 1, mask=group > 0, other=0), tl.load(ends + group)


# ------------------------------------------------------------------ x^T dy


def outer(
    x: Tensor, dy: Tensor, ends: Tensor, *, x_rows: Tensor | None = None, dy_rows: Tensor | None = None,
    tile: GroupedTile | None = None,
) -> Tensor:  # fmt: skip
    """`petune.kernels.grouped_reference.outer`; tile: None for the rule's, its rows the wider matrix's."""
    found = torch.empty((len(ends), x.shape[1], dy.shape[1]), dtype=x.dtype, device=x.device)
    if not found.numel():
        return found
    sides = [(dense_rows(x), x_rows), (dense_rows(dy), dy_rows)]
    out = found
    if x.shape[1] < dy.shape[1]:
        sides, out = sides[::-1], found.transpose(1, 2)
    (left, left_rows), (right, right_rows) = sides
    k, n = left.shape[1], right.shape[1]
    tile = tile or outer_tile(k, n, x.dtype)
    _outer_kernel[(len(ends) * triton.cdiv(k, tile.rows) * triton.cdiv(n, tile.columns),)](
        *(left, right, ends, left_rows, right_rows, out, out.stride(0)),
        **_outer_form(tile, left, right, out), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return found


def outer_tile(k: int, n: int, dtype: torch.dtype) -> GroupedTile:
    """Of an outer product of k columns and no more than n; `depth` is of rows."""
    if dtype.itemsize == 4:
        return GroupedTile(power_of(k, 32), power_of(n, 64), 32, 4, 2)
    if n <= MAX_RANK:
        return GroupedTile(power_of(k, 128), power_of(n, MAX_RANK), 64, 4, 4)
    return GroupedTile(128, 128, 64, 8, 3)


def _outer_form(tile: GroupedTile, left: Tensor, right: Tensor, out: Tensor) -> dict[str, Any]:
    """What the kernel is compiled for."""
    _, row, column = out.stride()
    strides = {"LEFT": left.stride(0), "RIGHT": right.stride(0), "O_ROW": row, "O_COL": column}
    sizes = {"K": left.shape[1], "N": right.shape[1], "BM": tile.rows, "BN": tile.columns, "BK": tile.depth}
    return strides | sizes


@triton.jit
def _outer_kernel(
    left, right, ends, left_rows, right_rows, out, o_group,
    K: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, O_ROW: tl.constexpr, O_COL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(K, BM), tl.cdiv(N, BN)
    tile = tl.program_id(0)
    group = tile // (down * across)
    start, end = _span(ends, group)
    col_l = (tile // across % down) * BM + tl.arange(0, BM)
    col_r = (tile % across) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(start, end, BK):
        row = at + tl.arange(0, BK)
        live = row < end
        row_l = row if left_rows is None else tl.load(left_rows + row, mask=live, other=0)
        row_r = row if right_rows is None else tl.load(right_rows + row, mask=live, other=0)
        place = left + row_l.to(tl.int64)[:, None] * LEFT + col_l[None, :]
        a = tl.load(place, mask=live[:, None] & (col_l < K)[None, :], other=0.0)
        place = right + row_r.to(tl.int64)[:, None] * RIGHT + col_r[None, :]
        b = tl.load(place, mask=live[:, None] & (col_r < N)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    place = out + group.to(tl.int64) * o_group + col_l[:, None] * O_ROW + col_r[None, :] * O_COL
    tl.store(place, total.to(out.dtype.element_ty), mask=(col_l < K)[:, None] & (col_r < N)[None, :])
