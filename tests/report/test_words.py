"""Numbers, times and settings in words."""

from __future__ import annotations

import math
from typing import Any

import pytest

from petune.report.words import duration, figure, flat, is_number, moment, setting, share, size, tick, titled


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.123456, "0.1235"),
        (12345.6, "12,345.6"),
        (1234, "1,234"),
        (1e-7, "1.00e-07"),
        (0.0, "0.0000"),
        (math.nan, "not a number"),
        (-math.inf, "infinite"),
        (10**400, "beyond measure"),
        (None, "-"),
        ("text", "text"),
        (True, "True"),
    ],
)
def test_a_number_is_written_for_people(value: Any, said: str) -> None:
    assert figure(value) == said


def test_only_finite_numbers_are_numbers() -> None:
    assert [is_number(one) for one in (1, 0.5, True, "1", None, math.nan, math.inf, 10**400)] == [
        *(True, True),
        *[False] * 6,
    ]


def test_sizes_times_and_shares() -> None:
    assert (size(1536), size("many"), size(None)) == ("1.5 KiB", "-", "-")
    assert [duration(one) for one in (4.2, 200, 7500, 200_000, None)] == [
        *("4.2 s", "3 min 20 s", "2 h 05 min", "2 d 7 h", "-")
    ]
    assert (share(1, 8), share(1, 0)) == ("12.5%", "-")
    assert (moment(0), moment(1.75e9), moment(1e300)) == ("-", "2025-06-15 15:06 UTC", "-")
    assert [tick(one) for one in (0.5, 2e-5, 1500.0, 3e7, 0.0)] == ["0.5", "2e-5", "1,500", "3e7", "0"]
    assert [tick(one) for one in (1e-4, 1.5e-4, 120_000.0)] == ["1e-4", "1.5e-4", "1.2e5"]


def test_settings_are_said_as_they_are_written() -> None:
    assert flat({"lr": 1e-3, "method": {"name": "lora", "targets": ["q", "v"]}, "data": {}}) == {
        "lr": "0.001",
        "method.name": "lora",
        "method.targets": "q, v",
        "data": "{}",
    }
    assert [setting(one) for one in (True, None, [], 0.5)] == ["true", "null", "none", "0.5"]


def test_a_metric_has_a_title() -> None:
    names = ("mrr", "mrr_at_10", "ndcg_at_10", "recall_at_1", "f1_macro")
    assert [titled(name) for name in names] == ["MRR", "MRR@10", "nDCG@10", "Recall@1", "F1 macro"]
