"""Tokens traded for columns and back: every element where it belongs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petune.parallel.link import Link
from petune.parallel.sequence.trade import AllToAll
from tests.pool import run

# tokens of each rank, and the columns of each matrix by rank
CASES = {
    "even": ((3, 3), ((4, 4), (2, 2))),
    "uneven": ((5, 1), ((2, 6), (1, 3), (1, 3))),
    "three ranks, one without tokens": ((2, 0, 3), ((2, 4, 2),)),
}


def whole(batch: int, sizes: tuple[int, ...], columns: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(batch, sum(sizes), sum(one), generator=draw) for one in columns]


def _there_and_back(batch: int, name: str) -> dict[str, Tensor]:
    sizes, columns = CASES[name]
    index, every = dist.get_rank(), whole(batch, *CASES[name])
    trade = AllToAll(sizes, columns, Link(dist.group.WORLD), index)
    own = torch.cat([x.split(sizes, 1)[index] for x in every], -1)
    heads = trade.to_heads(own)
    return {"own": own, "heads": heads, "back": trade.to_tokens(heads)}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_all_tokens_of_its_columns_and_gives_them_back(name: str, batch: int) -> None:
    sizes, columns = CASES[name]
    every = whole(batch, *CASES[name])
    for index, found in enumerate(run(len(sizes), _there_and_back, batch, name)):
        pieces = [x.split(list(one), -1)[index] for x, one in zip(every, columns, strict=True)]
        assert torch.equal(found["heads"], torch.cat(pieces, -1))
        assert torch.equal(found["back"], found["own"]) and found["back"].is_contiguous()


def test_what_copy_engines_bring_is_read_where_it_lies() -> None:
    """No memory is taken for it."""
    asked: list[int] = []

    def swap(sent: Any, shapes: Any, dtype: torch.dtype, room: Any, most: int, put: Any) -> None:
        asked.append(len(sent))
        put({rank: torch.full(shape, rank, dtype=dtype) for rank, shape in shapes.items()})

    link: Any = SimpleNamespace(swap=swap, trading=lambda most: None)
    trade = AllToAll((2, 3, 1), ((4, 4, 8),), link, 0)
    heads = trade.to_heads(torch.zeros(2, 2, 16, dtype=torch.float64))
    assert heads[1, :, 3].tolist() == [0, 0, 1, 1, 1, 2]
    tokens = trade.to_tokens(torch.zeros(2, 6, 4, dtype=torch.float64))
    assert tokens[1, 1].tolist() == [0] * 4 + [1] * 4 + [2] * 8
    assert asked == [2, 2]
