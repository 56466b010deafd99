"""The arithmetic of a run against figures worked out by hand, and the order of rows as a pure function."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petune.run.schedule import Steps, learning_rate, plan_steps, units_of_step


def rates(total: int, warmup: int, schedule: str) -> list[float]:
    return [learning_rate(step, Steps(100, 10, 10, total, warmup), 1.0, schedule) for step in range(total)]


def test_linear_climbs_over_the_warm_up_and_falls_to_one_step_above_zero():
    assert rates(6, 2, "linear") == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_falls_along_half_a_wave():
    assert rates(6, 2, "cosine") == pytest.approx(
        [0.5, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]
    )


def test_constant_stays_at_the_peak_after_the_warm_up():
    assert rates(4, 2, "constant") == [0.5, 1.0, 1.0, 1.0]


def test_without_warm_up_the_first_step_has_the_peak():
    assert rates(4, 0, "linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (5, 5), (7, 3), (100, 3)])
def test_no_step_has_a_rate_of_zero_or_above_the_peak(schedule: str, total: int, warmup: int):
    assert all(0 < rate <= 1 for rate in rates(total, warmup, schedule))


@pytest.mark.parametrize(
    ("units", "per_step", "epochs", "max_steps", "warmup", "expected"),
    [
        (24, 4, 1.0, None, 0.0, (6, 6, 0)),
        (25, 4, 1.0, None, 0.0, (7, 7, 0)),  # the last step takes the one row that is left
        (25, 4, 2.0, None, 0.25, (7, 14, 4)),  # a share of warm-up is rounded up: 3.5 -> 4
        (24, 4, 0.5, None, 3.0, (6, 3, 3)),
        (24, 4, 9.0, 5, 0.2, (6, 5, 1)),
        (24, 4, 1.0, 50, 0.0, (6, 6, 0)),  # max_steps never adds a step
        (3, 100, 1.0, None, 0.0, (1, 1, 0)),
        (24, 4, 0.001, None, 0.0, (6, 1, 0)),
    ],
)
def test_steps_are_planned_as_by_hand(units, per_step, epochs, max_steps, warmup, expected):
    steps = plan_steps(units, per_step, epochs, max_steps, warmup)
    assert (steps.per_epoch, steps.total, steps.warmup) == expected


def test_a_share_of_100_steps_is_that_many_steps():
    shares = {percent: percent / 100 for percent in range(1, 100)}  # 0.07 * 100 is 7.000000000000001
    assert {percent: plan_steps(100, 1, share, None, 0.0).total for percent, share in shares.items()} == {
        key: key for key in shares
    }
    assert {percent: plan_steps(100, 1, 1.0, None, share).warmup for percent, share in shares.items()} == {
        key: key for key in shares
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 17), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_the_steps_of_an_epoch_visit_every_row_once(units: int, per_step: int, epoch: int, seed: int):
    steps = plan_steps(units, per_step, 4.0, None, 0.0)
    first = epoch * steps.per_epoch
    seen = [units_of_step(step, steps, seed) for step in range(first, first + steps.per_epoch)]
    assert sorted(unit for part in seen for unit in part) == list(range(units))
    assert all(len(part) == per_step for part in seen[:-1])
    assert len(seen[-1]) == units - per_step * (steps.per_epoch - 1)


def order(seed: int, epoch: int) -> list[int]:
    steps = plan_steps(40, 7, 3.0, None, 0.0)
    return [
        unit
        for index in range(steps.per_epoch)
        for unit in units_of_step(epoch * steps.per_epoch + index, steps, seed)
    ]


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    orders = [order(seed, epoch) for seed in (0, 1, 2**32 - 1) for epoch in (0, 1, 2)]
    assert len({tuple(one) for one in orders}) == len(orders)
    assert all(one != sorted(one) for one in orders)


def test_the_rows_of_a_step_depend_on_nothing_but_seed_and_step():
    import random

    import torch

    steps = plan_steps(40, 7, 3.0, None, 0.0)
    torch.manual_seed(1)
    first = [units_of_step(step, steps, 3) for step in range(12)]
    torch.manual_seed(2)
    random.seed(5)
    before = torch.get_rng_state()
    backwards = [units_of_step(step, steps, 3) for step in reversed(range(12))][::-1]
    assert first == backwards
    # and asking draws nothing from the generator that dropout uses
    assert torch.equal(before, torch.get_rng_state())


def test_more_epochs_do_not_change_the_order_of_the_ones_before():
    short, long = plan_steps(40, 7, 1.0, None, 0.0), plan_steps(40, 7, 5.0, None, 0.1)
    assert [units_of_step(step, short, 0) for step in range(6)] == [
        units_of_step(step, long, 0) for step in range(6)
    ]
