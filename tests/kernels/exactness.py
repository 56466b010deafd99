"""Matrices for kernels, and the comparison with float64 that allows what torch's own rounding in the same
dtype takes."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, strided: bool = False) -> Tensor:
    """Normally distributed; strided: every row is a part of a longer one."""
    values = torch.randn(rows, columns + 24 * strided, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)[:, :columns]


def wider(value: object) -> object:
    """The same in float64, through tuples."""
    if isinstance(value, tuple):
        return tuple(wider(part) for part in value)
    return value.double() if isinstance(value, Tensor) else value


def assert_as_good(found: Tensor, same: Tensor, exact: Tensor) -> None:
    """No further from float64 than torch in the same dtype is, but for a tenth and 2^-18 of the largest: sums
    in another order round another way where the exact value lies in the middle."""
    assert found.dtype == same.dtype
    assert found.shape == same.shape
    if exact.numel():
        error, allowed = (float((result.double() - exact).abs().max()) for result in (found, same))
        assert error <= 1.1 * allowed + 2**-18 * float(exact.abs().max())
