"""The order of a stream: every row once a pass, shuffled within its window, the same from wherever it is
asked; bad rows are told by their line when they are met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from petune.errors import DataError, FileError, UsageError
from petune.tasks import DataConfig
from petune.tasks.streamed import Streamed, stream_rows
from tests.tasks.conftest import byte_tokenizer

NUMBER = 30


def rows_of(number: int = NUMBER) -> list[dict[str, str]]:
    return [{"source": f"question {n}", "target": f"answer {n}"} for n in range(number)]


def write(path: Path, rows: list[dict[str, str]] | None = None) -> Path:
    rows = rows_of() if rows is None else rows
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text("source,target\n" + "".join(f"{row['source']},{row['target']}\n" for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def opened(path: Path, *, seed: int = 0, vocab_size: int | None = None, **changes: Any) -> Any:
    held = write(path.with_name("held.jsonl"), [{"source": "question 3", "target": "answer 3"}, *rows_of(2)])
    settings = {"window": 7, "stream": True, "eval": str(held)} | changes
    return stream_rows(
        DataConfig(str(path), **settings),
        "causal",
        path.parent,
        byte_tokenizer(),
        model_kind="decoder",
        max_positions=None,
        vocab_size=vocab_size,
        seed=seed,
        objects={},
    )


def stream(path: Path, **changes: Any) -> Streamed:
    found = opened(path, **changes)[1].stream
    assert found is not None
    return found


def lines(found: Streamed, first: int, count: int) -> list[int]:
    return [int(one.where.rsplit(":", 1)[1]) for one in found.examples(first, count)]


LEFT = NUMBER - 3  # the held-out rows are among them


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_every_row_comes_once_a_pass_within_its_window(suffix: str, tmp_path: Path) -> None:
    found = stream(write(tmp_path / f"d{suffix}"))
    shift = 2 if suffix == ".csv" else 1
    left = [n + shift for n in range(NUMBER) if n not in (0, 1, 3)]
    first, second = lines(found, 0, LEFT), lines(found, LEFT, LEFT)
    for order in (first, second):
        assert order != left
        for start in range(0, LEFT, 7):
            assert sorted(order[start : start + 7]) == left[start : start + 7]
    assert first != second
    assert first != lines(stream(write(tmp_path / f"d{suffix}"), seed=1), 0, LEFT)


def test_from_wherever_it_is_asked_a_place_holds_the_same_row(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl")
    whole = stream(path)
    expected = [example for step in range(40) for example in whole.examples(step * 4, 4)]
    for start in (0, 1, 6, 7, LEFT - 1, LEFT, 3 * LEFT + 5):
        assert stream(path).examples(start, 9) == expected[start : start + 9]
    assert whole.examples(3, 30) == expected[3:33]  # back again, over several windows


def test_the_first_distinct_rows_are_held_out_wherever_they_come_again(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [*rows_of(3), *rows_of(10)])
    facts, encoded = opened(path, held_out=3, eval=None)
    assert [one.where.rsplit(":", 1)[1] for one in encoded.eval] == ["1", "2", "3"]
    assert sorted(lines(encoded.stream, 0, 7)) == [7, 8, 9, 10, 11, 12, 13]
    assert any("first 3 distinct rows" in note for note in facts.notes)


def test_max_rows_are_the_first_of_each_pass(tmp_path: Path) -> None:
    found = stream(write(tmp_path / "d.jsonl"), max_rows=5)
    assert sorted(lines(found, 0, 5)) == sorted(lines(found, 5, 5)) == [3, 5, 6, 7, 8]


def test_a_bad_row_is_told_by_its_line_when_it_is_met(tmp_path: Path) -> None:
    rows: list[Any] = rows_of(300)
    path = write(tmp_path / "d.jsonl", rows)
    text = path.read_text().splitlines(keepends=True)
    text[250] = '{"source": "x"}\n'
    path.write_text("".join(text))
    found = stream(path)
    found.examples(0, 200)
    with pytest.raises(DataError, match=r"d\.jsonl:251"):
        found.examples(200, 60)
    skipping = stream(path, on_bad_line="skip")
    assert 251 not in lines(skipping, 0, 296)
    assert len(set(lines(skipping, 0, 296))) == 296


def test_too_many_bad_rows_are_not_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", rows_of(200))
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:110] + ["{\n"] * 20 + text[110:]))
    with pytest.raises(DataError, match="too many to skip"):
        stream(path, on_bad_line="skip").examples(0, 190)


def test_a_row_with_nothing_to_train_keeps_its_place(tmp_path: Path) -> None:
    rows = rows_of(8)
    rows[5]["source"] = "long " * 40
    held = write(tmp_path / "e.jsonl", [{"source": "a", "target": "b"}])
    found = stream(write(tmp_path / "d.jsonl", rows), max_length=40, eval=str(held))
    trained = {one.where.rsplit(":", 1)[1]: one.trained for one in found.examples(0, 8)}
    assert trained.pop("6") == 0
    assert len(trained) == 7
    assert all(trained.values())


def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_met(tmp_path: Path) -> None:
    rows = [*({"source": f"q{n}", "target": f"a{n}"} for n in range(150)), {"source": "q", "target": "a b"}]
    space = max(byte_tokenizer()("a b")["input_ids"])
    held = write(tmp_path / "e.jsonl", [{"source": "x", "target": "y"}])
    path = write(tmp_path / "d.jsonl", rows)
    found = stream(path, vocab_size=space, separator="-", eval=str(held))
    found.examples(0, 100)
    with pytest.raises(FileError, match="does not belong to the model"):
        found.examples(100, 60)


def test_what_is_no_file_and_what_has_classes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl")
    with pytest.raises(UsageError, match="cannot hold out a share"):
        opened(path, eval=None)
    with pytest.raises(UsageError, match="only files are streamed"):
        stream_rows(
            DataConfig("demo:docstrings", stream=True),
            "causal",
            tmp_path,
            byte_tokenizer(),
            model_kind="decoder",
            max_positions=None,
            vocab_size=None,
            seed=0,
            objects={},
        )
    labelled = tmp_path / "l.jsonl"
    labelled.write_text('{"text": "a", "label": "x"}\n')
    with pytest.raises(UsageError, match="must know its classes"):
        stream_rows(
            DataConfig(str(labelled), stream=True),
            "classify",
            tmp_path,
            byte_tokenizer(),
            model_kind="encoder",
            max_positions=None,
            vocab_size=None,
            seed=0,
            objects={},
        )
