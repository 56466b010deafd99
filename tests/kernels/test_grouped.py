"""Grouped products against a loop over groups, in float64, and which form computes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from petune.kernels import grouped as chosen_form
from petune.kernels import grouped_reference
from petune.kernels.grouped import (
    combine,
    combined,
    dgated,
    dispatch,
    gated,
    grouped,
    outer,
    product,
)
from petune.kernels.triton import grouped as kernels
from petune.kernels.triton import routed
from petune.models.routes import routes_of
from tests.kernels.exactness import DEVICE, DTYPES, matrix


def _made(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_a_grouped_product_and_its_gradients_are_those_of_each_group_alone() -> None:
    torch.manual_seed(0)
    x, weight = _made(7, 4), _made(4, 4, 3)
    ends = torch.tensor([2, 2, 6, 7], dtype=torch.int32)  # the second group is empty
    y = grouped(x, weight, ends)
    spans = [(0, 2), (2, 2), (2, 6), (6, 7)]
    expected = torch.cat([x[first:end] @ weight[at] for at, (first, end) in enumerate(spans)])
    assert torch.allclose(y, expected)
    seed = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(one, (x, weight), seed) for one in (y, expected))
    assert all(torch.allclose(one, other) for one, other in zip(found, wanted, strict=True))
    assert not found[1][1].any()


def test_tokens_go_to_their_experts_and_come_back_in_their_order() -> None:
    torch.manual_seed(1)
    index = torch.tensor([[2, 0], [0, 3], [2, 3], [3, 2]])
    x, routes = _made(4, 3), routes_of(index, 4)
    assert routes.ends.tolist() == [2, 2, 5, 8]
    assert torch.equal(dispatch(x, routes), x[[0, 1, 0, 2, 3, 1, 2, 3]])
    assert torch.equal(combine(dispatch(x, routes), routes), 2 * x)
    y = _made(8, 3)
    # <D x, y> = <x, C y>, and each is the other's gradient
    assert torch.allclose((dispatch(x, routes) * y).sum(), (x * combine(y, routes)).sum())
    assert torch.autograd.gradcheck(lambda value: dispatch(value, routes), x)
    assert torch.autograd.gradcheck(lambda value: combine(value, routes), y)


def test_a_copy_that_is_missing_counts_nothing() -> None:
    routes = routes_of(torch.tensor([[1, 2], [2, 2], [0, 1]]), 2, copies=3)  # the second token has none
    x, y = _made(3, 3), _made(3, 3)
    assert torch.equal(combine(dispatch(x, routes), routes), x * torch.tensor([[1], [0], [2]]))
    assert torch.allclose((dispatch(x, routes) * y).sum(), (x * combine(y, routes)).sum())


def test_products_are_in_the_dtype_of_autocast() -> None:
    x, weight, ends = torch.randn(3, 4), torch.randn(1, 4, 2), torch.tensor([3], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped(x, weight, ends).dtype is torch.bfloat16
    assert grouped(x.bfloat16(), weight, ends).dtype is torch.float32


# ------------------------------------------------------------------ which form computes


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where Triton can run; here its interpreter does."""
    refused = {torch.float64: "they do not compute in float64"}
    monkeypatch.setattr(chosen_form, "refusal", lambda device, dtype: refused.get(dtype))
    chosen_form._form.cache_clear()
    yield
    chosen_form._form.cache_clear()


def test_kernels_run_where_triton_can_and_plain_torch_elsewhere(with_kernels: None) -> None:
    x = matrix(2, 2, torch.float32, 1)
    for dtype in DTYPES:
        assert chosen_form._kernels("grouped", x.to(dtype), None) is kernels
        assert chosen_form._kernels("routed", x.to(dtype)) is routed
    assert chosen_form._kernels("grouped", x.double()) is grouped_reference
    assert chosen_form._kernels("grouped", x, x.half()) is grouped_reference  # torch says what is wrong


@pytest.mark.skipif(DEVICE == "cuda", reason="is about a device that Triton has no kernels for")
def test_a_cpu_computes_in_plain_torch() -> None:
    assert chosen_form._kernels("grouped", torch.ones(2, 2)) is grouped_reference


def test_a_mixture_by_kernels_is_that_of_plain_torch_in_float64(with_kernels: None) -> None:
    index = torch.tensor([[2, 0], [0, 3], [2, 3], [3, 2], [0, 2]], device=DEVICE)
    routes = routes_of(index, 5)  # nobody chooses the second and the last
    x, up, down = matrix(5, 12, torch.float32, 1), _stack(12, 20), _stack(10, 12)
    share = torch.rand(10, generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def mixture(x: Tensor, up: Tensor, down: Tensor, share: Tensor) -> tuple[Tensor, ...]:
        rows = routes.order // routes.chosen
        inner = product(x, up, routes.ends, rows=rows)
        y = combined(product(gated(inner, share, "silu"), down, routes.ends), routes)
        d_inner, d_share, again = dgated(
            product(y, down.transpose(1, 2), routes.ends, rows=rows), inner, share, "silu"
        )
        d_down = outer(again, y, routes.ends, dy_rows=rows)
        return y, d_share, outer(x, d_inner, routes.ends, x_rows=rows), d_down

    exact = mixture(*(one.double() for one in (x, up, down, share)))  # which no kernel takes
    for one, other in zip(mixture(x, up, down, share), exact, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-4)


def _stack(k: int, n: int) -> Tensor:
    return matrix(5 * k, n, torch.float32, k).view(5, k, n) / 3
