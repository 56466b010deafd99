"""Eight-bit integers with a scale a row: values within half a step, products no worse than bitsandbytes', and
slices that are those of the whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bitsandbytes import functional

from petune.models.int8 import Int8


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def test_it_takes_a_byte_a_number_and_four_a_row() -> None:
    form = Int8.of(torch.randn(48, 64).bfloat16())
    assert form.nbytes == 48 * 64 + 4 * 48 and form.shape == (48, 64) and form.dtype == torch.bfloat16


def test_values_are_within_half_a_step_of_their_own_row_and_zeros_stay() -> None:
    weight = torch.randn(48, 60) * torch.logspace(-6, 6, 48)[:, None]
    weight[7] = 0
    form = Int8.of(weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((form.dense() - weight).abs() <= 0.5001 * step).all())
    assert torch.equal(form.dense().abs().argmax(1)[:7], weight.abs().argmax(1)[:7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_no_farther_from_float64_than_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    weight, x = torch.randn(96, 256).to(dtype), torch.randn(40, 256).to(dtype)
    form, exact = Int8.of(weight), x.double() @ weight.double().T
    (x8, x_scale, _), (w8, w_scale, _) = (functional.int8_vectorwise_quant(one.half()) for one in (x, weight))
    its = functional.int8_mm_dequant(functional.int8_linear_matmul(x8, w8), x_scale, w_scale)
    assert (form.linear(x).double() - exact).norm() <= (its.double() - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_both_products_are_those_of_the_values(dtype: torch.dtype) -> None:
    form = Int8.of(torch.randn(48, 64).to(dtype))
    x, dy = torch.randn(9, 64).to(dtype), torch.randn(9, 48).to(dtype)
    assert torch.equal(form.linear(x), x @ form.dense().T)
    assert torch.equal(form.dlinear(dy), dy @ form.dense())


def test_a_slice_has_the_scales_of_whole_rows() -> None:
    whole = Int8.of(torch.randn(48, 64))
    part = whole.narrow(0, 5, 30).narrow(1, 3, 50)
    assert torch.equal(part.dense(), whole.dense()[5:35, 3:53])
