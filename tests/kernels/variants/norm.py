"""What petune.kernels.triton.norm launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.norm import WIDEST, _backward, _forward, _tile
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """What is launched in bfloat16 for hidden sizes from a head's 128 to the largest, as
    `tests/kernels/gate.py` compiles it."""
    forward = dict.fromkeys(("x", "residual", "weight", "bias", "y", "total"), "*bf16") | dict.fromkeys(
        ("mean", "rstd"), "*fp32"
    )
    forward |= dict.fromkeys(("rows", "columns", "x_stride", "residual_stride", "y_stride"), "i32") | {
        "eps": "fp32"
    }
    backward = dict.fromkeys(("dy", "total", "weight", "dresidual", "dtotal"), "*bf16")
    backward |= dict.fromkeys(("mean", "rstd", "dweight", "dbias"), "*fp32")
    backward |= dict.fromkeys(("rows", "columns", "dy_stride", "total_stride", "dresidual_stride"), "i32")
    for columns in (128, 1024, 4096, 8192, 16_384, WIDEST):
        rows, block, warps = _tile(columns)
        tile = {"ROWS": rows, "BLOCK": block}
        for absent in ({"mean": None, "bias": None}, {"bias": None}, {}):  # RMSNorm, LayerNorm without a bias
            yield _forward, forward, tile | absent, warps, 1
        for absent in ({"mean": None}, {}):
            yield _backward, backward, tile | absent | ({"dbias": None} if absent else {}), warps, 1
            yield _backward, backward, tile | absent | {"dweight": None, "dbias": None}, warps, 1
