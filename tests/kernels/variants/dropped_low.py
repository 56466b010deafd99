"""What petune.kernels.triton.dropped_low launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from petune.kernels.triton.dropped_low import (
    _add_kernel,
    _add_tile,
    _low_backward_kernel,
    _low_backward_tile,
    _low_kernel,
    _low_tile,
)
from petune.kernels.triton.residual import padded
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        for loaded, count, rank in ((False, 3, 64), (True, 2, 64), (False, 1, 16)):
            tiles = {
                _low_kernel: _low_tile(dtype),
                _low_backward_kernel: _low_backward_tile(dtype),
                _add_kernel: _add_tile(dtype, count),
            }
            for kernel, tile in tiles.items():
                out = kind if kernel is _low_kernel else "*fp32"
                matrices = {"x": kind, "a": kind, "ds": kind, "dx": kind, "out": out}
                signature = {name: matrices.get(name, "i32") for name in kernel.arg_names} | {
                    "numbers": "*i64",
                    "scale": "fp32",
                }
                signature |= dict.fromkeys(("base", "base1", "base2"), "*i64" if loaded else "i64")
                values = {"LOADED": loaded, "PARTS": count, "RANK": rank, "R": padded(rank)}
                values |= {"BM": tile.rows, "BN": tile.columns, "STAGES": tile.stages}
                yield kernel, signature, values, tile.warps, 3
