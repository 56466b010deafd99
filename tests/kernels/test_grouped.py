"""Grouped products against a loop over groups, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from petune.kernels.grouped import combine, dispatch, grouped, routes_of


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


def test_products_are_in_the_dtype_of_autocast() -> None:
    x, weight, ends = torch.randn(3, 4), torch.randn(1, 4, 2), torch.tensor([3], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped(x, weight, ends).dtype is torch.bfloat16
    assert grouped(x.bfloat16(), weight, ends).dtype is torch.float32
