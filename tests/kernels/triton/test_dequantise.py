"""Quantised weights made dense by kernels: every bit as the forms' own torch makes it, of wholes and of
slices, into rows that lie apart."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from petune.kernels import reference
from petune.kernels.dispatch import triton_ops
from petune.kernels.triton.dequantise import COLUMNS, dense_into
from petune.models.form import DENSE_INTO, Form, ScaledRows
from petune.models.frozen_weight import EXPERT_FORMS, FORMS, QuantisedWeight
from petune.models.nf4 import Nf4
from tests.kernels.exactness import DEVICE

SIZES = [(1, 64), (5, 192), (3, COLUMNS + 64)]


def quantised(name: str, n: int, k: int) -> Form:
    """A weight with rows of different sizes."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))
    return FORMS[name].of((weight * torch.logspace(-3, 3, n)[:, None]).to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("name", FORMS)
def test_every_bit_is_the_references(name: str, n: int, k: int, dtype: torch.dtype) -> None:
    form, found, expected = quantised(name, n, k), *torch.full((2, n, k + 8), 7.0, dtype=dtype, device=DEVICE)
    dense_into(form, found[:, :k])
    reference.dense_into(form, expected[:, :k])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FORMS)
def test_float64_is_left_to_plain_torch_which_multiplies_in_it(name: str) -> None:
    form, found, expected = (
        quantised(name, 5, 192),
        *torch.empty(2, 5, 192, dtype=torch.float64, device=DEVICE),
    )
    dense_into(form, found)
    reference.dense_into(form, expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["nf4", "int8"])  # products of fp8 need nothing dense
def test_layers_outside_blocks_have_their_weights_made_dense_by_the_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert triton_ops().dense_into is DENSE_INTO["cuda"]
    form, x = quantised(name, 5, 192), torch.randn(3, 192).to(DEVICE).requires_grad_()
    expected, made = x.detach() @ form.dense().T, Counter[str]()

    def counted(given: Form, out: torch.Tensor) -> None:
        made[given.name] += 1
        dense_into(given, out)

    monkeypatch.setitem(DENSE_INTO, torch.device(DEVICE).type, counted)
    y = F.linear(x, QuantisedWeight(form))
    y.sum().backward()
    assert torch.equal(y, expected) and made == {name: 2}  # forward, and the gradient of x


@pytest.mark.parametrize("name", FORMS)
def test_slices_of_slices_are_those_of_the_whole(name: str) -> None:
    whole = quantised(name, 48, 1024)
    part = whole.narrow(0, 9, 39).narrow(1, 128, 832).narrow(0, 22, 7)
    found = torch.empty(part.shape, device=DEVICE)
    dense_into(part, found)
    assert torch.equal(found, whole.dense()[31:38, 128:960])


@pytest.mark.parametrize("name", FORMS)
def test_rows_that_are_picked_are_those_of_the_whole(name: str) -> None:
    whole = quantised(name, 48, 1024)
    part = whole.picked([(3, 2), (9, 0), (40, 6)])
    found = torch.full((8, 1032), 7.0, device=DEVICE)
    dense_into(part, found[:, :1024])
    assert torch.equal(found[:, :1024], whole.dense()[[3, 4, *range(40, 46)]])
    assert bool((found[:, 1024:] == 7).all())


@pytest.mark.parametrize("name", FORMS)
def test_every_bit_of_experts_is_the_references(name: str) -> None:
    weight = torch.randn(3, 5, 64 * 60, generator=torch.Generator().manual_seed(3))  # 300 scales an expert
    whole = EXPERT_FORMS[name].of((weight * torch.logspace(-2, 2, 3)[:, None, None]).to(DEVICE))
    for form in (whole, whole.narrow(0, 1, 2)):
        found, expected = torch.full((2, *form.shape), 7.0, device=DEVICE)
        dense_into(form, found)
        reference.dense_into(form, expected)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FORMS)
def test_no_form_is_left_to_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    one, experts = FORMS[name].of(weight[0]), EXPERT_FORMS[name].of(weight)
    for form in (one, experts):
        expected = torch.empty(form.shape, device=DEVICE)
        reference.dense_into(form, expected)
        with monkeypatch.context() as patch:
            for kind in (Nf4, ScaledRows, type(form)):
                patch.setattr(kind, "dense_into", lambda form, out: pytest.fail("made by plain torch"))
            found = torch.empty(form.shape, device=DEVICE)
            dense_into(form, found)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", FORMS)
def test_no_rows_are_no_rows(name: str) -> None:
    part = quantised(name, 4, 64).narrow(0, 2, 0)
    dense_into(part, torch.empty(0, 64, device=DEVICE))
