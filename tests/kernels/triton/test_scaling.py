"""The way back through scaled columns: the reference against autograd, the kernel against it."""

from __future__ import annotations

import pytest
import torch

from petune.kernels import reference
from petune.kernels.triton import scaling
from tests.kernels.exactness import DTYPES, assert_as_good, matrix, wider


def test_unscale_in_the_reference_is_autograds() -> None:
    z, columns, own, dy = (matrix(rows, 5, torch.float64, at) for at, rows in enumerate((3, 1, 1, 3)))
    columns, own = columns[0].requires_grad_(), own[0]
    y = z.requires_grad_() * columns + own
    dz, dcolumns = torch.autograd.grad(y, (z, columns), dy)
    found, sums = reference.unscale(dy, y.detach(), columns.detach(), own)
    torch.testing.assert_close(found, dz)
    torch.testing.assert_close(sums / columns.detach(), dcolumns)


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
