"""Products of rows in groups: the kernels against plain torch, both against float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels import grouped_reference
from petune.kernels.triton import grouped
from petune.kernels.triton.grouped import GroupedTile
from tests.kernels.exactness import DEVICE, DTYPES, assert_as_good, matrix, wider

SMALL = GroupedTile(16, 32, 16, 4, 2)  # so that few rows are several tiles
SIZES = {
    "the first and the last are empty": (0, 17, 0, 5, 48, 0),
    "one has all rows": (0, 0, 70, 0),
    "one row each": (1, 1, 1),
    "a single group": (33,),
    "whole tiles": (16, 32, 16),
}
each_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def ends_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int().to(DEVICE)


def stack(groups: int, k: int, n: int, dtype: torch.dtype, seed: int) -> Tensor:
    return matrix(groups * k, n, dtype, seed).view(groups, k, n)


def some_rows(m: int, of: int, seed: int) -> Tensor:
    return torch.randint(of, (m,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_product_as_good(
    x: Tensor, weight: Tensor, ends: Tensor, tile: GroupedTile | None = None, **how: Any
) -> None:
    found = grouped.product(x, weight, ends, tile=tile, **how)
    wide = {name: wider(value) if name != "rows" else value for name, value in how.items()}
    exact = grouped_reference.product(x.double(), weight.double(), ends, **wide)
    assert_as_good(found, grouped_reference.product(x, weight, ends, **how), exact)


# ------------------------------------------------------------------ products


@pytest.mark.crossed(1)
@each_dtype
@each_size
def test_a_product_by_index_with_an_update_is_the_references(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    m, groups = sum(sizes), len(sizes)
    x, weight = matrix(9, 48, dtype, 1, strided=True), stack(groups, 48, 64, dtype, 2)
    low, up = matrix(m, 16, dtype, 3, strided=True), stack(groups, 16, 64, dtype, 4) / 4
    ends, rows = ends_of(sizes), some_rows(m, 9, 5)
    assert_product_as_good(x, weight, ends, SMALL, rows=rows, low=low, up=up)
    assert_product_as_good(x[rows], weight, ends, SMALL)


@each_dtype
@pytest.mark.parametrize(
    ("k", "n", "rank"), [(40, 50, 8), (8, 70, 1), (130, 8, 0), (16, 33, 64), (7, 5, 0), (48, 40, 80)]
)
def test_sizes_that_no_tile_divides_and_every_rank_are_the_references(
    k: int, n: int, rank: int, dtype: torch.dtype
) -> None:
    x, weight, ends = matrix(21, k, dtype, 1), stack(3, k, n, dtype, 2), ends_of((4, 0, 17))
    how = {"low": matrix(21, rank, dtype, 3), "up": stack(3, rank, n, dtype, 4) / 4} if rank else {}
    assert_product_as_good(x, weight, ends, **how)  # by the rule's tiles


@each_dtype
def test_strides_of_weights_and_factors_do_not_matter(dtype: torch.dtype) -> None:
    x, low, ends = matrix(20, 32, dtype, 1), matrix(20, 8, dtype, 2), ends_of((3, 17))
    weight, up = stack(2, 64, 32, dtype, 3).transpose(1, 2), stack(2, 64, 8, dtype, 4).transpose(1, 2)
    assert_product_as_good(x, weight, ends, SMALL, low=low, up=up)
    apart = matrix(2 * 32 * 64, 2, dtype, 5)[:, 0].view(2, 32, 64)  # no dim of which is dense
    assert 1 not in apart.stride()
    assert_product_as_good(x, apart, ends, SMALL)
    turned = matrix(32, 20, dtype, 6).T
    assert_product_as_good(turned, weight, ends, SMALL, low=matrix(8, 20, dtype, 7).T, up=up)


@each_dtype
def test_tiles_of_the_largest_shapes_are_right_too(dtype: torch.dtype) -> None:
    x, weight, ends = matrix(200, 64, dtype, 1), stack(1, 64, 512, dtype, 2), ends_of((200,))
    assert grouped.product_tile(200, 64, 512, 1, torch.bfloat16)[:3] == (128, 256, 64)
    assert_product_as_good(x, weight, ends, low=matrix(200, 16, dtype, 3), up=stack(1, 16, 512, dtype, 4))


def test_an_update_is_not_lost_in_rounding() -> None:
    x, weight, ends = matrix(40, 64, torch.bfloat16, 1), stack(2, 64, 64, torch.bfloat16, 2), ends_of((9, 31))
    low, up = matrix(40, 8, torch.bfloat16, 3), stack(2, 8, 64, torch.bfloat16, 4) / 256
    with_it, without = (grouped.product(x, weight, ends, **how) for how in ({"low": low, "up": up}, {}))
    update = grouped_reference.product(low.double(), up.double(), ends)
    share = ((with_it.double() - without.double()) * update).sum() / update.square().sum()
    assert float(share) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("groups", [1, 32, 33, 70])
def test_every_tile_of_rows_is_somebodys(groups: int) -> None:
    sizes = [at * 7 % 5 for at in range(groups)]
    sizes[0] = 19
    ends = ends_of(tuple(sizes))
    m = int(ends[-1])
    x, weight = torch.ones(m, 1, device=DEVICE), torch.arange(1.0, groups + 1, device=DEVICE)[:, None, None]
    found = grouped.product(x, weight, ends, tile=GroupedTile(16, 16, 16, 4, 2))
    assert torch.equal(found[:, 0], weight[:, 0, 0].repeat_interleave(torch.tensor(sizes, device=DEVICE)))


# ------------------------------------------------------------------ outer products


@pytest.mark.crossed(1)
@each_dtype
@each_size
@pytest.mark.parametrize(("k", "n"), [(70, 16), (8, 50), (16, 16), (33, 80)])
def test_outer_products_are_the_references_and_zeros_of_empty_groups(
    k: int, n: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    m, ends = sum(sizes), ends_of(sizes)
    x, dy, rows = matrix(9, k, dtype, 1, strided=True), matrix(m, n, dtype, 2), some_rows(m, 9, 3)
    found = grouped.outer(x, dy, ends, x_rows=rows, tile=GroupedTile(32, 16, 16, 4, 2))
    exact = grouped_reference.outer(x.double(), dy.double(), ends, x_rows=rows)
    assert_as_good(found, grouped_reference.outer(x, dy, ends, x_rows=rows), exact)
    other = grouped.outer(dy, x, ends, dy_rows=rows)
    assert_as_good(other, grouped_reference.outer(dy, x, ends, dy_rows=rows), exact.transpose(1, 2))
    assert not any(found[at].any() for at, size in enumerate(sizes) if not size)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_what_is_not_a_number_stays_in_its_group() -> None:
    x, dy, ends = matrix(20, 16, torch.float32, 1), matrix(20, 16, torch.float32, 2), ends_of((7, 13))
    x[7:] = float("nan")
    weight = stack(2, 16, 16, torch.float32, 3)
    assert not grouped.product(x, weight, ends)[:7].isnan().any()
    found = grouped.outer(x, dy, ends)
    assert not found[0].isnan().any() and found[1].isnan().all()


# ------------------------------------------------------------------ both


def test_no_rows_give_no_rows_and_zero_gradients() -> None:
    ends = ends_of((0, 0))
    x, weight = torch.empty(0, 8, device=DEVICE), stack(2, 8, 16, torch.float32, 1)
    assert grouped.product(x, weight, ends).shape == (0, 16)
    assert torch.equal(grouped.outer(x, x, ends), torch.zeros(2, 8, 8, device=DEVICE))


def test_the_same_call_gives_the_same_bits() -> None:
    x, ends = matrix(60, 40, torch.bfloat16, 1), ends_of((20, 0, 40))
    weight = stack(3, 40, 24, torch.bfloat16, 2)
    calls = (lambda: grouped.product(x, weight, ends), lambda: grouped.outer(x, x, ends))
    assert all(
        torch.equal(one, other) for call in calls for one, other in pairwise([call() for _ in range(3)])
    )
