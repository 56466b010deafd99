"""What petune.kernels.triton.scaling launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from petune.kernels.triton.residual import padded
from petune.kernels.triton.scaling import _lengths_tile, _over_lengths_kernel, _tile, _unscale_kernel
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        for rank in (16, 32, 64):
            tile = _lengths_tile(dtype, rank)
            signature = {name: "i32" for name in _over_lengths_kernel.arg_names}
            signature |= dict.fromkeys(("weight", "a", "b"), kind) | dict.fromkeys(("by", "out"), "*fp32")
            values = {"RANK": rank, "R": padded(rank), "BM": tile.rows, "BN": tile.columns}
            yield _over_lengths_kernel, signature, values | {"STAGES": tile.stages}, tile.warps, 3
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        tile = _tile(dtype)
        signature = {name: "i32" for name in _unscale_kernel.arg_names}
        signature |= dict.fromkeys(("dy", "y", "dz"), kind) | dict.fromkeys(
            ("columns", "own", "sums"), "*fp32"
        )
        for absent in ({}, {"own": None}):
            values = {"BM": tile.rows, "BN": tile.columns}
            yield _unscale_kernel, signature, values | absent, tile.warps, tile.stages
