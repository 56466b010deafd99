from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petune.errors import DataError
from petune.tasks import DataConfig, Labelled, Text, load_rows
from petune.tasks.splits import keep_apart, sample, split_off


def texts(*values: object) -> list:
    return [Text(f"d:{line}", str(value)) for line, value in enumerate(values, start=1)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=2, max_size=60), st.floats(0.05, 0.95))
def test_equal_rows_never_fall_on_both_sides_and_no_row_is_lost(values: list[int], share: float) -> None:
    rows = texts(*values)
    if len(set(values)) < 2:
        return
    split = split_off(rows, share)
    assert split.train and split.eval
    assert not {row.text for row in split.train} & {row.text for row in split.eval}
    assert sorted(row.where for row in (*split.train, *split.eval)) == sorted(row.where for row in rows)


def test_the_split_depends_on_content_alone() -> None:
    rows = texts(*range(100))
    split = split_off(rows, 0.1)
    assert len(split.eval) == 10
    again = split_off([Text("elsewhere", row.text) for row in reversed(rows)], 0.1)
    assert {row.text for row in again.eval} == {row.text for row in split.eval}
    assert {row.text for row in split_off(rows, 0.1, "seed 1").eval} != {row.text for row in split.eval}
    assert "held out 10 of 100 rows" in split.rule


def test_every_class_is_split_and_none_is_lost_to_training() -> None:
    rows = [Labelled("d:1", f"t{n}", None, "rare" if n < 2 else "common") for n in range(100)]
    split = split_off(rows, 0.2)
    assert Counter(row.label for row in split.train)["rare"] >= 1
    assert len(split.eval) == 20


def test_the_same_text_under_two_labels_stays_on_one_side() -> None:
    rows = [Labelled("d:1", f"t{n // 2}", None, "ab"[n % 2]) for n in range(40)]
    split = split_off(rows, 0.3)
    assert not {row.text for row in split.train} & {row.text for row in split.eval}


def test_given_held_out_rows_are_dropped_from_training() -> None:
    split = keep_apart(texts(1, 2, 3, 2), texts(2, 9), "given")
    assert [row.text for row in split.train] == ["1", "3"]
    assert "2 rows of train that are among them dropped" in split.rule
    with pytest.raises(DataError, match="also held out"):
        keep_apart(texts(1), texts(1), "given")


def test_a_sample_is_the_same_each_time_and_keeps_the_order() -> None:
    rows = texts(*range(50))
    some = sample(rows, 5)
    assert [int(row.text) for row in some] == sorted(int(row.text) for row in some)
    assert sample(rows, 5) == some and len(some) == 5
    assert sample(rows, None) == sample(rows, 99) == rows


def test_the_fingerprint_knows_the_rows_but_not_where_they_lie(jsonl, tmp_path: Path) -> None:
    rows = [{"text": f"t{n}"} for n in range(10)]
    first = load_rows(DataConfig(jsonl(*rows)), "causal", tmp_path)
    (tmp_path / "else").mkdir()
    same = load_rows(DataConfig(jsonl(*rows, name="else/b.jsonl")), "causal", tmp_path)
    other = load_rows(DataConfig(jsonl(*rows[:9], {"text": "t9!"}, name="c.jsonl")), "causal", tmp_path)
    assert first.sha256 == same.sha256 != other.sha256


def test_only_split_by_seed_heeds_the_seed(jsonl, tmp_path: Path) -> None:
    path = jsonl(*({"text": f"t{n}"} for n in range(100)))
    for split_by, equal in (("content", True), ("seed", False)):
        one, two = (
            load_rows(DataConfig(path, split_by=split_by), "causal", tmp_path, seed=seed).sha256
            for seed in (1, 2)
        )
        assert (one == two) is equal


def test_two_rows_of_two_classes_cannot_be_held_out_and_the_message_says_why() -> None:
    rows = [Labelled("d:1", "good", None, "a"), Labelled("d:2", "bad", None, "b")]
    with pytest.raises(DataError, match=r"label of its own[\s\S]*2 labels in 2 rows[\s\S]*data\.eval"):
        split_off(rows, 0.5)
