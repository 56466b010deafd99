from __future__ import annotations

from itertools import combinations

import pytest

from petune.models.experts import reached


@pytest.mark.parametrize(("held", "chosen"), [((3, 1), 2), ((2, 2, 4), 3), ((5, 1, 1), 1), ((4, 4), 5)])
def test_tokens_that_reach_a_rank_are_those_with_one_of_its_experts(
    held: tuple[int, ...], chosen: int
) -> None:
    every = list(combinations(range(sum(held)), chosen))
    owner = [rank for rank, count in enumerate(held) for _ in range(count)]
    found = [
        sum(rank in {owner[one] for one in own} for own in every) / len(every) for rank in range(len(held))
    ]
    assert reached(held, chosen) == pytest.approx(found)
