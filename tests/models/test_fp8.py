"""A weight in eight-bit floats: one byte a number, and products that are those of the values it stands
for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from petune.models.fp8 import Fp8, quantise

STEP = 2.0**-4  # half a unit in the last place of e4m3, relative


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def uneven(n: int = 48, k: int = 64) -> torch.Tensor:
    """A weight with a row and a column of another size."""
    weight = torch.randn(n, k)
    weight[3] *= 1000
    weight[:, 5] *= 100
    return weight


def test_it_takes_a_byte_a_number_and_four_a_row() -> None:
    form = Fp8.of(uneven().bfloat16())
    assert form.nbytes == 48 * 64 + 4 * 48 and form.shape == (48, 64) and form.dtype == torch.bfloat16


def test_values_are_within_the_rounding_of_their_own_row() -> None:
    weight = uneven()
    error, largest = (Fp8.of(weight).dense() - weight).abs(), weight.abs().amax(1, keepdim=True)
    assert bool((error <= STEP * weight.abs() + 2.0**-10 / 448 * largest).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_products_are_those_of_the_values_but_for_the_rounding_of_what_comes_in(
    dtype: torch.dtype,
) -> None:
    form, x, dy = Fp8.of(uneven().to(dtype)), torch.randn(9, 64).to(dtype), torch.randn(9, 48).to(dtype)
    dense = form.to(torch.float64).dense()
    for found, left, right in ((form.linear(x), x, dense.T), (form.dlinear(dy), dy, dense)):
        assert found.dtype == dtype
        most = left.double().abs() @ right.abs()
        floor = (
            2.0**-10
            / 448
            * (left.double().abs() @ right.abs().amax(1, keepdim=True)).clamp(min=1)
            * right.shape[0]
        )
        assert bool(((found.double() - left.double() @ right).abs() <= (STEP + 2**-7) * most + floor).all())


def test_what_fits_eight_bits_multiplies_exactly() -> None:
    weight = torch.randint(-8, 9, (16, 32)).float()
    weight[:, 0] = 448
    x, dy = torch.randint(-4, 5, (5, 32)).float(), torch.randint(-4, 5, (5, 16)).float()
    x[:, 0] = dy[:, 0] = 448
    form = Fp8.of(weight)
    assert torch.equal(form.dense(), weight)
    assert torch.equal(form.linear(x), x @ weight.T) and torch.equal(form.dlinear(dy), dy @ weight)


def test_a_factor_of_the_columns_is_taken_in_before_rounding() -> None:
    x, by = torch.randn(4, 8), torch.rand(8) * 1000
    for found, expected in zip(quantise(x, by), quantise(x * by), strict=True):
        assert torch.equal(found.float(), expected.float())


def test_a_slice_multiplies_as_that_slice_of_the_whole_and_holds_nothing_more() -> None:
    whole, x, dy = Fp8.of(uneven()), torch.randn(9, 64), torch.randn(9, 48)
    outputs, inputs = whole.narrow(0, 16, 32), whole.narrow(1, 32, 16)
    assert outputs.shape == (32, 64) and inputs.shape == (48, 16)
    assert torch.equal(outputs.dense(), whole.dense()[16:]) and torch.equal(
        inputs.dense(), whole.dense()[:, 32:48]
    )
    torch.testing.assert_close(outputs.linear(x), whole.linear(x)[:, 16:], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(inputs.dlinear(dy), whole.dlinear(dy)[:, 32:48], rtol=1e-5, atol=1e-3)
    own = torch.zeros_like(x)
    own[:, 32:48] = x[:, 32:48]
    torch.testing.assert_close(inputs.linear(x[:, 32:48]), whole.linear(own), rtol=1e-5, atol=1e-3)


def test_several_lie_together_as_they_are() -> None:
    forms = [Fp8.of(uneven()), Fp8.of(torch.randn(16, 64))]
    assert torch.equal(Fp8.together(forms).dense(), torch.cat([form.dense() for form in forms]))


def test_what_is_written_is_quantised_in_the_same_memory() -> None:
    form, other = Fp8.of(uneven()), torch.randn(48, 64)
    before = form.q.data_ptr()
    form.write(other)
    assert form.q.data_ptr() == before and torch.equal(form.dense(), Fp8.of(other).dense())


@pytest.mark.parametrize("sizes", [(24, 32), (32, 40), (8, 8)])
def test_sizes_that_are_no_multiples_of_sixteen_are_refused(sizes: tuple[int, int]) -> None:
    assert Fp8.refused(torch.device("cpu"), torch.bfloat16, sizes) == f"a weight of {sizes[0]} x {sizes[1]}"


@pytest.mark.parametrize(
    ("capability", "dtype", "found"),
    [
        ((9, 0), torch.bfloat16, None),
        ((8, 9), torch.bfloat16, None),
        ((8, 0), torch.bfloat16, "compute capability 8.0"),
        ((9, 0), torch.float32, "float32"),
    ],
)
def test_what_a_device_must_be(
    capability: tuple[int, int], dtype: torch.dtype, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert Fp8.refused(torch.device("cuda"), dtype, (32, 32)) == found
