"""What happens to rows of experts between their products: the kernels against plain torch, that against
autograd, all against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from petune.kernels import grouped_reference, reference
from petune.kernels.reference import Act
from petune.kernels.triton import routed
from tests.kernels.exactness import DEVICE, DTYPES, assert_as_good, matrix

ACTS: list[Act] = ["silu", "gelu", "gelu_tanh", "relu", "clamped"]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def shares(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(7)).to(DEVICE, dtype)


# ------------------------------------------------------------------ copies of a token


@each_dtype
@pytest.mark.parametrize("of", [None, torch.float32, torch.bfloat16], ids=["sum", "float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "chosen", "n"), [(5, 8, 40), (3, 1, 16), (2, 3, 2100)])
def test_copies_are_summed_as_the_reference_sums_them(
    tokens: int, chosen: int, n: int, of: torch.dtype | None, dtype: torch.dtype
) -> None:
    y = matrix(tokens * chosen, n, dtype, 1, strided=True)
    inverse = torch.randperm(tokens * chosen, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    inverse[-1] = -1  # a copy that is missing
    weights = None if of is None else shares(tokens * chosen, of).view(tokens, chosen)
    found, same = (module.combined(y, inverse, chosen, weights) for module in (routed, grouped_reference))
    exact = y.double()[inverse].where(inverse[:, None] >= 0, 0).view(tokens, chosen, n)
    exact = exact if weights is None else exact * weights.double()[..., None]
    assert_as_good(found, same, exact.sum(1))


def test_no_tokens_give_no_rows() -> None:
    empty = torch.empty(0, 16, device=DEVICE)
    assert routed.combined(empty, torch.empty(0, dtype=torch.int64, device=DEVICE), 8).shape == (0, 16)
    share = torch.empty(0, device=DEVICE)
    assert routed.gated(empty, share, "silu").shape == (0, 8)
    grads = routed.dgated(torch.empty(0, 8, device=DEVICE), empty, share, "silu")
    assert [grad.shape for grad in grads] == [(0, 16), (0,), (0, 8)]


# ------------------------------------------------------------------ the activation


@pytest.mark.parametrize("act", ACTS)
def test_the_references_gradients_are_autograds(act: Act) -> None:
    gate_up, dm = matrix(5, 14, torch.float64, 1).requires_grad_(), matrix(5, 7, torch.float64, 2)
    share = shares(5, torch.float64).requires_grad_()
    if act == "clamped":  # as transformers' experts of gpt-oss do
        gate_up = (6 * gate_up.detach()).requires_grad_()
        plain = GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), gate_up) * share[:, None]
        assert bool((gate_up > 7).any() and (gate_up < -7).any())
    else:
        gate, up = gate_up.chunk(2, 1)
        plain = reference._act(gate, act) * up * share[:, None]
    with torch.no_grad():
        torch.testing.assert_close(grouped_reference.gated(gate_up, share, act), plain)
        *found, again = grouped_reference.dgated(dm, gate_up, share, act)
        torch.testing.assert_close(again, plain)
    for one, other in zip(found, torch.autograd.grad(plain, (gate_up, share), dm), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.crossed(1)
@each_dtype
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("rows", "width"), [(9, 40), (1, 1), (17, 300)])
def test_the_activation_times_its_share_is_the_references_both_ways(
    rows: int, width: int, act: Act, dtype: torch.dtype
) -> None:
    gate_up, dm = (
        (6 if act == "clamped" else 2) * matrix(rows, 2 * width, dtype, 1, strided=True),
        matrix(rows, width, dtype, 2, strided=True),
    )
    share = shares(rows, torch.float32)

    def both(module: Any, *given: Tensor) -> tuple[Tensor, ...]:
        dm, gate_up, share = given
        return module.gated(gate_up, share, act), *module.dgated(dm, gate_up, share, act)

    given = (dm, gate_up, share)
    exact = both(grouped_reference, *(one.double() for one in given))
    for found, same, true in zip(both(routed, *given), both(grouped_reference, *given), exact, strict=True):
        assert_as_good(found, same, true)
