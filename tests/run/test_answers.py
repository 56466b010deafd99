"""Held-out rows are asked of the base and of the tuned model as they were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from petune.errors import UsageError
from petune.run import answers
from petune.run.answers import before_and_after
from petune.run.train import load_run
from petune.tasks.answer_metrics import rouge_l
from petune.tasks.rows import Conversation, Labelled, Message, Pair, Tagged, Text
from tests.small_runs import run, settings

pytestmark = pytest.mark.usefixtures("no_picture")
# enough steps for other answers than the base's
LEARNT: dict[str, Any] = {"batch_size": 4, "accumulate": 1, "epochs": 3, "lr": 0.01, "save_every": 100}


def test_a_classifier_is_asked_for_its_labels(tmp_path: Path) -> None:
    made = load_run(run(settings(tmp_path, "bert", **LEARNT)).folder)
    found = before_and_after(made, 4)
    rows = found["rows"]
    assert [row["prompt"].split()[0] for row in rows] == [row["expected"] for row in rows]
    assert [row["tuned"] for row in rows] == [made.generate(row["prompt"]) for row in rows]
    assert made.base is not None  # its head as it began, not the trained one
    assert [row["base"] for row in rows] == [made.base.ask(row["prompt"]) for row in rows]
    right = sum(row["tuned"] == row["expected"] for row in rows) / 4
    assert found["scores"]["tuned"] == {"exact_match": right}
    assert found["scores"]["base"].keys() == {"exact_match"}


def test_a_full_tuning_is_held_against_its_base_loaded_again(tmp_path: Path) -> None:
    made = load_run(run(settings(tmp_path, "llama", "full", **LEARNT)).folder)
    found = before_and_after(made, 1, ["rouge_l"])
    (row,) = found["rows"]
    expected = {name: {"rouge_l": rouge_l(row[name], row["expected"])} for name in ("base", "tuned")}
    assert found["scores"] == expected
    assert made.base is not None and row["base"] == made.base.ask(row["prompt"])
    assert row["tuned"] == made.generate(row["prompt"]) != row["base"]


def test_what_is_asked_and_what_is_wanted_follow_the_kind_of_row() -> None:
    turns = tuple(
        Message(role, text)
        for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    )
    assert answers._question(Conversation("x", turns), "chat") == (turns[:3], "d")
    assert answers._question(Pair("x", "in", "out"), "seq2seq") == ("in", "out")
    assert answers._question(Text("x", "one two three four"), "causal") == ("one two", "three four")
    assert answers._question(Tagged("x", ("a", "b"), ("O", "B")), "tokens") == ("a b", "a\tO\nb\tB")


@pytest.mark.parametrize(
    ("row", "task"), [(Labelled("x", "a", "b", "yes"), "classify"), (Text("x", "a"), "mlm")]
)
def test_rows_that_are_no_one_text_are_refused(row: Labelled | Text, task: str) -> None:
    with pytest.raises(UsageError, match="cannot be asked as one text"):
        answers._question(row, task)
