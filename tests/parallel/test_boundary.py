"""Boundaries of cut sub-layers: what is entered and left, and that each way back is the true adjoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petune.parallel.boundary import SequenceBoundary, WholeBoundary
from petune.rng.context import bound
from tests.pool import run

CUTS = [(5, 3), (0, 6), (4, 1, 2)]
CPU = torch.device("cpu")


def drawn(seed: int, length: int) -> Tensor:
    return torch.randn(2, length, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _both_ways(kind: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Of each way, what went in and came out, and what went back in and came back out."""
    rank, whole = dist.get_rank(), sum(sizes)
    outside = whole if kind == "whole" else sizes[rank]
    made: Any = (WholeBoundary if kind == "whole" else SequenceBoundary)(dist.group.WORLD)
    with bound(sizes=sizes):
        boundary = copy.deepcopy(made).here()
    # Outside a whole connection all ranks hold the same.
    seed = 0 if kind == "whole" else 1 + rank
    x, z = drawn(seed, outside), drawn(20 + rank, whole)
    y, w = drawn(40 + rank, whole), drawn(60 + seed, outside)
    given = [one.clone() for one in (x, z, y, w)]
    found = [boundary.enter(x), boundary.enter_backward(z), boundary.leave(y), boundary.leave_backward(w)]
    assert all(torch.equal(one, before) for one, before in zip((x, z, y, w), given, strict=True)), (
        "what is not its own was written"
    )
    found += [boundary.enter_backward(z.clone(), own=True), boundary.leave(y.clone(), own=True)]
    return {"given": given, "found": found, "least": boundary.least([3 - rank, rank, 7], CPU)}


@pytest.mark.parametrize("kind", ["whole", "sequence"])
@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_both_ends_of_a_boundary_go_with_their_adjoints(kind: str, sizes: tuple[int, ...]) -> None:
    ranks = run(len(sizes), _both_ways, kind, sizes)
    x, z, y, w = ([rank["given"][at] for rank in ranks] for at in range(4))
    entered, dx, left, dy = ([rank["found"][at] for rank in ranks] for at in range(4))
    expected = x if kind == "whole" else [torch.cat(x, 1)] * len(sizes)
    assert all(torch.equal(one, other) for one, other in zip(entered, expected, strict=True))
    for rank, part in enumerate(left):
        total = sum(y) if kind == "whole" else sum(y).split(sizes, 1)[rank]  # type: ignore[union-attr]
        torch.testing.assert_close(part, total)
    # a whole connection has one x and one sum, which every rank holds
    shared = 1 if kind == "sequence" else len(sizes)
    there, back = (
        sum(float((a * b).sum()) for a, b in zip(*one, strict=True)) for one in ((entered, z), (x, dx))
    )
    assert there == pytest.approx(back / shared)
    there, back = (
        sum(float((a * b).sum()) for a, b in zip(*one, strict=True)) for one in ((left, w), (y, dy))
    )
    assert there / shared == pytest.approx(back)
    for rank in ranks:
        assert torch.equal(rank["found"][4], rank["found"][1]) and torch.equal(
            rank["found"][5], rank["found"][2]
        )


def test_ranks_agree_on_the_least_of_what_each_of_them_says() -> None:
    assert [rank["least"] for rank in run(3, _both_ways, "whole", (4, 1, 2))] == [[1, 0, 7]] * 3
