"""Wrong data files: each gives a DataError (exit code 3) that names file and line, never a traceback of
something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from petune.errors import DataError
from petune.tasks import DataConfig, load_rows
from petune.tasks.configs import MAX_LINE_BYTES
from tests.tasks.wrong_data import GOOD, WRONG


@pytest.mark.parametrize(
    ("name", "raw", "task", "says"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_a_wrong_file_is_refused_with_its_place(
    name: str, raw: bytes, task: str, says: list[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(raw)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError) as caught:
        load_rows(DataConfig(name), task, tmp_path)
    assert caught.value.code == 3
    for part in says:
        assert part in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_a_label_held_out_but_never_trained_is_named_with_the_nearest(jsonl, tmp_path: Path) -> None:
    train = jsonl(
        {"text": "x", "label": "good"}, {"text": "y", "label": "bad"}, {"text": "z", "label": "bad"}
    )
    held_out = jsonl({"text": "w", "label": "goood"}, name="held.jsonl")
    with pytest.raises(DataError, match=r"held.jsonl:1 .*'goood'[\s\S]*did you mean: good"):
        load_rows(DataConfig(train, eval=held_out), "classify", tmp_path)


def test_the_first_ten_bad_rows_are_told_and_all_are_counted(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(GOOD + b"nonsense\n" * 37)
    with pytest.raises(DataError) as caught:
        load_rows(DataConfig("d.jsonl"), "classify", tmp_path)
    assert len(caught.value.problems) == 11
    assert [problem.where.rsplit(":", 2)[1] for problem in caught.value.problems[:10]] == [
        str(line) for line in range(5, 15)
    ]
    assert "27 more" in caught.value.problems[-1].what


def many(bad: int) -> bytes:
    rows = [json.dumps({"text": f"row {number}", "label": "ab"[number % 2]}) for number in range(100 - bad)]
    return "\n".join([*rows, *["{"] * bad]).encode() + b"\n"


def test_skipping_counts_the_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(many(5))
    rows = load_rows(DataConfig("d.jsonl", on_bad_line="skip"), "classify", tmp_path)
    assert len(rows.train) + len(rows.eval) == 95
    assert any("skipped 5 bad rows (5.0%)" in note for note in rows.notes)


def test_skipping_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(many(6))
    with pytest.raises(DataError, match=r"too many to skip[\s\S]* mend or delete these rows"):
        load_rows(DataConfig("d.jsonl", on_bad_line="skip"), "classify", tmp_path)


def test_what_follows_an_unreadable_place_is_never_skipped(tmp_path: Path) -> None:
    rows = "".join(f"row {number},{'ab'[number % 2]}\n" for number in range(100))
    (tmp_path / "d.csv").write_text("text,label\n" + rows + '"open,a\n' + rows)
    with pytest.raises(DataError, match="not CSV"):
        load_rows(DataConfig("d.csv", on_bad_line="skip"), "classify", tmp_path)


def test_a_line_of_the_greatest_length_is_read(tmp_path: Path) -> None:
    start, end = b'{"text": "', b'"}\n'
    (tmp_path / "d.jsonl").write_bytes(
        start + b"x" * (MAX_LINE_BYTES - len(start) - len(end)) + end + b'{"text": "short"}\n'
    )
    assert len(load_rows(DataConfig("d.jsonl"), "causal", tmp_path).train) == 1


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b""], ids=["with a byte-order mark", "without one"])
def test_marks_blank_lines_and_windows_line_ends_are_no_fault(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(start + GOOD.replace(b"\n", b"\r\n\r\n"))
    rows = load_rows(DataConfig("d.jsonl"), "classify", tmp_path)
    assert len(rows.train) + len(rows.eval) == 4
    assert any("4 blank lines" in note for note in rows.notes)
