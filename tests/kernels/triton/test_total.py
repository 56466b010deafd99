"""The sum of terms, rounded once: the kernel against the reference, for rows that lie apart too."""

from __future__ import annotations

import pytest
import torch

from petune.kernels import reference
from petune.kernels.triton.total import BLOCK, total
from tests.kernels.exactness import DEVICE, DTYPES, assert_as_good, matrix


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 100, BLOCK + 16, 0])
def test_terms_are_summed_and_rounded_once(dtype: torch.dtype, terms: int, size: int) -> None:
    rows = matrix(terms, size, dtype, 0, strided=True)
    found, same, exact = (
        torch.empty(size, dtype=kind, device=DEVICE) for kind in (dtype, dtype, torch.float64)
    )
    total(rows, found)
    reference.total(rows, same)
    reference.total(rows.double(), exact)
    assert_as_good(found, same, exact)
