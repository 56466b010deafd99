"""What scales columns and the way back through them: the reference against autograd, kernels against it."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from petune.kernels import reference
from petune.kernels.triton import scaling
from tests.kernels.exactness import DEVICE, DTYPES, assert_as_good, matrix, wider


def test_unscale_in_the_reference_is_autograds() -> None:
    z, columns, own, dy = (matrix(rows, 5, torch.float64, at) for at, rows in enumerate((3, 1, 1, 3)))
    columns, own = columns[0].requires_grad_(), own[0]
    y = z.requires_grad_() * columns + own
    dz, dcolumns = torch.autograd.grad(y, (z, columns), dy)
    found, sums = reference.unscale(dy, y.detach(), columns.detach(), own)
    torch.testing.assert_close(found, dz)
    torch.testing.assert_close(sums / columns.detach(), dcolumns)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (3, 100), (65, 130), (700, 257), (0, 64)])
@pytest.mark.parametrize("there", [False, True])
def test_unscale_is_the_references(dtype: torch.dtype, rows: int, columns: int, there: bool) -> None:
    dy, y = matrix(rows, columns, dtype, 1, strided=True), matrix(rows, columns, dtype, 2)
    scale, own = (matrix(1, columns, torch.float32, at)[0] for at in (3, 4))
    given = dy, y, scale, own if there else None
    pairs = zip(scaling.unscale(*given), reference.unscale(*given), strict=True)
    for (found, same), exact in zip(pairs, reference.unscale(*wider(given)), strict=True):  # type: ignore[misc]
        assert_as_good(found, same, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(1, 16, 1), (70, 300, 16), (33, 130, 40), (64, 64, 65)]
)
def test_vectors_over_lengths_are_the_references(
    dtype: torch.dtype, rows: int, columns: int, rank: int
) -> None:
    weight, a = matrix(rows, columns, dtype, 1, strided=True), matrix(rank, columns, dtype, 2) / 4
    b, by = matrix(rows, rank, dtype, 3, strided=True) / 4, matrix(1, rows, torch.float32, 4)[0]
    given = by, weight, a, b
    exact = by.double() / (weight.double() + b.double() @ a.double()).norm(dim=1)
    assert_as_good(scaling.over_lengths(*given), reference.over_lengths(*given), exact)


@pytest.mark.parametrize("module", [scaling, reference], ids=["triton", "reference"])
def test_a_row_of_zeros_whose_vector_is_zero_is_scaled_by_zero(module: ModuleType) -> None:
    by, weight, a, b = (matrix(*size, torch.float32, 1) for size in ((1, 2), (2, 32), (4, 32), (2, 4)))
    found = module.over_lengths(0 * by[0], 0 * weight, a, 0 * b)
    assert torch.equal(found, torch.zeros(2, device=DEVICE))
