"""Boxes of tensors in files: the same values as narrowing the whole, few reads, and a strict reader."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from petune.errors import FileError
from petune.files import ranges
from petune.files.ranges import Piece, RangeReader, overlap, runs, sources
from petune.files.safetensors import read_header


def box(tensor: Tensor, start: Any, size: Any) -> Tensor:
    for dim, (first, count) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, first, count)
    return tensor


def boxes(shape: tuple[int, ...], draws: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Boxes of a tensor of this shape; about every third dim is whole."""
    drawn, found = random.Random(seed), []
    for _ in range(draws):
        start, size = [], []
        for length in shape:
            first = 0 if drawn.random() < 0.3 else drawn.randrange(length)
            start.append(first)
            size.append(length - first if drawn.random() < 0.5 else drawn.randint(1, length - first))
        found.append((start, size))
    return found


SHAPES = [(), (7,), (6, 5), (4, 3, 5), (3, 2, 4, 3), (1, 1, 9)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_runs_of_a_box_are_its_elements_in_order_and_no_others(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
    for start, size in boxes(shape, 60, seed=len(shape)):
        found: list[int] = []
        for run in runs(shape, start, size):
            rows = numbers.reshape(-1)[run.offset : run.offset + run.count * run.width].view(run.count, -1)
            found += rows[:, run.first : run.first + run.taken].reshape(-1).tolist()
        assert found == box(numbers, start, size).reshape(-1).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_that_share_out_a_tensor_share_out_every_piece_of_it(shape: tuple[int, ...]) -> None:
    for at, size in boxes(shape, 20, seed=1):
        piece, count = Piece("x", tuple(at), tuple(size)), 0
        for start, own in boxes(shape, 10, seed=2):
            whole = torch.zeros(shape, dtype=torch.int64)
            box(whole, at, size).copy_(torch.arange(torch.Size(size).numel()).view(size) + 1)
            found = overlap(piece, start, own)
            inside = box(whole, start, own)
            assert (found is None) == (not bool(inside.any())) or shape == ()
            if found is not None:
                source = torch.arange(torch.Size(size).numel()).view(size) + 1
                assert torch.equal(
                    box(inside, found.inside, found.size), box(source, found.there, found.size)
                )
                count += found.size.count(0)
        assert count == 0


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    torch.manual_seed(0)
    tensors = {
        "float32": torch.randn(9, 6, 4),
        "bfloat16": torch.randn(33, 17).bfloat16(),
        "wide": torch.randn(5, 9000),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors", tensors


def reader(path: Path) -> RangeReader:
    return RangeReader(sources({path: read_header(path)}))


@pytest.mark.parametrize("portion", [16, 100, 4 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_box_is_read_as_the_whole_is_narrowed(
    dtype: torch.dtype, portion: int, stored: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "PORTION", portion)
    path, tensors = stored
    with reader(path) as found:
        for name in ("float32", "bfloat16", "wide", "scalar"):
            for start, size in boxes(tuple(tensors[name].shape), 25, seed=3):
                out = torch.full(size, float("nan"), dtype=dtype)
                found.read(name, out, start)
                assert torch.equal(out, box(tensors[name], start, size).to(dtype)), (name, start, size)


def test_a_box_goes_where_its_strides_are_and_is_rounded_on_the_way(
    stored: tuple[Path, dict[str, Tensor]],
) -> None:
    path, tensors = stored
    with reader(path) as found:
        out = torch.zeros(10, 9).T  # not contiguous
        found.read("bfloat16", out[:, :10].narrow(1, 0, 10), (2, 3))
        assert torch.equal(out, tensors["bfloat16"][2:11, 3:13].float())
        wide = torch.zeros(2, 7)
        found.read("wide", wide, (1, 5), by=torch.bfloat16)
        assert torch.equal(wide, tensors["wide"][1:3, 5:12].bfloat16().float())
        found.read("empty", torch.empty(0, 4), (0, 0))
        flags = torch.zeros(2, dtype=torch.bool)
        found.read("flags", flags, (1,))
        assert flags.tolist() == [False, True]


def test_short_parts_of_rows_come_in_portions_and_long_ones_by_themselves(
    stored: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    read = os.preadv

    def noted(fd: int, rooms: Any, at: int) -> int:
        sizes.append(sum(len(room) for room in rooms))
        return read(fd, rooms, at)

    monkeypatch.setattr("petune.files.ranges.os.preadv", noted)
    path, _ = stored
    with reader(path) as found:
        found.read("bfloat16", torch.zeros(33, 5), (0, 2))
        assert sizes == [33 * 17 * 2]
        sizes.clear()
        found.read("wide", torch.zeros(5, 8000), (0, 3))
        assert sizes == [8000 * 4] * 5
        sizes.clear()
        found.read("wide", torch.zeros(3, 9000), (1, 0))
        assert sizes == [3 * 9000 * 4]


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def make_longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(8))


def no_flag(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    header = read_header(path)
    whole[header.start + header.tensors["flags"].begin + 1] = 7
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut_short, "changed while it was read"),
        (make_longer, "changed while it was read"),
        (Path.unlink, "does not exist"),
        (no_flag, "a truth value is neither 0 nor 1"),
    ],
)
def test_a_file_that_is_not_what_its_header_says_is_refused(
    change: Callable[[Path], None], says: str, stored: tuple[Path, dict[str, Tensor]]
) -> None:
    path, _ = stored
    found = reader(path)
    change(path)
    with pytest.raises(FileError, match=says), found:
        found.read("flags", torch.zeros(3, dtype=torch.bool), (0,))


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(
    stored: tuple[Path, dict[str, Tensor]],
) -> None:
    path, _ = stored
    with reader(path) as found:
        found.read("scalar", torch.zeros(()), ())
        os.truncate(path, 2000)
        with pytest.raises(FileError, match="became shorter while it was read"):
            found.read("wide", torch.zeros(5, 9000), (0, 0))


def test_of_two_tensors_with_one_name_the_later_file_counts(tmp_path: Path) -> None:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for at, path in enumerate(paths):
        save_file({"x": torch.full((2,), float(at))}, path)
    found = sources({path: read_header(path) for path in paths})
    out = torch.zeros(2)
    with RangeReader(found) as open_files:
        open_files.read("x", out, (0,))
    assert out.tolist() == [1, 1]
