"""Curves keep their extremes, their order and their gaps."""

from __future__ import annotations

import math
import random

from petune.report.curves import Curve, curve, smoothed, steps_said, thinned
from tests.made_runs import step_records


def test_thinning_keeps_the_ends_and_every_extreme() -> None:
    draw = random.Random(0)
    points = [(step, draw.gauss(0, 1)) for step in range(10_000)]
    points[7003] = (7003, 99.0)
    points[4177] = (4177, -99.0)
    kept = thinned(points, 480)
    assert len(kept) <= 480 and kept == sorted(kept)
    assert {points[0], points[-1], points[7003], points[4177]} <= set(kept)
    for part in range(120):  # of each stretch the lowest and the highest
        inside = points[part * 10_000 // 120 : (part + 1) * 10_000 // 120]
        values = [value for step, value in kept if inside[0][0] <= step <= inside[-1][0]]
        assert min(values) == min(value for _, value in inside)
        assert max(values) == max(value for _, value in inside)


def test_few_points_are_all_kept() -> None:
    points = [(1, 0.5), (2, 0.25), (3, 1.0)]
    assert thinned(points, 4) == points and thinned([], 4) == []


def test_of_a_step_with_several_records_the_last_counts() -> None:
    records = [*step_records(5), *step_records(3, first=3, loss=9.0)]
    assert curve(records, "loss", "loss").points[2:] == ((3, 9.0), (4, 9.0), (5, 9.0))


def test_what_is_no_finite_number_interrupts_the_line_and_is_said() -> None:
    records = step_records(6)
    records[2]["loss"], records[3]["loss"] = math.nan, None
    found = curve(records, "loss", "loss")
    assert found.broken == (3, 4) and [step for step, _ in found.points] == [1, 2, 5, 6]
    assert [[step for step, _ in part] for part in found.stretches(100)] == [[1, 2], [5, 6]]
    assert "no finite number at steps 3, 4" in found.said()


def test_records_without_the_key_and_impossible_steps_are_passed_over() -> None:
    records = [{"step": 1}, {"step": -1, "loss": 1.0}, {"step": 2**60, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    assert curve(records, "loss", "loss").points == ((2, 0.5),)
    assert Curve("loss", ()).said() == "loss: no value yet"
    assert Curve("loss", (), (1,)).said() == "loss: no finite value"


def test_smoothing_is_the_mean_of_the_last_twentieth() -> None:
    line = Curve("loss", tuple((step, float(step)) for step in range(1, 401)))
    found = smoothed(line, 40).points
    assert len(found) <= 42 and found[0] == (1, 1.0) and found[-1] == (400, sum(range(381, 401)) / 20)
    assert smoothed(Curve("loss", ()), 40).points == ()
    assert smoothed(Curve("loss", ((7, 2.0),)), 40).points == ((7, 2.0),)


def test_one_spike_does_not_blur_what_comes_after_it() -> None:
    values = [1.0] * 400
    values[100] = 1e25
    found = dict(smoothed(Curve("loss", tuple(enumerate(values))), 40).points)
    assert found[399] == 1.0


def test_steps_are_counted_beyond_the_first() -> None:
    assert steps_said([7]) == "step 7"
    assert steps_said(range(1, 9)) == "steps 1, 2, 3, 4, 5 and 3 more"
