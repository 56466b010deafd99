"""Strict tensor and JSON files: what safetensors writes is read, what it lets pass is refused, and damage is
never loaded half."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petune.errors import FileError, MachineError, PetuneError, TrainingFault
from petune.files import safetensors as tensorfile
from petune.files.safetensors import (
    DTYPES,
    parse_json,
    read_header,
    read_json,
    read_tensors,
    write_file,
    write_json,
    write_tensors,
)


def sample() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.layers.0.lora_A": torch.randn(3, 5, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "step": torch.tensor(3.0),
        "ids": torch.tensor([[1, -2], [2**40, 0]]),
        "mask": torch.tensor([True, False, True]),
        "words": torch.tensor([0, 2**32 - 1], dtype=torch.uint32),
        "none": torch.empty(0, 4),
        "turned": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
    }


def hand_made(path: Path, header: Any, data: bytes = b"\0" * 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    def raw(tensor: Tensor) -> bytes:
        return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""

    return set(left) == set(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and raw(left[name]) == raw(right[name])
        for name in left
    )


# ---------------------------------------------------------------- the format


def test_tensors_come_back_bit_identical(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", sample())
    assert same(read_tensors(tmp_path / "a"), sample())


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_round_trips_and_is_what_safetensors_reads(tmp_path: Path, name: str) -> None:
    tensors = {
        "x": torch.tensor([[0, 1], [1, 0], [1, 1]]).to(DTYPES[name]),
        "scalar": torch.tensor(1).to(DTYPES[name]),
    }
    write_tensors(tmp_path / "ours", tensors)
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    assert same(safetensors.torch.load_file(tmp_path / "ours"), tensors)
    assert same(read_tensors(tmp_path / "theirs"), tensors)
    assert same(read_tensors(tmp_path / "ours"), tensors)


def test_equal_tensors_give_equal_bytes_and_metadata_is_kept(tmp_path: Path) -> None:
    tensors = sample()
    write_tensors(tmp_path / "a", tensors, {"b": "2", "a": "é\n{}"})
    write_tensors(tmp_path / "b", dict(reversed(tensors.items())), {"a": "é\n{}", "b": "2"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    header = read_header(tmp_path / "a")
    assert header.metadata == {"a": "é\n{}", "b": "2"}
    assert header.tensors["turned"].shape == (3, 2) and header.tensors["half"].dtype == torch.bfloat16


def test_each_tensor_owns_its_memory(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", sample())
    read = read_tensors(tmp_path / "a")
    assert read["step"].untyped_storage().nbytes() == 4


def test_files_have_the_mode_of_ordinary_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_tensors(tmp_path / "a", sample())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_a_non_finite_value_is_neither_written_nor_read_unless_asked(tmp_path: Path) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2):
            tensors = {"w": torch.tensor([1.0, bad, 0.0]).to(dtype)}
            with pytest.raises(TrainingFault, match="w"):
                write_tensors(tmp_path / "a", tensors)
            assert not os.listdir(tmp_path)
            write_tensors(tmp_path / "a", tensors, finite=False)
            with pytest.raises(FileError, match="NaN or an infinity"):
                read_tensors(tmp_path / "a")
            assert same(read_tensors(tmp_path / "a", finite=False), tensors)
            (tmp_path / "a").unlink()


@pytest.mark.parametrize(
    "name", ["", "../../x", "/etc/x", "a/../b", "a\0b", "a\nb", "a\\b", "x" * 1025, "\ud800", "__metadata__"]
)
def test_a_bad_name_is_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError):
        write_tensors(tmp_path / "a", {name: torch.ones(2)})
    assert not os.listdir(tmp_path)


def test_no_tensors_and_unknown_dtypes_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_tensors(tmp_path / "a", {})
    with pytest.raises(ValueError, match="complex"):
        write_tensors(tmp_path / "a", {"x": torch.ones(2, dtype=torch.complex64)})


# ---------------------------------------------------------------- hostile and damaged files

HOSTILE: dict[str, Any] = {
    "no tensors": {},
    "only metadata": {"__metadata__": {"a": "b"}},
    "a key twice": (
        b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    ),
    "a field twice": b'{"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "an unknown field": {"x": entry() | {"code": "x"}},
    "a field missing": {"x": {"dtype": "F32", "shape": [2]}},
    "an empty name": {"": entry()},
    "a name out of the folder": {"../../x": entry()},
    "a name with NUL": {"a\0b": entry()},
    "an absolute name": {"/x": entry()},
    "a lone surrogate": b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "an overlap": {"x": entry(), "y": entry(4, 8, (1,))},
    "a hole": {"x": entry(4, 8, (1,))},
    "bytes behind": {"x": entry(0, 4, (1,))},
    "data missing": {"x": entry(0, 16, (4,))},
    "the wrong size": {"x": entry(shape=(3,))},
    "a negative size": {"x": entry(shape=(-2,))},
    "a huge size": {"x": entry(shape=(2**62,))},
    "sizes whose product wraps": {"x": entry(0, 8, (2**32, 2**32, 2))},
    "a huge empty tensor": {"x": entry(), "y": entry(8, 8, (0, 2**62, 2**62))},
    "a size beyond 64 bits": {"x": entry(8, 8, (0, 2**70)), "y": entry()},
    "a true size": b'{"x":{"dtype":"F32","shape":[true,2],"data_offsets":[0,8]}}',
    "a float size": b'{"x":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}',
    "a shape of text": {"x": entry(shape=("2",))},
    "too many dims": {"x": entry(shape=[1] * 70 + [2])},
    "offsets reversed": {"x": entry(8, 0)},
    "three offsets": {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}},
    "an unknown dtype": {"x": entry(dtype="F33")},
    "a dtype that is a list": {"x": entry(dtype=["F32"])},
    "an entry that is a list": {"x": []},
    "metadata that is no text": {"__metadata__": {"a": 1}, "x": entry()},
    "metadata that is a list": {"__metadata__": [], "x": entry()},
    "a number that is none": b'{"x":NaN}',
    "an endless number": b'{"x":' + b"9" * 10_000 + b"}",
    "an overflowing float": b'{"x":1e999}',
    "not UTF-8": b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "deep nesting": b'{"x":' + b"[" * 100_000,
    "text after the object": b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} {}',
    "a truth value of 2": ({"x": entry(0, 8, (8,), "BOOL")}, b"\2" * 8),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_naming_the_file(tmp_path: Path, case: str) -> None:
    made = HOSTILE[case]
    path = hand_made(tmp_path / "bad.safetensors", *(made if isinstance(made, tuple) else (made,)))
    with pytest.raises((FileError, MachineError)) as raised:
        read_tensors(path)
    assert "bad.safetensors" in str(raised.value)
    assert len(str(raised.value)) < 3000


@pytest.mark.parametrize("length", [0, 1, 7, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_an_impossible_header_length_is_refused_without_allocating(tmp_path: Path, length: int) -> None:
    path = tmp_path / "bad"
    path.write_bytes(struct.pack("<Q", length) + b'{"x":1}')
    with pytest.raises(FileError):
        read_tensors(path)


def test_a_header_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 10**9) + b"{")
        file.truncate(2 * 10**9)  # sparse
    with pytest.raises(FileError, match="too long"):
        read_tensors(path)


def test_the_costliest_header_stays_under_100_mb(tmp_path: Path) -> None:
    limit = tensorfile.MAX_HEADER
    worst = b'{"x":[' + b"[]," * (limit // 3 - 4) + b"[]]}"
    assert len(worst) <= limit
    hand_made(tmp_path / "bad", worst)
    code = (
        "import resource, sys, time; from pathlib import Path; "
        "from petune.files import safetensors as tensorfile; from petune.errors import FileError\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before, start = peak(), time.process_time()\n"
        "try: tensorfile.read_tensors(Path(sys.argv[1]))\n"
        "except FileError: print(peak() - before, time.process_time() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bad")], capture_output=True, text=True, check=True
    )
    kilobytes, seconds = map(float, done.stdout.split())
    assert kilobytes < 100_000
    assert seconds < 5  # 0.5 s when the machine is free; a quadratic check would take minutes


@pytest.mark.parametrize(
    ("first", "word"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML"),
        (b"\xef\xbb\xbf\n  <html>", "HTML"),
        (b'{"weight_map": {"a": "b"}}', "JSON"),
        (b"\x1f\x8b" + b"\0" * 30, "gzip"),
        (b"GGUF" + b"\0" * 30, "GGUF"),
        (b"\x93NUMPY" + b"\0" * 30, "numpy"),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s.", "pickle"),
        (b"\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.", "pickle"),
        (b"hello world, how are you", "safetensors"),
    ],
)
def test_a_foreign_file_is_recognised_by_its_first_bytes(tmp_path: Path, first: bytes, word: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(first)
    with pytest.raises(FileError, match=word) as raised:
        read_tensors(path)
    assert str(path) in str(raised.value)


def test_a_zip_is_recognised_and_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"cos\nsystem\n(S'touch fired'\ntR.")
    with pytest.raises(FileError, match="pickle"):
        read_tensors(path)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_header_of_640_bytes_is_no_pickle(tmp_path: Path) -> None:
    """Its length starts with the two bytes of a pickle."""
    path = tmp_path / "a"
    for pad in range(800):
        write_tensors(path, {"x": torch.ones(2)}, {"pad": "." * pad})
        if path.read_bytes()[:2] == b"\x80\x02":
            assert same(read_tensors(path), {"x": torch.ones(2)})
            return
    raise AssertionError("no header of that length was made")


def test_a_file_cut_at_any_header_offset_or_in_the_data_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write_tensors(whole, sample())
    raw = whole.read_bytes()
    start = read_header(whole).start
    for size in [*range(start + 1), *range(start, len(raw))]:
        cut.write_bytes(raw[:size])
        with pytest.raises(FileError):
            read_tensors(cut)
    cut.write_bytes(raw + b"\0")
    with pytest.raises(FileError, match="behind"):
        read_tensors(cut)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_a_header_of_random_edits_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "edited"
    write_tensors(path, sample(), {"note": "x"})
    raw = bytearray(path.read_bytes())
    start = read_header(path).start
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, start - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        read_tensors(path, finite=False)
    except PetuneError as error:
        assert "edited" in str(error)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write_tensors(path, {"x": torch.ones(100_000)})
    real = tensorfile._header

    def shrink(file: Any, where: Path) -> Any:
        header = real(file, where)
        os.truncate(path, header.start + 5000)
        return header

    monkeypatch.setattr(tensorfile, "_header", shrink)
    with pytest.raises(FileError, match="shorter"):
        read_tensors(path)


def test_a_file_larger_than_memory_is_a_machine_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tensors(tmp_path / "a", {"x": torch.ones(9)})

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 36 bytes")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(MachineError, match="memory"):
        read_tensors(tmp_path / "a")


def test_links_pipes_and_folders_are_refused_without_blocking(tmp_path: Path) -> None:
    write_tensors(tmp_path / "real", sample())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "absent"):
        with pytest.raises(FileError, match=name):
            read_tensors(tmp_path / name)
    assert same(read_tensors(tmp_path / "link", links=True), sample())


# ---------------------------------------------------------------- writing


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write_tensors(path, sample())
    before = path.read_bytes()
    for call in ("write", "rename", "fsync"):
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES):

            def refuse(*_: Any, code: int = code, **__: Any) -> None:
                raise OSError(code, os.strerror(code))

            with monkeypatch.context() as patch:
                patch.setattr(os, call, refuse)
                with pytest.raises(MachineError, match=errno.errorcode[code]) as raised:
                    write_tensors(path, {"x": torch.ones(9)}, sync=True)
            assert str(path) in str(raised.value)
            assert path.read_bytes() == before and os.listdir(tmp_path) == ["a"]


def test_a_file_size_limit_is_a_machine_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(MachineError, match="EFBIG"):
            write_tensors(tmp_path / "a", {"x": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not os.listdir(tmp_path)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
        write_tensors(tmp_path / "a", sample())
    assert same(read_tensors(tmp_path / "a"), sample())


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path, stop = tmp_path / "a", threading.Event()
    write_file(path, [b"0" * 50_000])

    def rewrite() -> None:
        for turn in range(150):
            write_file(path, [bytes([48 + turn % 10]) * 10_000 for _ in range(5)])
        stop.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not stop.is_set():
        text = path.read_bytes()
        assert len(text) == 50_000 and len(set(text)) == 1
    writer.join()


# ---------------------------------------------------------------- JSON


def test_json_floats_come_back_bit_identical(tmp_path: Path) -> None:
    values = {"x": [0.1, 1e-300, 5e-324, -0.0, 1 / 3, 2**60], "é": None}
    write_json(tmp_path / "a.json", values)
    assert repr(read_json(tmp_path / "a.json")) == repr(values)
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("nan")})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"a":1,"a":2}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b"\xff\xfe{}",
        b"[" * 99999,
        b"<html>",
        b'{"a":1,}',
    ],
)
def test_bad_json_is_refused_naming_the_file(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(FileError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_a_json_error_names_line_and_column() -> None:
    with pytest.raises(FileError, match=r"here:3:4"):
        parse_json(b'{"a":\n\n 1,}', "here")


def test_json_too_large_is_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(tensorfile.MAX_JSON + 1)
    with pytest.raises(FileError, match="too large"):
        read_json(tmp_path / "a.json")


def test_a_file_whose_folder_is_not_there_is_named_as_it_was_given(tmp_path: Path) -> None:
    place = tmp_path / "absent" / "page.html"
    with pytest.raises(MachineError) as caught:
        write_file(place, [b"x"])
    assert str(caught.value).startswith(f"{place}  cannot write")
    assert "mkdir -p" in str(caught.value)
