"""The list of slow tests names tests that there are, and is made of what was measured."""

from __future__ import annotations

from tests.slow_tests import functions, named, slow_tests, slowest


def test_every_slow_test_is_there_still() -> None:
    """Else write the list again, or take the name out."""
    gone = [
        name for name in slow_tests() if name.partition("::")[2] not in functions(name.partition("::")[0])
    ]
    assert gone == []


def test_a_test_is_slow_by_the_mean_of_its_parameters() -> None:
    times = [("tests.a.b", "test_x[1]", 0.2), ("tests.a.b", "test_x[2-y]", 0.02), ("tests.c", "test_y", 0.07)]
    assert slowest(times) == ["a.b::test_x"] == [named("tests.a.b", "test_x[3]")]
