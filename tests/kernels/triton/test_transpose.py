"""A turned matrix of bytes: every byte of it, of whole squares and of pieces, of views too."""

from __future__ import annotations

import pytest
import torch

from petune.kernels import reference
from petune.kernels.triton.transpose import TILE, transposed
from tests.kernels.exactness import DEVICE

SIZES = [(1, 1), (16, 48), (TILE, TILE), (TILE + 16, 2 * TILE - 32), (3, TILE + 1)]


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_every_byte_is_where_the_references_is(n: int, k: int) -> None:
    bits = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n * k))
    q = bits.to(DEVICE).view(torch.float8_e4m3fn)
    found = transposed(q)
    assert found.is_contiguous() and found.dtype == q.dtype
    assert torch.equal(found.view(torch.uint8), reference.transposed(q).view(torch.uint8))


def test_columns_of_a_wider_matrix_are_turned_alone() -> None:
    bits = torch.arange(64, dtype=torch.uint8, device=DEVICE).view(4, 16)
    q = bits[:, 3:9].view(torch.float8_e4m3fn)
    assert torch.equal(transposed(q).view(torch.uint8), bits[:, 3:9].T)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_a_matrix_without_elements_stays_one(shape: tuple[int, int]) -> None:
    q = torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    assert transposed(q).shape == shape[::-1]


def test_matrices_are_turned_as_one_below_the_other() -> None:
    bits = torch.randint(0, 256, (TILE + 48, 32), dtype=torch.uint8, device=DEVICE)
    parts = bits.view(torch.float8_e4m3fn).split([16, TILE, 32])
    for turned in (transposed, reference.transposed):
        assert torch.equal(turned(*parts).view(torch.uint8), bits.T)
