"""Quantised weights that lie in no bank, as a rank's shards that were gathered do: still one product of the
kernels, and the numbers of those in a bank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from petune.kernels.block.dense import PackedWeight
from petune.kernels.block.dequantised import PackedForms
from petune.kernels.block.fp8 import PackedFp8
from petune.kernels.block.linear import Apart, Bank, at_hand
from petune.kernels.dispatch import Ops, reference_ops
from petune.models.frozen_weight import FORMS, QuantisedWeight
from petune.models.tuned_parts import LowRank

OPS: Ops = reference_ops()
ROWS = (96, 32)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def parts(name: str, bias: bool = False) -> list[LowRank]:
    """Two linears of 64 inputs, held in that form."""
    held = [QuantisedWeight(FORMS[name].of(torch.randn(rows, 64))) for rows in ROWS]
    return [LowRank(weight, torch.randn(len(weight)) if bias else None) for weight in held]


def products(weight: PackedWeight) -> list[Tensor]:
    """All of a weight's products with the same numbers."""
    draw = torch.Generator().manual_seed(1)
    x, dy = torch.randn(9, 64, generator=draw), torch.randn(9, sum(ROWS), generator=draw)
    s, b = torch.randn(9, 4, generator=draw), torch.randn(sum(ROWS), 4, generator=draw)
    found = [weight.linear(x), weight.linear32(x), weight.linear_low(x, (s, b), OPS, None)]
    return [*found, weight.dlinear(dy), *weight.dlinear_with(dy, b)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["fp8", "int8", "nf4"])
def test_weights_of_one_form_are_one_product_of_the_kernels(form: str, bias: bool) -> None:
    every = parts(form, bias)
    found = at_hand(None, every, OPS)
    assert isinstance(found, PackedFp8 if form == "fp8" else PackedForms)
    layers = [linear_of(part) for part in every]
    bank = Bank(layers, OPS)
    in_bank = at_hand(bank, [LowRank(cast("Tensor", one.weight), one.bias) for one in layers], OPS)
    assert in_bank is bank.base
    for one, other in zip(products(found), products(bank.base), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


def linear_of(part: LowRank) -> nn.Linear:
    """A layer that holds copies of them."""
    made = nn.Linear(64, len(part.weight), bias=part.bias is not None)
    made.weight = nn.Parameter(part.weight.clone(), requires_grad=False)
    if part.bias is not None:
        made.bias = nn.Parameter(part.bias.clone(), requires_grad=False)
    return made


def test_an_input_is_quantised_once_for_all_weights_in_eight_bits() -> None:
    count = 0

    def quantise(*given: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal count
        count += 1
        found: tuple[Tensor, Tensor] = OPS.quantise(*given)
        return found

    weight = at_hand(None, parts("fp8"), replace(OPS, quantise=quantise))
    assert weight is not None
    weight.linear(torch.randn(9, 64))
    assert count == 1
    weight.dlinear(torch.randn(9, sum(ROWS)))
    assert count == 2


@pytest.mark.parametrize("bias", [False, True])
def test_weights_of_several_forms_are_a_product_each(bias: bool) -> None:
    first, (_, second) = parts("fp8", bias)[:1], parts("nf4", bias)
    found = at_hand(None, [*first, second], OPS)
    assert isinstance(found, Apart)
    singles = [at_hand(None, [part], OPS) for part in (*first, second)]
    x = torch.randn(9, 64)
    assert torch.equal(found.linear(x), torch.cat([one.linear(x) for one in singles if one is not None], 1))


def test_dense_weights_in_no_bank_are_left_to_their_group() -> None:
    dense = [LowRank(torch.randn(rows, 64), None) for rows in ROWS]
    assert at_hand(None, dense, OPS) is None
