"""Residuals with a low-rank update, rows as eight-bit floats, sums of partial sums: the reference against
autograd, kernels against it."""

from __future__ import annotations

import pytest
import torch

from petune.kernels import reference
from petune.kernels.triton import residual
from tests.kernels.exactness import DEVICE, DTYPES, assert_as_good, matrix, wider

# ------------------------------------------------------------------ a low-rank update


def test_add_low_in_the_reference_is_differentiated_by_autograd() -> None:
    x, y, s, b = (
        matrix(*shape, torch.float64, seed).requires_grad_()
        for seed, shape in enumerate(((3, 5), (3, 5), (3, 2), (5, 2)))
    )
    assert torch.autograd.gradcheck(lambda x, y, s, b: reference.add_low(x, y, (s, b)), (x, y, s, b))
    torch.testing.assert_close(reference.add_low(x, y, (s, b)), x + y + s @ b.T)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "rank"),
    [(1, 16, 1), (3, 100, 8), (65, 130, 16), (65, 130, 48), (33, 257, 64), (65, 130, 136), (0, 64, 8)],
)
@pytest.mark.parametrize("strided", [False, True])
def test_add_low_is_the_references(
    dtype: torch.dtype, rows: int, columns: int, rank: int, strided: bool
) -> None:
    x, y = matrix(rows, columns, dtype, 1, strided), matrix(rows, columns, torch.float32, 2, not strided)
    low = (matrix(rows, rank, dtype, 3, strided), matrix(columns, rank, dtype, 4, strided))
    kept = x.clone()
    found = residual.add_low(x, y, low)
    assert_as_good(found, reference.add_low(x, y, low), reference.add_low(*wider((x, y, low))))  # type: ignore[misc]
    assert found.is_contiguous()
    assert torch.equal(x, kept)
    beside = torch.full((rows, columns + 32), 7, dtype=dtype, device=DEVICE)
    there = residual.add_low(x, y, low, out=beside[:, 16:-16])
    assert torch.equal(there, found) and there.data_ptr() == beside[:, 16:].data_ptr()
    assert (beside[:, :16] == 7).all() and (beside[:, -16:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("there", [False, True])
def test_add_low_of_scaled_columns_is_the_references(dtype: torch.dtype, there: bool) -> None:
    x, y = (matrix(65, 130, one, at, at == 1) for at, one in enumerate((dtype, torch.float32), 1))
    low = (matrix(65, 16, dtype, 3), matrix(130, 16, dtype, 4))
    given = x if there else None, y, low, matrix(1, 130, torch.float32, 5)[0]
    exact = reference.add_low(*wider(given))  # type: ignore[misc]
    assert_as_good(residual.add_low(*given), reference.add_low(*given), exact)
    own = y.double() * given[3].double() + low[0].double() @ low[1].double().T
    torch.testing.assert_close(exact, own + x.double() if there else own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_with_its_update_is_the_references(dtype: torch.dtype, biased: bool) -> None:
    x, weight = matrix(33, 40, dtype, 1, strided=True), matrix(130, 40, dtype, 2, strided=True)
    bias, low = (
        matrix(1, 130, dtype, 3)[0] if biased else None,
        (matrix(33, 8, dtype, 4), matrix(130, 8, dtype, 5)),
    )
    same, exact = (
        reference.linear_low(x, weight, bias, low),
        reference.linear_low(*wider((x, weight, bias, low))),
    )  # type: ignore[misc]
    found = residual.linear_low(x, weight, bias, low)
    assert_as_good(found, same, exact)
    for form in (residual, reference):
        whole = x.new_zeros(33, 200)
        form.linear_low(x, weight, bias, low, out=whole[:, 10:140])
        assert torch.equal(whole[:, 10:140], found if form is residual else same)
        assert not whole[:, :10].any() and not whole[:, 140:].any()


# ------------------------------------------------------------------ partial sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_total_adds_parts_in_order_and_rounds_once(dtype: torch.dtype, parts: int) -> None:
    values = matrix(parts, 1500, torch.float32, 5).view(parts, 15, 100)
    expected = values[0].clone()
    for part in values[1:]:
        expected += part
    assert torch.equal(residual.total(values, dtype), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 100, residual.TOTAL_BLOCK + 16, 0])
def test_total_adds_rows_that_lie_apart_where_it_is_told_to(
    dtype: torch.dtype, parts: int, size: int
) -> None:
    rows = matrix(parts, size, dtype, 0, strided=True)
    found, same = (torch.empty(size, dtype=dtype, device=DEVICE) for _ in range(2))
    assert residual.total(rows, dtype, found) is found
    reference.total(rows, dtype, same)
    assert_as_good(found, same, reference.total(rows.double(), torch.float64))


@pytest.mark.parametrize(
    ("walks", "steps", "places"), [(64, 448, 396), (224, 256, 396), (1, 5, 3), (1, 1, 396), (1024, 448, 396)]
)
def test_shares_fill_the_device_and_are_no_finer_than_that_takes(walks: int, steps: int, places: int) -> None:
    parts = residual.shares(walks, steps, places)
    assert 1 <= parts <= steps
    ideal = max(walks * steps / places, 1)
    assert -(-walks * parts // places) * -(-steps // parts) <= 1.25 * ideal + 1 or parts == 32


# ------------------------------------------------------------------ eight-bit floats


@pytest.mark.crossed(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "strided"),
    [(1, 16, False), (3, 100, True), (65, 130, False), (2, 4096, True), (0, 16, False), (3, 33000, True)],
)
def test_quantise_is_the_references(dtype: torch.dtype, rows: int, columns: int, strided: bool) -> None:
    x = matrix(rows, columns, dtype, 6, strided) * torch.logspace(-3, 3, rows, device=DEVICE)[:, None].to(
        dtype
    )
    (found, scale), (expected, expected_scale) = residual.quantise(x), reference.quantise(x)
    assert found.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(scale, expected_scale, rtol=2**-22, atol=0.0)
    # one step of the grid apart where the scaled value lies in the middle, and that is rare
    steps = (found.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    assert int(steps.sum()) <= rows * columns // 500


def test_quantise_fills_the_range_keeps_zeros_and_does_not_divide_by_them() -> None:
    x = torch.tensor([[0.0, 1.0, -2.0, 2.0], [0.0, 0.0, 0.0, 0.0]], device=DEVICE)
    q, scale = residual.quantise(x)
    assert q.float().tolist() == [[0.0, 224.0, -448.0, 448.0], [0.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(q.float() * scale, x)


@pytest.mark.skipif(DEVICE == "cuda", reason="the device rounds by an instruction of its own")
def test_rounding_to_eight_bits_without_the_instruction_is_bit_for_bit_torchs() -> None:
    """Every float8, every middle between two of them, and what lies next to a middle, of both signs. 448
    fixes the scale at 1."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (grid[1:] + grid[:-1]) / 2
    near = torch.cat([grid, middles, middles.nextafter(grid[1:]), middles.nextafter(grid[:-1])])
    x = torch.cat([near, -near, torch.tensor([448.0])])[None]
    q, scale = residual.quantise(x)
    assert scale.item() == 1.0
    assert torch.equal(q.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("columns", [64, residual.MAX_COLUMNS + 1])
def test_columns_that_are_scaled_first_count_for_the_range_of_a_row(columns: int) -> None:
    x, by = torch.ones(2, columns, device=DEVICE), torch.ones(columns, device=DEVICE)
    by[-1] = -8.0
    q, scale = residual.quantise(x, by)
    assert q.float()[:, -1].tolist() == [-448.0] * 2 and q.float()[:, 0].tolist() == [56.0] * 2
    torch.testing.assert_close(q.float() * scale, by.expand(2, -1))
