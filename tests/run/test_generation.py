"""Options of an answer: which are refused, and what the others mean."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from petune.errors import UsageError
from petune.run.generation import refuse_cut, settle_options, within


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.5}, "'temprature' is no generation option[\\s\\S]*did you mean: temperature"),
        ({"max_tokens": 5}, "max_new_tokens"),
        ({"prompt": "red"}, "'prompt' is no generation option"),
        ({"num_return_sequences": 3}, "more than one text"),
        ({"temperature": "hot"}, "temperature does not fit[\\s\\S]*at least 0, found 'hot'"),
        ({"temperature": -1}, "temperature does not fit"),
        ({"temperature": float("nan")}, "temperature does not fit"),
        ({"temperature": True}, "temperature does not fit"),
        ({"top_p": 1.5}, "at most 1, found 1.5"),
        ({"max_new_tokens": 0}, "at least 1, found 0"),
        ({"max_new_tokens": 5.0}, "a whole number"),
        ({"do_sample": "no"}, "true or false"),
        ({"temperature": 1.5, "do_sample": False}, "temperature samples and do_sample=False does not"),
        ({"temperature": 0, "do_sample": True}, "temperature=0 is greedy and do_sample=True samples"),
        ({"temperature": 0, "top_p": 0.5}, "top_p samples"),
        ({"max_new_tokens": 5, "max_length": 9}, "two limits"),
        ({"max_new_tokens": 5, "min_new_tokens": 6}, "at most 5, found 6"),
    ],
)
def test_options_that_would_be_ignored_or_contradict_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        settle_options(options)


def test_every_fault_of_the_options_is_named_at_once_and_none_means_unsaid():
    with pytest.raises(UsageError) as caught:
        settle_options({"temprature": 1, "top_p": 2.0})
    assert len(caught.value.problems) == 2
    assert settle_options({"temperature": None, "max_length": 9}) == {"do_sample": False, "max_length": 9}
    assert settle_options({"min_new_tokens": 200})["max_new_tokens"] == 200
    assert settle_options({"top_p": 0.9}) == {"max_new_tokens": 128, "do_sample": True, "top_p": 0.9}


def test_no_more_tokens_are_asked_for_than_there_is_room():
    def most(room: float, **options: Any) -> dict[str, Any]:
        return within(settle_options(options), room, 10)

    assert [most(room)["max_new_tokens"] for room in (math.inf, 500, 50)] == [128, 128, 50]
    assert most(50, max_new_tokens=70)["max_new_tokens"] == 50
    assert [most(50, max_length=length)["max_length"] for length in (40, 70)] == [40, 60]
    for least in ({"min_new_tokens": 51}, {"min_length": 61}):
        with pytest.raises(UsageError, match="longer than the model's positions"):
            most(50, **least)


@pytest.mark.parametrize(("length", "last", "cut"), [(60, 5, True), (60, 2, False), (59, 5, False)])
def test_an_answer_that_was_cut_is_refused_and_one_that_ended_is_not(length: int, last: int, cut: bool):
    found = torch.tensor([5] * (length - 1) + [last])
    with pytest.raises(UsageError, match="at most 50 tokens") if cut else nullcontext():
        refuse_cut(found, {"max_new_tokens": 51}, 50, 10, 2)
    refuse_cut(found, {"max_new_tokens": 50}, 50, 10, 2)
