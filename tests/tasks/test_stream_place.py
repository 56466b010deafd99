"""Where a stream stands: from a mark that was JSON it goes on as if it had not been interrupted, reads none
of the rows before, and begins anew, in words, where those are no longer what was read."""

from __future__ import annotations

import csv
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petune.errors import DataError, FileError
from petune.files.json_fields import check_fields
from petune.tasks import MARK, DataConfig
from petune.tasks.streamed import Streamed, stream_rows
from tests.tasks.conftest import byte_tokenizer

TOKENIZER = byte_tokenizer()
SUFFIXES = (".jsonl", ".csv", ".parquet", ".json")


def write(path: Path, first: int, number: int, bad: frozenset[int] = frozenset()) -> Path:
    """Rows `first` and so on, of two lines each; those in `bad` are none where a file can have such."""
    rows = [{"source": f"question\n{n}", "target": f"answer {n}"} for n in range(first, first + number)]
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["source", "target"])
            for row, n in zip(rows, range(first, first + number), strict=True):
                table.writerow([*row.values(), *(["more"] if n in bad else [])])
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        lines = (
            "{\n" if n in bad else json.dumps(row) + "\n\n"
            for row, n in zip(rows, range(first, first + number), strict=True)
        )
        path.write_text("".join(lines), encoding="utf-8")
    return path


def stream(spec: Path, **changes: Any) -> Streamed:
    held = spec.parent / "held" / "rows.jsonl"
    if not held.exists():
        held.parent.mkdir()
        write(held, 3, 2)
    config = DataConfig(str(spec), **{"stream": True, "eval": str(held), "window": 7} | changes)
    sizes = {"model_kind": "decoder", "max_positions": None, "vocab_size": None, "seed": 0}
    found = stream_rows(config, "causal", spec.parent, TOKENIZER, objects={}, **sizes)[1].stream
    assert found is not None
    return found


def taken(found: Streamed, count: int, steps: range, back: int = 0) -> Iterator[tuple[Any, Any]]:
    """What each step trains on, or the words of its error, and the mark after it; with `back` before it, as
    for a stop that comes when its rows were asked for."""
    for step in steps:
        try:
            examples = found.examples(step * count, count)
        except DataError as error:
            yield str(error), None
            return
        yield examples, json.loads(json.dumps(found.mark((step + 1 - back) * count)))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_stream_goes_on_from_any_mark_as_if_it_had_not_been_interrupted(data: st.DataObject) -> None:
    sizes = data.draw(
        st.lists(st.tuples(st.sampled_from(SUFFIXES), st.integers(1, 30)), min_size=1, max_size=4)
    )
    changes = {
        "window": data.draw(st.integers(1, 9)),
        "max_rows": data.draw(st.none() | st.integers(1, 50)),
        "on_bad_line": "skip",
    }
    bad, count = data.draw(st.frozensets(st.integers(20, 90), max_size=2)), data.draw(st.integers(1, 11))
    steps, back = data.draw(st.integers(2, 12)), data.draw(st.integers(0, 1))
    with tempfile.TemporaryDirectory() as folder:
        first = 0
        for number, (suffix, size) in enumerate(sizes):
            write(Path(folder) / f"{number}{suffix}", first, size, bad)
            first += size
        spec = Path(folder) / "*.*"
        try:
            whole = list(taken(stream(spec, **changes), count, range(steps), back))
        except DataError:  # no row is left, which is told before a step
            return
        expected = [found for found, _ in whole]
        at = data.draw(st.integers(1, len(whole)))
        mark, at = whole[at - 1][1], at - back
        if mark is None:
            return
        check_fields(mark, MARK, Path("manifest.json"))
        again = stream(spec, **changes)
        unfit = again.go_to(at * count, mark)
        assert [found for found, _ in taken(again, count, range(at, steps))] == expected[at:]
        if mark["reading"] is None or not mark["reading"]["cursor"]["whole"]:
            assert unfit is None


def assert_not_read_again(path: Path, window: int, first: int, old: bytes, bad: bytes, fault: str) -> None:
    """A mark before the rows from `first` on is entered, though rows before it cannot be read any more."""
    whole = stream(path, window=window)
    expected = whole.examples(first, 10)
    mark = whole.mark(first)
    text = path.read_bytes()
    assert text.count(old) == 1
    path.write_bytes(text.replace(old, bad))
    again = stream(path, window=window)
    assert again.go_to(first, mark) is None
    assert again.examples(first, 10) == expected
    with pytest.raises(DataError, match=fault):
        stream(path, window=window).examples(first, 10)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_what_was_read_is_not_read_again(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"d{suffix}", 0, 8000)
    assert_not_read_again(path, 1000, 7000, b"answer 3500", b"\xff" * 11, "UTF-8")


def test_groups_of_rows_that_were_read_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    rows = [{"source": f"question {n} " + "long " * 9, "target": f"answer {n}"} for n in range(4000)]
    pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=500, compression="none")
    assert_not_read_again(path, 500, 3600, b"answer 1900", b"answer\xff1900", "Parquet")


def test_a_file_that_was_mended_behind_a_mark_is_entered_there(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", 0, 300, frozenset([250]))
    found = stream(path)
    expected, mark = found.examples(224, 8), found.mark(224)
    with pytest.raises(DataError, match=r"jsonl:501"):
        found.examples(232, 60)
    write(path, 0, 300)
    again = stream(path)
    assert again.go_to(224, mark) is None
    assert again.examples(224, 8) == expected
    assert len(again.examples(232, 60)) == 60


@pytest.mark.parametrize(
    ("line", "on_bad_line", "said"),
    [
        ('{"source": 7, "target": "x"}\n', "error", r"changes its type"),
        ("{\n" * 6, "skip", "too many to skip"),
    ],
)
def test_rows_before_a_mark_are_remembered_by_what_judges_those_behind_it(
    line: str, on_bad_line: str, said: str, tmp_path: Path
) -> None:
    rows = [json.dumps({"source": f"question {n}", "target": "an answer"}) + "\n" for n in range(160)]
    bad = ["{\n"] * 3 if on_bad_line == "skip" else []
    path = tmp_path / "d.jsonl"
    path.write_text("".join([*rows[:60], *bad, *rows[60:150], line, *rows[150:]]))
    whole, again = stream(path, on_bad_line=on_bad_line), stream(path, on_bad_line=on_bad_line)
    whole.examples(110, 8)
    assert again.go_to(118, whole.mark(118)) is None
    words = []
    for found in (whole, again):
        with pytest.raises(DataError, match=said) as caught:
            found.examples(118, 42)
        words.append(str(caught.value))
    assert words[0] == words[1]


def changed(mark: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    path.write_text(path.read_text().replace("answer 11", "another 11"))
    return mark, {}


def gone(mark: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return mark | {"reading": mark["reading"] | {"cursor": mark["reading"]["cursor"] | {"file": 9}}}, {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (changed, r"d\.jsonl, or a file before it, is not what was read"),
        (gone, "is not what was read"),
        (lambda mark, path: (None, {}), "does not say where they are"),
        (lambda mark, path: (mark | {"place": 25}, {}), "stands beyond them"),
        (lambda mark, path: (mark, {"window": 6}), "in which order, has changed"),
        (lambda mark, path: (mark, {"max_rows": 29}), "in which order, has changed"),
    ],
)
def test_a_mark_that_does_not_fit_is_said_and_all_is_read_again(
    change: Any, why: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "d.jsonl", 0, 30)
    found = stream(path)
    found.examples(16, 8)
    mark, settings = change(found.mark(24), path)
    again = stream(path, **settings)
    said = again.go_to(24, mark)
    assert re.search(why, str(said))
    assert again.examples(24, 9) == stream(path, **settings).examples(24, 9)


def test_a_file_that_is_one_array_is_read_again_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "d.json", 0, 30)
    found, again = stream(path, window=8), stream(path, window=8)
    found.examples(0, 16)
    assert "d.json can only be read from its beginning" in str(again.go_to(16, found.mark(16)))
    assert again.examples(16, 4) == found.examples(16, 4)
    expected = found.examples(28, 5)  # of the second pass, whose beginning is that of the file
    assert again.go_to(28, found.mark(28)) is None
    assert again.examples(28, 5) == expected


@pytest.mark.parametrize("field", ["place", "order", "reading"])
def test_a_mark_of_another_kind_is_refused(field: str, tmp_path: Path) -> None:
    mark = dict(stream(write(tmp_path / "d.jsonl", 0, 30)).mark(0)) | {field: -1}
    with pytest.raises(FileError, match=field):
        check_fields(mark, MARK, tmp_path / "manifest.json")
