"""The list of cells that the short suite leaves out names tests that there are, and keeps the first cells of
each."""

from __future__ import annotations

from tests.long_cells import KEPT, PLACE, behind, cell, long_cells
from tests.slow_tests import functions


def test_every_cell_that_is_left_out_is_of_a_test_that_is_there_still() -> None:
    """Else write the list again, or take the line out."""
    named = {tuple(one.partition("[")[0].split("::", 1)) for one in long_cells()}
    assert [name for name in named if name[1] not in functions(name[0])] == []
    assert PLACE.read_text(encoding="utf-8").splitlines() == sorted(long_cells())


def test_the_first_cells_of_a_test_stay_short_and_cheap_ones_all() -> None:
    costs = {"a": 0.2, "b": 0.2, "c": 0.05, "d": 0.1, "e": 3.0}
    times = [("tests.m", f"test_x[{name}]", seconds) for name, seconds in costs.items()]
    assert behind(times) == [cell("tests.m", f"test_x[{name}]") for name in "bde"]
    assert behind([("tests.m", "test_y", 9.0)]) == []
    assert behind([(KEPT[0], name, seconds) for _, name, seconds in times]) == []
