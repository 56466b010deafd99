"""Experts that lie in files in MXFP4, as gpt-oss is published: read as the values that they stand for.

A weight of experts [E, in, out] is two tensors of its name: `_blocks` uint8 [E, out, in / 32, 16], of which a
byte is two numbers of four bits, the first in its lower half, and `_scales` uint8 [E, out, in / 32], the
exponent, over 127, of the power of two that 32 numbers are multiplied by. Numbers are those of e2m1 (OCP
Microscaling Formats 1.0): every value is exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from petune.errors import FileError, Problem
from petune.files.ranges import RangeReader, TensorSource

BLOCK = 32  # numbers of a scale
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", 127
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def is_mxfp4(settings: Mapping[str, Any]) -> bool:
    """Whether the `quantization_config` of a model is of such experts."""
    return settings.get("quant_method") == "mxfp4"


@dataclass(frozen=True)
class Mxfp4:
    """The weight of experts of this name [E, in, out]."""

    name: str
    shape: tuple[int, int, int]

    def fill(self, reader: RangeReader, out: Tensor, start: Sequence[int], dtype: torch.dtype) -> None:
        """Fill `out` with the box of its shape from `start` on of the values, rounded to `dtype`, an
        expert at a time; of other experts and outputs nothing is read."""
        experts, inputs, outputs = out.shape
        groups = self.shape[1] // BLOCK
        blocks = torch.empty(1, outputs, groups, BLOCK // 2, dtype=torch.uint8)
        scales = torch.empty(1, outputs, groups, dtype=torch.uint8)
        for number in range(experts):
            reader.read(self.name + _BLOCKS, blocks, (start[0] + number, start[2], 0, 0))
            reader.read(self.name + _SCALES, scales, (start[0] + number, start[2], 0))
            out[number] = dense(blocks, scales, dtype)[0].narrow(0, start[1], inputs)


def dense(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [E, in, out] of blocks [E, out, in / 32, 16] and their scales."""
    levels = torch.tensor([sign * level for sign in (1.0, -1.0) for level in _LEVELS])
    pairs = torch.stack(
        (levels.repeat(16), levels.repeat_interleave(16)), 1
    )  # of a byte, its lower half first
    values = pairs[blocks.int()].flatten(-2)
    values = torch.ldexp(values, scales.int().sub_(_BIAS).unsqueeze(-1))
    return values.flatten(-2).to(dtype).transpose(1, 2)


def mxfp4_weights(files: Mapping[str, TensorSource]) -> tuple[dict[str, TensorSource], dict[str, Mxfp4]]:
    """(the tensors of files with each weight in MXFP4 under its name, in the shape that it stands for; those
    weights by that name).

    What they are held in stays there under other names. Raises FileError naming the first ten that are not
    whole.
    """
    found, weights, problems = dict(files), dict[str, Mxfp4](), list[Problem]()
    names = (
        key.removesuffix(end) for key in files for end in (_BLOCKS, _SCALES) if key.endswith(f"_proj{end}")
    )
    for name in dict.fromkeys(names):
        blocks, scales = files.get(name + _BLOCKS), files.get(name + _SCALES)
        if (problem := _wrong(name, blocks, scales)) is not None:
            problems.append(problem)
        elif blocks is not None:
            shape = (blocks.shape[0], BLOCK * blocks.shape[2], blocks.shape[1])
            found[name] = replace(blocks, dtype=torch.bfloat16, shape=shape)
            weights[name] = Mxfp4(name, shape)
    if problems:
        raise FileError(problems[:10])
    return found, weights


def _wrong(name: str, blocks: TensorSource | None, scales: TensorSource | None) -> Problem | None:
    """What is wrong with what a weight is held in, or None."""
    remedy = "fetch the model again, or give it in bfloat16"
    there = blocks or scales
    where = f"{there.path if there else ''}  {name}"
    if blocks is None or scales is None:
        lacks = _BLOCKS if blocks is None else _SCALES
        return Problem(
            f"experts in MXFP4 lack their {lacks[1:]}", where, expected=name + lacks, remedy=remedy
        )
    whole = len(blocks.shape) == 4 and blocks.shape[3] == BLOCK // 2 and blocks.shape[:3] == scales.shape
    if whole and blocks.dtype == scales.dtype == torch.uint8:
        return None
    what = "experts in MXFP4 are of other shapes than petune reads"
    expected = f"uint8 [experts, outputs, inputs / {BLOCK}, {BLOCK // 2}] and, without the last, scales"
    found = f"{_told(blocks)} and {_told(scales)}"
    return Problem(what, where, expected=expected, found=found, remedy=remedy)


def _told(source: TensorSource) -> str:
    return f"{str(source.dtype).removeprefix('torch.')} {list(source.shape)}"


def held_in(weights: Mapping[str, Mxfp4], name: str) -> bool:
    """Whether a tensor of files is what one of these weights is held in, and none of a model."""
    return any(name.endswith(end) and name.removesuffix(end) in weights for end in (_BLOCKS, _SCALES))
