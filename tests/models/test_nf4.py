"""Four-bit normal floats: every bit as bitsandbytes makes it, products no worse than its, and slices that are
those of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from torch import Tensor

from petune.errors import UsageError
from petune.models.nf4 import Nf4

SHAPES = [(1, 64), (96, 64), (33, 192), (257, 1024), (3, 14336)]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def theirs(weight: Tensor) -> tuple[Tensor, Any]:
    """What bitsandbytes makes of a weight."""
    return functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)


WEIGHTS = {
    "normal": lambda n, k: torch.randn(n, k),
    "rows of all sizes, one of zeros": lambda n, k: torch.randn(n, k) * torch.arange(n)[:, None] ** 4.0,
    "all alike": lambda n, k: torch.full((n, k), -0.5),
    "levels and what lies between them": lambda n, k: torch.linspace(-1, 1, n * k).view(n, k),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_every_bit_and_every_value_is_that_of_bitsandbytes(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = WEIGHTS[kind](*shape).to(dtype)
    weight = weight.nan_to_num(posinf=1, neginf=-1)
    form, (packed, state) = Nf4.of(weight), theirs(weight)
    assert torch.equal(form.q.view(-1), packed.view(-1)) and torch.equal(form.scales.view(-1), state.absmax)
    assert torch.equal(form.nested, state.state2.absmax) and torch.equal(form.mean[0], state.offset)
    values = functional.dequantize_4bit(packed, state)
    assert values.dtype == dtype == form.dtype and torch.equal(form.dense(), values)


def test_it_takes_just_over_four_bits_a_number() -> None:
    form = Nf4.of(torch.randn(512, 1024))
    assert form.nbytes == 512 * 1024 // 2 + 512 * 16 + 4 * (512 * 16 // 256) + 4
    assert 8 * form.nbytes / (512 * 1024) < 4.13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_no_farther_from_float64_than_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    weight, x, dy = (
        torch.randn(96, 256).to(dtype),
        torch.randn(40, 256).to(dtype),
        torch.randn(40, 96).to(dtype),
    )
    form, (packed, state) = Nf4.of(weight), theirs(weight)
    given = x.clone().requires_grad_()
    y = bitsandbytes.matmul_4bit(given, packed.t(), quant_state=state)
    y.backward(dy)
    wide = weight.double()
    for found, other, exact in (
        (form.linear(x), y.detach(), x.double() @ wide.T),
        (form.dlinear(dy), given.grad, dy.double() @ wide),
    ):
        assert found.dtype == dtype
        mine, its = ((one.double() - exact).norm() for one in (found, other))
        assert float(mine) <= 1.0001 * float(its)  # sums of another order


def test_slices_of_slices_are_those_of_the_whole_and_share_its_memory() -> None:
    whole = Nf4.of(torch.randn(64, 1024))
    values = whole.dense()
    part = whole.narrow(0, 9, 50).narrow(1, 128, 640).narrow(0, 20, 11).narrow(1, 64, 320)
    assert part.shape == (11, 320) and torch.equal(part.dense(), values[29:40, 192:512])
    assert part.q.untyped_storage().data_ptr() == whole.q.untyped_storage().data_ptr()
    copied = part.each(lambda value: value.clone(memory_format=torch.contiguous_format))
    assert torch.equal(copied.dense(), part.dense())
    assert len(part.nested) == len(
        whole.nested
    )  # four bytes for 16,384 numbers, so that ranks need not send it
    x, dy = torch.randn(5, 320), torch.randn(5, 11)
    assert torch.equal(part.linear(x), x @ values[29:40, 192:512].T)
    assert torch.equal(part.dlinear(dy), dy @ values[29:40, 192:512])


def test_rows_that_are_picked_keep_the_scales_of_the_whole_wherever_they_are_taken() -> None:
    whole = Nf4.of(torch.randn(120, 320) * torch.logspace(-2, 2, 120)[:, None])
    spans = [(0, 3), (20, 30), (60, 0), (111, 9)]
    rows = torch.tensor([at for first, length in spans for at in range(first, first + length)])
    values, part = whole.dense()[rows], whole.picked(spans)
    assert torch.equal(part.dense(), values) and part.nbytes < whole.nbytes
    some = part.narrow(0, 1, 40)
    assert torch.equal(some.narrow(1, 64, 192).narrow(0, 1, 35).dense(), values[2:37, 64:256])
    assert torch.equal(some.with_rows(part.by_rows, -1).dense(), values)  # as shards are gathered
    again = [(0, 10), (30, 8)]
    assert torch.equal(some.picked(again).dense(), torch.cat([values[1:11], values[31:39]]))
    found = torch.cat([run.dense() for _, run in part.runs()])
    assert torch.equal(found, values) and all(not run.skips for _, run in part.runs())


@pytest.mark.parametrize(("start", "length"), [(32, 64), (64, 96), (1, 64)])
def test_a_slice_that_cuts_a_block_is_refused(start: int, length: int) -> None:
    with pytest.raises(UsageError, match="multiples of 64"):
        Nf4.of(torch.randn(8, 256)).narrow(1, start, length)


def test_what_is_written_is_quantised_in_the_same_memory() -> None:
    form, other = Nf4.of(torch.randn(48, 64)), torch.randn(48, 64)
    before = form.q.data_ptr()
    form.write(other)
    assert form.q.data_ptr() == before and torch.equal(form.dense(), Nf4.of(other).dense())


def test_pieces_are_those_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 192)
    whole = Nf4.of(weight)
    monkeypatch.setattr("petune.models.nf4.AT_ONCE", 640)
    pieces = Nf4.of(weight)
    assert all(map(torch.equal, pieces.tensors, whole.tensors))
    assert torch.equal(pieces.dense(), whole.dense())
