"""Rows under keys: what is written is read, by others too, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors import safe_open

from petune.errors import FileError, MachineError
from petune.files import row_store
from petune.files.row_store import RowStore

KIND = "2x4 float32 as float32"


def store(folder: Path, *, writes: bool = True, phase: int | None = None, token_bytes: int = 8) -> RowStore:
    return RowStore(folder, "encoder.0-1", token_bytes, KIND, writes, phase)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def row(number: int, tokens: int) -> list[memoryview]:
    """Two pieces of 4 bytes a token each."""
    return [memoryview(bytes([number + piece]) * 4 * tokens) for piece in (0, 100)]


def read(rows: RowStore, number: int, tokens: int) -> list[bytes] | None:
    place = rows.find(key(number))
    if place is None:
        return None
    assert place.tokens == tokens
    into = [memoryview(bytearray(4 * tokens)) for _ in range(2)]
    rows.read(place, into)
    return [bytes(piece) for piece in into]


def test_rows_of_any_length_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = store(tmp_path)
    for number, tokens in enumerate((1, 7, 300)):
        rows.write(key(number), tokens, row(number, tokens))
    rows.look(1)
    for number, tokens in enumerate((1, 7, 300)):
        assert read(rows, number, tokens) == [bytes(piece) for piece in row(number, tokens)]
    assert rows.nbytes == 8 * 308 and rows.find(key(3)) is None


def test_another_process_knows_what_is_there_and_writes_beside_it(tmp_path: Path) -> None:
    first = store(tmp_path)
    first.write(key(0), 2, row(0, 2))
    second = store(tmp_path)
    assert second.number == 1
    second.write(key(1), 3, row(1, 3))
    first.look(None)
    assert read(first, 1, 3) == [bytes(piece) for piece in row(1, 3)]
    assert read(second, 0, 2) == [bytes(piece) for piece in row(0, 2)]


def test_a_number_is_free_again_once_its_writer_has_ended(tmp_path: Path) -> None:
    first = store(tmp_path)
    first.write(key(0), 2, row(0, 2))
    first.close()
    second = store(tmp_path)
    assert second.number == 0 and second.find(key(0)) is not None
    second.write(key(1), 3, row(1, 3))
    second.look(None)
    assert read(second, 0, 2) and read(second, 1, 3)


def test_processes_that_look_at_the_same_moments_know_the_same_rows(tmp_path: Path) -> None:
    writer, reader = store(tmp_path), store(tmp_path, writes=False)
    writer.look(1)
    writer.write(key(0), 2, row(0, 2))
    reader.look(1)  # late, after the row of this phase was written
    assert reader.find(key(0)) is None and writer.find(key(0)) is None
    for rows in (writer, reader):
        rows.look(2)
    assert reader.find(key(0)) is not None and writer.find(key(0)) is not None


def test_a_store_that_is_opened_between_two_looks_knows_no_row_of_now(tmp_path: Path) -> None:
    writer = store(tmp_path)
    writer.look(4)
    writer.write(key(0), 2, row(0, 2))
    assert store(tmp_path, writes=False, phase=4).find(key(0)) is None
    assert store(tmp_path, writes=False).find(key(0)) is not None


def test_a_key_is_written_once(tmp_path: Path) -> None:
    rows = store(tmp_path)
    rows.write(key(0), 2, row(0, 2))
    end = rows.end
    rows.write(key(0), 2, row(5, 2))
    assert rows.end == end
    rows.look(None)
    assert read(rows, 0, 2) == [bytes(piece) for piece in row(0, 2)]


@pytest.mark.parametrize("cut", range(1, 44))
def test_a_record_that_a_killed_process_has_left_half_is_no_row(tmp_path: Path, cut: int) -> None:
    rows = store(tmp_path)
    for number in range(2):
        rows.write(key(number), 2, row(number, 2))
    rows.close()
    index = tmp_path / "encoder.0-1.0.index"
    os.truncate(index, index.stat().st_size - cut)
    again = store(tmp_path)
    assert again.find(key(0)) is not None and again.find(key(1)) is None
    again.write(key(1), 2, row(1, 2))  # goes on where the last whole record ends
    again.look(None)
    assert read(again, 1, 2) == [bytes(piece) for piece in row(1, 2)]


def test_rows_whose_bytes_have_changed_are_not_there(tmp_path: Path) -> None:
    rows = store(tmp_path)
    rows.write(key(0), 2, row(0, 2))
    rows.write(key(1), 2, row(1, 2))
    rows.close()
    (path,) = tmp_path.glob("*.safetensors")
    with path.open("r+b") as file:
        file.seek(rows.end - 1)
        file.write(b"?")
    again = store(tmp_path)
    assert again.find(key(0)) is not None
    assert again.find(key(1)) is None and again.damaged == 1


def test_a_record_with_a_changed_byte_is_no_row(tmp_path: Path) -> None:
    rows = store(tmp_path)
    rows.write(key(0), 2, row(0, 2))
    rows.close()
    index = tmp_path / "encoder.0-1.0.index"
    text = bytearray(index.read_bytes())
    text[-10] ^= 1
    index.write_bytes(text)
    assert store(tmp_path).find(key(0)) is None


def test_a_file_that_became_shorter_is_an_error_in_words(tmp_path: Path) -> None:
    rows = store(tmp_path)
    rows.write(key(0), 2, row(0, 2))
    rows.look(None)
    (path,) = tmp_path.glob("*.safetensors")
    os.truncate(path, 100)
    with pytest.raises(FileError, match="ends before a row"):
        read(rows, 0, 2)


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    store(tmp_path).close()
    with pytest.raises(FileError, match="rows of another kind") as caught:
        store(tmp_path, token_bytes=16)
    assert "8 bytes a token" in str(caught.value)
    assert RowStore.kind_in(tmp_path, "encoder.0-1") == KIND
    assert RowStore.kind_in(tmp_path, "decoder.0-1") is None


def test_segments_begin_when_the_last_is_full_and_other_libraries_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "SEGMENT", 256)
    rows = store(tmp_path)
    for number, tokens in enumerate((20, 20, 100)):  # the last is longer than a segment
        rows.write(key(number), tokens, row(number, tokens))
    rows.look(None)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    for number, tokens in enumerate((20, 20, 100)):
        assert read(rows, number, tokens) == [bytes(piece) for piece in row(number, tokens)]
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert len(file.get_tensor("rows")) >= 256


def test_a_full_disk_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = store(tmp_path)
    monkeypatch.setattr(os, "pwritev", lambda *_: 3)
    with pytest.raises(MachineError, match="ENOSPC"):
        rows.write(key(0), 2, row(0, 2))
    monkeypatch.undo()
    rows.look(None)
    assert rows.find(key(0)) is None
