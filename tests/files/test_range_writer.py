"""Ranges of one file that several ranks write: the bytes of one process, and nothing beside a rank's own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from petune.errors import FileError, MachineError, TrainingFault
from petune.files import range_writer
from petune.files.range_writer import RangeWriter
from petune.files.safetensors import read_tensors, write_tensors


def tensors() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    shapes = {"cube": (4, 3, 5), "rows": (7, 6), "line": (9,), "one": ()}
    found = {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
    return found | {"narrow": torch.randn(5, 3, generator=drawn).bfloat16(), "count": torch.tensor([3, 4])}


def room(path: Path, found: dict[str, Tensor], *whole: str) -> None:
    """A file of these tensors that has its size; the values of `whole` alone are in it."""
    kinds = {name: value if name in whole else value.to("meta") for name, value in found.items()}
    write_tensors(path, kinds, {"format": "pt"})


@pytest.mark.parametrize("portion", [1, 7, 64, 4 << 20])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_boxes_along_any_dim_make_the_file_that_one_process_writes(
    dim: int, portion: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_writer, "PORTION", portion)
    found = tensors()
    write_tensors(tmp_path / "whole", found, {"format": "pt"})
    room(tmp_path / "parts", found, "count")
    for rank in (1, 0, 2):  # in any order
        with RangeWriter(tmp_path / "parts") as writer:
            for name, value in found.items():
                if value.dim() > dim and name != "count":
                    sizes = (value.shape[dim] - 2, 2, 0)  # uneven, and none
                    start = [0] * value.dim()
                    start[dim] = sum(sizes[:rank])
                    writer.write(name, value.narrow(dim, start[dim], sizes[rank]), start)
                elif rank == 0:
                    writer.write(name, value, [0] * value.dim())
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_box_changes_nothing_beside_it(tmp_path: Path) -> None:
    found = tensors()
    room(tmp_path / "parts", found, *found)
    with RangeWriter(tmp_path / "parts") as writer:
        writer.write("cube", torch.full((2, 1, 3), 8.0), [1, 2, 1])
    now = read_tensors(tmp_path / "parts")
    found["cube"][1:3, 2:, 1:4] = 8.0
    assert all(torch.equal(now[name], value) for name, value in found.items())


def test_what_is_not_finite_or_of_another_dtype_or_not_there_is_refused(tmp_path: Path) -> None:
    found = tensors()
    room(tmp_path / "parts", found)
    before = (tmp_path / "parts").read_bytes()
    with RangeWriter(tmp_path / "parts") as writer:
        with pytest.raises(TrainingFault, match=r"parts  rows.*holds a NaN"):
            writer.write("rows", torch.tensor([[1.0, float("nan")]]), [0, 0])
        with pytest.raises(ValueError, match=r"rows is torch.float32 there and torch.bfloat16 here"):
            writer.write("rows", torch.ones(1, 6).bfloat16(), [0, 0])
    assert (tmp_path / "parts").read_bytes() == before
    with pytest.raises(FileError, match="does not see what the first one has begun"):
        RangeWriter(tmp_path / "nowhere")
    (tmp_path / "parts").write_bytes(before[:-1])
    with pytest.raises(FileError, match="cut short"):
        RangeWriter(tmp_path / "parts")


def test_what_was_written_is_flushed_and_a_flush_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    found = tensors()
    room(tmp_path / "parts", found)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(MachineError, match="EIO"), RangeWriter(tmp_path / "parts") as writer:
        writer.write("one", found["one"], [])
