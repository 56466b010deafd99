"""What the short suite keeps of a crossing: every two values of different parameters, in few cells."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.crossings import cover

AXES = ("abc", (1, 2), (0.0, 0.3, 1.0), "xyz")


@pytest.mark.parametrize(("together", "most"), [(1, 3), (2, 12), (4, 54)])
def test_a_cover_has_all_that_meet_in_few_cells(together: int, most: int) -> None:
    cells = list(product(*AXES))
    short = [cells[at] for at in cover(cells, together)]
    assert len(short) <= most
    for places in combinations(range(4), together):
        assert {tuple(cell[at] for at in places) for cell in short} == set(
            product(*(AXES[at] for at in places))
        )


def test_a_cover_is_of_what_meets_in_these_cells_alone() -> None:
    assert cover([("a", 1), ("a", 2), ("b", 1), ("b", 2)], together=1) == {0, 3}
    assert cover([("a", 1), ("b", 2)]) == {0, 1} and cover([("a",)], together=1) == {0}


@pytest.mark.crossed
@pytest.mark.parametrize("one", "abc")
@pytest.mark.parametrize("two", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(("three", "four"), [(5, 6), (7, 8), (5, 9)])
@pytest.mark.parametrize("five", [True, False])
def test_the_short_suite_has_nine_of_these_and_the_long_one_the_others(
    one: str, two: int, three: int, four: int, five: bool, request: pytest.FixtureRequest
) -> None:
    name = request.node.originalname
    long = [
        item.get_closest_marker("long") is not None
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == name
    ]
    whole = {(9, 0), (0, 27), (9, 27)}
    assert (long.count(False), long.count(True)) in whole or len(long) == 1  # one that was asked for
    assert two == 1 or long.count(True)
