"""Charts have the points they were given, inside their frame, and round numbers beside them."""

from __future__ import annotations

import json
import math
import re

import pytest

from petune.report.curves import Curve, curve
from petune.report.svg import BOTTOM, HEIGHT, LEFT, POINTS, RIGHT, TOP, WIDTH, ChartAxis, DrawnLine, chart
from tests.made_runs import Parsed, step_records


def paths(page: Parsed, kind: str) -> list[list[tuple[float, float]]]:
    """The points of each path of a kind."""
    return [
        [(float(x), float(y)) for x, y in re.findall(r"([\d.-]+),([\d.-]+)", found["d"])]
        for found in page.all("path", kind)
    ]


def test_a_short_line_has_a_point_for_each_step() -> None:
    page = Parsed(chart("Loss", [DrawnLine(curve(step_records(40), "loss", "loss"))]))
    (points,) = paths(page, "line c0 plain")
    assert len(points) == 40 and page.unclosed == []


def test_a_long_line_is_thinned_and_stays_in_its_frame() -> None:
    page = Parsed(chart("Loss", [DrawnLine(curve(step_records(10_000), "loss", "loss"))]))
    (points,) = paths(page, "line c0 plain")
    assert POINTS // 2 < len(points) <= POINTS
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in points)
    (values,) = json.loads(page.all("svg")[0]["data-lines"])
    assert len(values[2]) == 2 * len(points)


def test_the_line_is_interrupted_where_there_is_no_number() -> None:
    records = step_records(9)
    records[4]["loss"] = math.inf
    page = Parsed(chart("Loss", [DrawnLine(curve(records, "loss", "loss"))]))
    (found,) = page.all("path", "line")
    assert found["d"].count("M") == 2 and len(paths(page, "line")[0]) == 8


def test_one_step_is_a_dot_and_no_step_no_chart() -> None:
    page = Parsed(chart("Loss", [DrawnLine(curve(step_records(1), "loss", "loss"))]))
    assert len(page.all("circle", "line c0")) == 1
    assert chart("Loss", [DrawnLine(Curve("loss", ()))]) == "" == chart("Loss", [])
    assert chart("Loss", [DrawnLine(Curve("loss", (), (1, 2)))]) == ""


@pytest.mark.parametrize("values", [(1.0, 1.0), (0.0, 0.0), (-5.0, -5.0), (1e-300, 1e299), (-1e299, 1e299)])
def test_any_finite_values_can_be_drawn(values: tuple[float, float]) -> None:
    page = Parsed(chart("x", [DrawnLine(Curve("x", ((1, values[0]), (2, values[1]))))], log=True))
    assert len(paths(page, "line")[0]) == 2 and "nan" not in page.all("path", "line")[0]["d"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        *((0, 1, [0, 0.5, 1]), (0, 120, [0, 50, 100]), (2.7, 3.5, [2.8, 3.0, 3.2, 3.4]), (3, 3, [3])),
        (0.306, 0.399, [0.32, 0.34, 0.36, 0.38]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, ticks: list[float]) -> None:
    assert ChartAxis(low, high, 100).ticks() == pytest.approx(ticks)


def test_large_ratios_go_on_a_scale_of_powers() -> None:
    line = DrawnLine(Curve("norm", ((1, 0.01), (2, 1.0), (3, 100.0))))
    (even,) = paths(Parsed(chart("Norm", [line], log=True)), "line")
    assert even[0][1] - even[1][1] == pytest.approx(even[1][1] - even[2][1], abs=0.2)
    assert "powers of ten" in chart("Norm", [line], log=True) and "powers" not in chart("Norm", [line])


def test_marks_outside_the_line_are_left_out() -> None:
    page = Parsed(chart("Loss", [DrawnLine(curve(step_records(9), "loss", "loss"))], marks=(4, 99)))
    assert len(page.all("path", "mark")) == 1


def test_a_hostile_name_stays_a_text() -> None:
    name = '"><script>alert(1)</script></title>'
    page = Parsed(chart(name, [DrawnLine(curve(step_records(3), "loss", name))]))
    assert not page.all("script") and json.loads(page.all("svg")[0]["data-lines"])[0][0] == name
