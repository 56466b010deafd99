"""Rows given from Python: the same rows as from a file, named by their index."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pytest

from petune.errors import DataError, PetuneError, UsageError
from petune.tasks import DataConfig, Rows, load_rows, take_rows

ROWS = [
    {"text": "good", "label": "a"},
    {"text": "bad", "label": "b"},
    {"text": "fine, too", "label": "a"},
    {"text": "poor", "label": "b"},
]
HELD = [{"text": "new", "label": "a"}, {"text": "old", "label": "b"}]


def read(value: Any, task: str = "classify", held: Any = None, **settings: Any) -> Rows:
    """The rows of a run that is given `value` as its data, and `held` as data.eval."""
    given = take_rows(value, "data")
    other = take_rows(held, "data.eval") if held is not None else None
    config = DataConfig(given.spec, eval=other.spec if other else None, **settings)
    return load_rows(config, task, Path(), objects={one.spec: one for one in (given, other) if one})


@pytest.fixture(scope="module")
def from_file(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = tmp_path_factory.mktemp("rows")
    for name, rows in (("train", ROWS), ("held", HELD)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(
        DataConfig(str(folder / "train.jsonl"), eval=str(folder / "held.jsonl")), "classify", folder
    )


KINDS = {
    "list": lambda rows: rows,
    "tuple": tuple,
    "dataset": datasets.Dataset.from_list,
    "frame": pandas.DataFrame,
    "numpy's words": lambda rows: [{key: numpy.str_(value) for key, value in row.items()} for row in rows],
    "class labels": lambda rows: datasets.Dataset.from_list(
        [{**row, "label": "ab".index(row["label"])} for row in rows],
        features=datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])}
        ),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_object_gives_the_rows_of_a_file(kind: str, from_file: Rows):
    assert read(KINDS[kind](ROWS), held=KINDS[kind](HELD)).sha256 == from_file.sha256


@pytest.mark.parametrize("held_out", ["eval", "validation", "valid", "dev"])
@pytest.mark.parametrize(
    "make",
    [
        dict,
        lambda splits: datasets.DatasetDict({key: KINDS["dataset"](rows) for key, rows in splits.items()}),
    ],
)
def test_splits_bring_their_own_held_out_rows(make: Any, held_out: str, from_file: Rows):
    rows = read(make({"train": ROWS, held_out: HELD, "test": ROWS}))
    assert rows.sha256 == from_file.sha256
    assert rows.eval[1].where == f"data[{held_out!r}][1]"


def test_the_same_rows_have_the_same_fingerprint_whatever_holds_them():
    prints = {kind: take_rows(make(ROWS), "data").spec.partition("@")[2] for kind, make in KINDS.items()}
    assert len(set(prints.values())) == 1
    assert take_rows(ROWS[:3], "data").spec.partition("@")[2] not in prints.values()
    assert take_rows(ROWS, "data").spec.startswith("object:list@")


def test_a_bad_row_is_named_by_its_index():
    with pytest.raises(DataError) as caught:
        read([*ROWS, {"text": 3, "label": "a"}, "loose words"])
    assert [problem.where for problem in caught.value.problems] == ["data[4]", "data[5]"]
    assert "a row must be a mapping" in str(caught.value) and "changes its type" in str(caught.value)


def test_a_missing_cell_of_a_frame_is_a_missing_value():
    with pytest.raises(DataError, match=r"data\[1\]  column 'text' is null"):
        read(pandas.DataFrame([ROWS[0], {"label": "b"}, *ROWS[2:]]))


def test_numbers_of_numpy_are_numbers():
    rows = [{"text": text, "label": numpy.int64(number % 2)} for number, text in enumerate("abcdef")]
    assert read(rows).labels == read(pandas.DataFrame(rows)).labels == ("0", "1")


def test_a_conversation_may_be_a_tuple_of_turns():
    turns = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"})
    assert len(read([{"messages": turns}, {"messages": (*turns, *turns)}], "chat").train) == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (iter(ROWS), "data of this kind cannot be read"),
        ({1, 2}, "builtins.set"),
        (b"text", "builtins.bytes"),
        ([], "an empty list"),
        (pandas.DataFrame(), "an empty DataFrame"),
        ({"test": ROWS}, "there is no train split"),
        ({"train": "train.jsonl"}, r"data\['train'\]"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "IterableDataset"),
    ],
)
def test_what_holds_no_rows_is_refused_by_name(value: Any, words: str):
    with pytest.raises((UsageError, DataError), match=words) as caught:
        take_rows(value, "data")
    assert isinstance(caught.value, PetuneError)


def test_rows_that_are_not_given_again_are_asked_for():
    with pytest.raises(DataError, match="give it again"):
        load_rows(DataConfig(take_rows(ROWS, "data").spec), "classify", Path())


def test_neither_library_is_imported_for_a_list(monkeypatch: pytest.MonkeyPatch):
    for name in ("datasets", "pandas"):
        monkeypatch.delitem(sys.modules, name)
    read(ROWS)
    assert not {"datasets", "pandas"} & set(sys.modules)


def test_words_in_numpy_arrays_as_pandas_reads_them_from_parquet_are_lists_of_words() -> None:
    rows = [{"tokens": ["red", "sun", str(at)], "tags": ["O", "B-X", "O"]} for at in range(4)]
    frame = pandas.DataFrame([{key: numpy.array(cells) for key, cells in row.items()} for row in rows])
    assert read(frame, "tokens").sha256 == read(rows, "tokens").sha256


def test_rows_that_differ_deep_in_an_array_have_another_fingerprint() -> None:
    first, second = (
        [{"text": "x", "label": "a", "more": numpy.arange(2000) + (numpy.arange(2000) == at)}]
        for at in (900, 1000)
    )
    assert take_rows(first, "data").spec != take_rows(second, "data").spec
