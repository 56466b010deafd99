"""Parquet files and saved data sets, damaged or made to fill the memory: a DataError (exit code 3), soon,
within a stated memory."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from petune.errors import DataError
from petune.tasks import DataConfig, load_rows
from petune.tasks.arrow import refuse_compressed
from petune.tasks.bad_rows import Faults
from petune.tasks.read import read_file
from petune.tasks.sources import find_source


def written(path: Path, rows: int = 300, compression: str = "snappy") -> Path:
    """A good file of several row groups: texts, labels, numbers, lists."""
    texts = [f"a text of some words, number {number}" * (1 + number % 3) for number in range(rows)]
    table = pyarrow.table(
        {
            "text": texts,
            "label": ["ab"[number % 2] for number in range(rows)],
            "list": [[1, 2], None, [3]] * (rows // 3),
        }
    )
    pyarrow.parquet.write_table(table, path, row_group_size=64, compression=compression)
    return path


def damages(whole: bytes, number: int) -> Iterator[bytes]:
    """Copies with some bits flipped, and cut ones, in turn."""
    draw = random.Random(0)
    for at in range(number):
        damaged = bytearray(whole)
        if at % 2:
            for _ in range(draw.choice((1, 1, 8, 64))):
                damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        else:
            del damaged[draw.randrange(len(damaged)) :]
        yield bytes(damaged)


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_a_damaged_parquet_file_is_always_a_fault_of_the_data(compression: str, tmp_path: Path):
    """Sixty damages of each kind of file. A flip in a text itself may pass unseen, for Parquet has no
    checksum of it."""
    whole, found = written(tmp_path / "whole.parquet", compression=compression).read_bytes(), 0
    path = tmp_path / "damaged.parquet"
    for damaged in damages(whole, 60):
        path.write_bytes(damaged)
        try:
            list(read_file(path, Faults(skip=False)))
        except DataError as error:
            assert error.code == 3 and "damaged.parquet" in str(error)
            found += 1
    assert found >= 30


def test_a_damaged_data_set_of_datasets_is_always_a_fault_of_the_data(tmp_path: Path):
    datasets.Dataset.from_dict({"text": [f"hello {number}" for number in range(300)]}).save_to_disk(
        str(tmp_path / "saved")
    )
    file, found = next((tmp_path / "saved").glob("*.arrow")), 0
    for damaged in damages(file.read_bytes(), 40):
        file.unlink()  # it is mapped by the reader of the one before
        file.write_bytes(damaged)
        try:
            list(find_source("saved", tmp_path).records("train", Faults(skip=False)))
        except DataError as error:
            assert error.code == 3 and "saved" in str(error)
            found += 1
    assert found >= 20


@pytest.mark.parametrize("codec", ["zstd", "lz4", None])
@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_a_compressed_arrow_file_is_refused_before_it_fills_the_memory(
    codec: str | None, kind: str, dictionary: bool, tmp_path: Path
) -> None:
    """16 MiB of one letter in some kilobytes: a saved data set of 5 KB could hold 36 GB."""
    texts = pyarrow.array(["0" * 2**24])
    table = pyarrow.table({"text": texts.dictionary_encode() if dictionary else texts})
    file, options = tmp_path / "data.arrow", pyarrow.ipc.IpcWriteOptions(compression=codec)
    make = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with make(str(file), table.schema, options=options) as writer:
        writer.write_table(table)
    before = pyarrow.total_allocated_bytes()
    if codec is None:
        return refuse_compressed(file)
    with pytest.raises(DataError, match=r"data\.arrow  the table is compressed"):
        refuse_compressed(file)
    assert pyarrow.total_allocated_bytes() - before < 2**20


def test_a_saved_data_set_with_a_compressed_table_is_refused(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["red", "blue"]}).save_to_disk(str(saved))
    file = next(saved.glob("*.arrow"))
    with pyarrow.ipc.open_stream(file) as reader:
        table = reader.read_all()
    with pyarrow.ipc.new_stream(
        str(file), table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="the table is compressed"):
        list(find_source(str(saved), tmp_path).records("train", Faults(skip=False)))


def test_a_small_file_that_holds_gigabytes_is_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One text of 1 MiB, told 4,000 times over by a dictionary: 1.3 MB of memory at most for each of the rows
    that are read."""
    monkeypatch.setattr("petune.tasks.read.MOST_DECODED", 2**26)
    text = pyarrow.array(["x" * 2**20])
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4000, pyarrow.int32()), text)
    path = tmp_path / "bomb.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": repeated}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="the rows take more than") as caught:
        load_rows(DataConfig(str(path), max_rows=8), "causal", tmp_path)
    assert caught.value.code == 3 and "bomb.parquet" in str(caught.value)
    assert time.monotonic() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: a gigabyte, of four


def test_a_row_group_that_says_it_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("petune.tasks.read.MOST_DECODED", 0)
    monkeypatch.setattr("petune.tasks.read.MOST_GROWTH", 5)
    path = tmp_path / "zeros.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["0" * 2**24]}), path, compression="zstd", use_dictionary=False
    )
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "iter_batches", lambda *a, **k: pytest.fail("it was read")
    )
    with pytest.raises(DataError, match=r"16 MiB|take more than"):
        list(read_file(path, Faults(skip=False)))


def test_rows_of_nothing_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("petune.tasks.read.MOST_DECODED", 2**20)
    path = tmp_path / "nothing.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.nulls(2_000_000, pyarrow.string())}), path)
    with pytest.raises(DataError, match="take more than"):
        list(read_file(path, Faults(skip=False)))


def test_a_good_file_is_read_whole_and_the_machines_faults_stay_the_machines(tmp_path: Path):
    path = written(tmp_path / "good.parquet")
    found = list(read_file(path, Faults(skip=False)))
    assert [record.columns for record in found] == pyarrow.parquet.read_table(path).to_pylist()
    assert found[299].where.endswith("good.parquet:300")
