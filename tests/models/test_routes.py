from __future__ import annotations

import pytest
import torch

from petune.models.routes import routes_of

INDEX = torch.tensor([[2, 0], [0, 3], [2, 3], [3, 2]])


def test_copies_are_sorted_by_group_and_each_token_finds_its_own() -> None:
    routes = routes_of(INDEX, 4)
    assert routes.ends.tolist() == [2, 2, 5, 8]
    assert routes.tokens.tolist() == [0, 1, 0, 2, 3, 1, 2, 3]
    assert routes.groups.tolist() == [0, 0, 2, 2, 2, 3, 3, 3]
    assert torch.equal(routes.groups[routes.inverse].view(-1, 2), INDEX)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_group_that_is_none_has_no_copy(dtype: torch.dtype) -> None:
    index = torch.tensor([[1, 2], [2, 2], [2, 0]], dtype=dtype)  # of two groups: one, none, one
    routes = routes_of(index, 2, copies=2)
    assert (routes.tokens.tolist(), routes.groups.tolist(), routes.ends.tolist()) == ([2, 0], [0, 1], [1, 2])
    assert routes.inverse.tolist() == [1, -1, -1, -1, -1, 0]


def test_shares_go_in_the_order_of_copies_and_back_to_their_tokens() -> None:
    share = torch.arange(1.0, 7.0).view(3, 2)
    index = torch.tensor([[1, 2], [2, 2], [2, 0]])
    routes = routes_of(index, 2, copies=2)
    assert routes.sorted(share).tolist() == [6, 1]
    assert torch.equal(routes.unsorted(routes.sorted(share)), share.where(index < 2, 0))
