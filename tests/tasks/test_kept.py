"""Kept rows are those that would be made now: whatever they follow from has an entry of its own, and what is
damaged, half written or cannot be kept is made anew."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from petune.demo import model_path
from petune.errors import DataError
from petune.tasks import DataConfig, kept
from petune.tasks.kept import Asked, Shelf, rows_and_examples
from tests.tasks.conftest import byte_tokenizer

SETTINGS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 20},
    "truncation": {"truncation": "left", "max_length": 20},
    "packing": {"packing": True, "max_length": 64},
    "separator": {"separator": " -> "},
    "split": {"split": 0.3},
    "max_rows": {"max_rows": 9},
}


def write(path: Path, number: int = 30) -> Path:
    rows = ({"source": f"question {n}", "target": f"answer {n * n}"} for n in range(number))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def asked(path: Path, *, tokenizer: Any = None, **changes: Any) -> Asked:
    own = {name: changes.pop(name) for name in ("task", "seed", "vocab_size") if name in changes}
    facts: dict[str, Any] = {"task": "causal", "seed": 0, "vocab_size": None} | own
    return Asked(
        DataConfig(str(path), **changes),
        facts["task"],
        path.parent,
        tokenizer or byte_tokenizer(),
        "decoder",
        None,
        facts["vocab_size"],
        facts["seed"],
        None,
        {},
    )


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "shelf", 2**30, all=True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever rows are made."""
    found: list[str] = []
    make = Asked.make

    def counted(self: Asked) -> Any:
        found.append(self.config.path)
        return make(self)

    monkeypatch.setattr(Asked, "make", counted)
    return found


@pytest.mark.parametrize("change", [{}, *SETTINGS.values()], ids=["nothing", *SETTINGS])
def test_the_second_time_rows_are_mapped_and_equal(
    change: dict[str, Any], tmp_path: Path, shelf: Shelf, made: list[str]
) -> None:
    one = asked(write(tmp_path / "d.jsonl"), **change)
    expected = one.make()
    first, second = rows_and_examples(one, shelf), rows_and_examples(one, shelf)
    assert len(made) == 2
    for facts, encoded in (first, second):
        assert facts == expected[0]
        assert list(encoded.train) == list(expected[1].train)
        assert list(encoded.eval) == list(expected[1].eval)
        assert (encoded.report, encoded.packed) == (expected[1].report, expected[1].packed)
        assert encoded.kept is not None


def test_masked_words_are_drawn_alike_from_kept_rows(tmp_path: Path, shelf: Shelf) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": f"the quick fox {n} runs home"}) + "\n" for n in range(30)))
    bert = AutoTokenizer.from_pretrained(model_path("minilm"))
    one = replace(asked(path, task="mlm", tokenizer=bert), model_kind="encoder")
    expected, (_, found) = one.make()[1], [rows_and_examples(one, shelf) for _ in range(2)][1]
    assert found.kept is not None
    assert list(found.eval) == list(expected.eval)
    assert found.drawn(found.train, "step 3") == expected.drawn(expected.train, "step 3")


def test_every_setting_the_content_the_name_and_the_tokenizer_make_another_entry(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl")
    base = asked(path)
    others = [asked(path, **change) for change in SETTINGS.values()]
    others += [asked(write(tmp_path / "e.jsonl")), asked(path, vocab_size=300)]
    others += [asked(path, tokenizer=byte_tokenizer(bos=False)), asked(path, seed=1, split_by="seed")]
    limited = byte_tokenizer()
    limited.model_max_length = 100
    keys = [one.key(all=True) for one in (base, *others, asked(path, tokenizer=limited))]
    write(path, 31)
    keys.append(base.key(all=True))
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_what_changes_no_example_makes_no_other_entry(tmp_path: Path) -> None:
    path, tokenizer = write(tmp_path / "d.jsonl"), byte_tokenizer()
    before = asked(path, tokenizer=tokenizer).key(all=True)
    tokenizer("some text", truncation=True, max_length=3)
    tokenizer.name_or_path = "elsewhere"
    assert asked(path, tokenizer=tokenizer, seed=7).key(all=True) == before


def test_small_data_are_kept_only_where_a_folder_is_named(tmp_path: Path, shelf: Shelf) -> None:
    one = asked(write(tmp_path / "d.jsonl"))
    assert rows_and_examples(one, replace(shelf, all=False))[1].kept is None
    assert not shelf.folder.exists()


def test_a_tokenizer_of_other_code_is_not_trusted_to_stay_the_same(tmp_path: Path, shelf: Shelf) -> None:
    class Mine(type(byte_tokenizer())):  # type: ignore[misc]
        pass

    own = byte_tokenizer()
    own.__class__ = Mine
    assert rows_and_examples(asked(write(tmp_path / "d.jsonl"), tokenizer=own), shelf)[1].kept is None


def damage(entry: Path, how: str) -> None:
    file = entry / "train.arrow"
    if how == "a byte has changed":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "a file is cut off":
        os.truncate(file, 100)
    elif how == "a file is missing":
        file.unlink()
    elif how == "the manifest is missing":
        (entry / kept.MANIFEST).unlink()
        os.truncate(file, 100)
    else:
        (entry / "facts.json").write_text("{")


@pytest.mark.parametrize(
    "how",
    [
        "a byte has changed",
        "a file is cut off",
        "a file is missing",
        "the manifest is missing",
        "facts are damaged",
    ],
)
def test_what_is_damaged_is_said_and_made_anew(
    how: str, tmp_path: Path, shelf: Shelf, made: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    one = asked(write(tmp_path / "d.jsonl"))
    _, encoded = rows_and_examples(one, shelf)
    assert encoded.kept is not None
    expected = list(encoded.train)
    damage(encoded.kept, how)
    assert list(rows_and_examples(one, shelf)[1].train) == expected
    assert "damaged, and made anew" in caplog.text
    assert list(rows_and_examples(one, shelf)[1].train) == expected
    assert len(made) == 2


def test_an_entry_that_was_not_finished_is_none(tmp_path: Path, shelf: Shelf, made: list[str]) -> None:
    one = asked(write(tmp_path / "d.jsonl"))
    _, encoded = rows_and_examples(one, shelf)
    assert encoded.kept is not None
    entry = encoded.kept
    left = entry.with_name(f".{entry.name}.tmp-999999999")  # of a process that was killed
    shutil.copytree(entry, left)
    shutil.rmtree(entry)
    assert rows_and_examples(one, shelf)[1].kept == entry
    assert len(made) == 2
    assert not left.exists()


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(kept.Examples, "write", fail)


def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "mkdir", fail)


@pytest.mark.parametrize(("obstacle", "word"), [(full, "No space left"), (no_folder, "ermission")])
def test_where_nothing_can_be_kept_that_is_said_and_the_run_goes_on(
    obstacle: Callable[[pytest.MonkeyPatch], None],
    word: str,
    tmp_path: Path,
    shelf: Shelf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = asked(write(tmp_path / "d.jsonl"))
    expected = one.make()[1]
    obstacle(monkeypatch)
    _, encoded = rows_and_examples(one, shelf)
    assert (list(encoded.train), encoded.kept) == (list(expected.train), None)
    said = caplog.text
    assert "not kept" in said
    assert word in said
    assert not [path for path in shelf.folder.glob("*") if path.is_dir()]


def test_bad_rows_are_told_as_without_a_shelf_and_nothing_is_kept(tmp_path: Path, shelf: Shelf) -> None:
    path = write(tmp_path / "d.jsonl")
    path.write_text(path.read_text() + '{"source": "x"}\n')
    one = asked(path)
    with pytest.raises(DataError) as plain:
        one.make()
    with pytest.raises(DataError) as found:
        rows_and_examples(one, shelf)
    assert str(found.value) == str(plain.value)
    assert list(shelf.folder.glob("*")) == []


def test_the_longest_unused_entry_goes_first(tmp_path: Path, shelf: Shelf) -> None:
    entries = []
    for name in "abc":
        _, encoded = rows_and_examples(asked(write(tmp_path / f"{name}.jsonl")), shelf)
        assert encoded.kept is not None
        entries.append(encoded.kept)
    for age, entry in zip((10, 30, 20), entries, strict=True):
        os.utime(entry, (1e9 - age, 1e9 - age))
    used = asked(tmp_path / "b.jsonl")
    rows_and_examples(used, shelf)  # now it is the newest
    tight = replace(shelf, most=shelf.used())
    rows_and_examples(asked(write(tmp_path / "d.jsonl")), tight)
    assert [entry.exists() for entry in entries] == [True, True, False]
    assert tight.used() <= tight.most


def test_what_is_larger_than_the_shelf_is_not_kept(
    tmp_path: Path, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    _, encoded = rows_and_examples(asked(write(tmp_path / "d.jsonl")), replace(shelf, most=100))
    assert encoded.kept is None
    assert "rows_cache_gib" in caplog.text


def test_of_several_that_ask_at_once_one_makes_and_the_others_wait(
    tmp_path: Path, shelf: Shelf, made: list[str]
) -> None:
    path, found = write(tmp_path / "d.jsonl", 300), []

    def ask() -> None:
        found.append(list(rows_and_examples(asked(path), shelf)[1].train))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found[1:] == found[:-1]
    assert not list(shelf.folder.glob("*.lock"))


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, make = write(tmp_path / "d.jsonl"), Asked.make

    def changing(self: Asked) -> Any:
        found = make(self)
        write(path, 40)
        return found

    monkeypatch.setattr(Asked, "make", changing)
    assert rows_and_examples(asked(path), shelf)[1].kept is None
    assert "has changed while it was read" in caplog.text
