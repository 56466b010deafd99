"""Hashes of files: those that sha256sum prints, one reading of each file, no thread left behind, a change
while they are read found."""

from __future__ import annotations

import hashlib
import os
import threading
from io import FileIO
from pathlib import Path

import pytest

from petune.errors import FileError
from petune.files import hashes as file_hashes
from petune.files.hashes import FileHashes, differing


def test_they_are_those_of_the_whole_files_and_a_file_of_two_names_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened: list[Path] = []

    class Watched(FileIO):
        def __init__(self, path: Path) -> None:
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr("petune.files.hashes.FileIO", Watched)
    monkeypatch.setattr("petune.files.hashes._PORTION", 1000)
    contents = {"a": os.urandom(5001), "b": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with FileHashes({name: tmp_path / name for name in ("a", "b", "link")}) as hashes:
        found = hashes.result()
    assert found == {
        name: hashlib.sha256(contents.get(name, contents["a"])).hexdigest() for name in ("a", "b", "link")
    }
    assert sorted(path.name for path in opened) == ["a", "b"]


def test_leaving_early_ends_the_threads(tmp_path: Path):
    (tmp_path / "large").write_bytes(b"")
    os.truncate(tmp_path / "large", 1 << 36)  # a hole: minutes to hash
    with FileHashes({"large": tmp_path / "large"}):
        assert any(thread.name.startswith("petune-hash") for thread in threading.enumerate())
    assert not any(thread.name.startswith("petune-hash") for thread in threading.enumerate())


def test_a_file_that_changes_meanwhile_or_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(FileError, match=r"gone[\s\S]*does not exist"):
        FileHashes({"a": tmp_path / "gone"})
    (tmp_path / "a").write_bytes(b"before")
    stat = os.fstat

    def grown(number: int) -> os.stat_result:
        (tmp_path / "a").write_bytes(b"and after")
        return stat(number)

    monkeypatch.setattr("petune.files.hashes.os.fstat", grown)
    with (
        FileHashes({"a": tmp_path / "a"}) as hashes,
        pytest.raises(FileError, match="has changed while it was hashed"),
    ):
        hashes.result()


def test_a_large_file_that_has_not_changed_is_not_read_again_by_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("petune.files.hashes.REMEMBERED", 100)
    monkeypatch.setattr(file_hashes, "_cache", file_hashes._Cache())
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(bytes(200))
    small.write_bytes(bytes(50))
    monkeypatch.setattr(
        "petune.files.hashes.time.time_ns",
        lambda: max(large.stat().st_ctime_ns, large.stat().st_mtime_ns) + 3 * 10**9,
    )
    right = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (large, small)}
    files = {path.name: path for path in (large, small)}
    assert differing(files, right) == {}
    read: list[str] = []

    class Watched(FileIO):
        def __init__(self, path: Path) -> None:
            read.append(path.name)
            super().__init__(path)

    monkeypatch.setattr("petune.files.hashes.FileIO", Watched)
    assert differing(files, right) == {}
    assert read == ["small"]
    monkeypatch.setattr(file_hashes, "_cache", file_hashes._Cache())  # as another process starts
    assert differing(files, right) == {}
    assert read == ["small", "small"]
    assert differing(files, right, afresh=True) == {}
    assert sorted(read[2:]) == ["large", "small"]
    read.clear()
    times = large.stat()
    content = bytearray(200)
    content[77] = 1
    large.write_bytes(content)
    # the same size and time of modification: the system's own time tells
    os.utime(large, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert list(differing(files, right)) == ["large"]
    (tmp_path / "cache" / "petune" / "file_hashes.json").write_text("damaged")
    monkeypatch.setattr(file_hashes, "_cache", file_hashes._Cache())
    assert list(differing(files, right)) == ["large"]


def test_a_file_that_changed_just_now_is_not_remembered_nor_a_wrong_record_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("petune.files.hashes.REMEMBERED", 1)
    monkeypatch.setattr(file_hashes, "_cache", file_hashes._Cache())
    file = tmp_path / "a"
    file.write_bytes(b"now")
    right = {"a": hashlib.sha256(b"now").hexdigest()}
    assert differing({"a": file}, right) == {}
    assert not (tmp_path / "cache").exists()
    seen = file_hashes._look(file.stat())
    monkeypatch.setattr("petune.files.hashes.time.time_ns", lambda: max(seen) + 3 * 10**9)
    file_hashes._cache.add(file, seen, "0" * 64)
    assert differing({"a": file}, right) == {}
