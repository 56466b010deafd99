"""Hashes of files: those that sha256sum prints, one reading of each file, no thread left behind, a change while they are read found."""

from __future__ import annotations

import hashlib
import os
import threading
from io import FileIO
from pathlib import Path

import pytest

from petune.errors import FileError
from petune.file_hashes import FileHashes


def test_they_are_those_of_the_whole_files_and_a_file_of_two_names_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[Path] = []

    class Watched(FileIO):
        def __init__(self, path: Path) -> None:
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr("petune.file_hashes.FileIO", Watched)
    monkeypatch.setattr("petune.file_hashes._PORTION", 1000)
    contents = {"a": os.urandom(5001), "b": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with FileHashes({name: tmp_path / name for name in ("a", "b", "link")}) as hashes:
        found = hashes.result()
    assert found == {name: hashlib.sha256(contents.get(name, contents["a"])).hexdigest() for name in ("a", "b", "link")}
    assert sorted(path.name for path in opened) == ["a", "b"]


def test_leaving_early_ends_the_threads(tmp_path: Path):
    (tmp_path / "large").write_bytes(b"")
    os.truncate(tmp_path / "large", 1 << 36)  # a hole: minutes to hash
    with FileHashes({"large": tmp_path / "large"}):
        assert any(thread.name.startswith("petune-hash") for thread in threading.enumerate())
    assert not any(thread.name.startswith("petune-hash") for thread in threading.enumerate())


def test_a_file_that_changes_meanwhile_or_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(FileError, match=r"gone[\s\S]*does not exist"):
        FileHashes({"a": tmp_path / "gone"})
    (tmp_path / "a").write_bytes(b"before")
    stat = os.fstat

    def grown(number: int) -> os.stat_result:
        (tmp_path / "a").write_bytes(b"and after")
        return stat(number)

    monkeypatch.setattr("petune.file_hashes.os.fstat", grown)
    with FileHashes({"a": tmp_path / "a"}) as hashes, pytest.raises(FileError, match="has changed while it was hashed"):
        hashes.result()
