"""What petune.kernels.triton.residual launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from petune.kernels.triton.residual import (
    MAX_COLUMNS,
    MAX_RANK,
    PART,
    TOTAL_BLOCK,
    _add_low_kernel,
    _add_tile,
    _quantise_kernel,
    _quantise_long_kernel,
    _quantise_warps,
    _total_kernel,
    padded,
)
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    """What every device compiles; the native form of `quantise` needs compute capability 8.9."""
    for kind, parts in (("*bf16", "*fp32"), ("*fp32", "*fp32"), ("*bf16", "*bf16")):
        yield (
            _total_kernel,
            {"parts": parts, "result": kind, "count": "i32", "size": "i32", "stride": "i32"},
            {"BLOCK": TOTAL_BLOCK},
            4,
            3,
        )
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        tile = _add_tile(dtype)
        signature = {
            name: kind if name in ("x", "out", "s", "b") else "i32" for name in _add_low_kernel.arg_names
        } | {"y": "*fp32", "columns": "*fp32"}
        no_columns: dict[str, Any] = {"columns": None}
        absences: tuple[tuple[int, dict[str, Any]], ...] = (
            (16, no_columns),
            (64, no_columns | {"x": None}),
            (256, no_columns),
            (16, {"x": None}),
            (16, {}),
        )
        for rank, absent in absences:
            values = {"RANK": rank, "R": padded(min(rank, MAX_RANK)), "BM": tile.rows, "BN": tile.columns}
            yield _add_low_kernel, signature, values | absent, tile.warps, tile.stages
    signature = {"x": "*bf16", "q": "*u8", "scale": "*fp32", "by": "*fp32", "width": "i32", "x_stride": "i32"}
    for kernel, block in (
        (_quantise_kernel, 4096),
        (_quantise_kernel, 16384),
        (_quantise_kernel, MAX_COLUMNS),
        (_quantise_long_kernel, PART),
    ):
        for absent in ({}, {"by": None}):
            yield (
                kernel,
                signature,
                {"BLOCK": block, "NATIVE": False} | absent,
                _quantise_warps(block),
                3,
            )
