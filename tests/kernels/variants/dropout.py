"""What petune.kernels.triton.dropout launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.dropout import _drop, _tile
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """What is launched in bfloat16, as `tests/kernels/gate.py` compiles it."""
    signature = {"x": "*bf16", "numbers": "*i64", "y": "*bf16", "base": "i64", "scale": "fp32"}
    signature |= dict.fromkeys(("rows", "columns", "x_stride", "feature", "least"), "i32")
    for columns in (128, 1024, 4096):
        rows, block = _tile(columns)
        for loaded in (False, True):
            own = signature | {"base": "*i64" if loaded else "i64"}
            yield _drop, own, {"LOADED": loaded, "ROWS": rows, "BLOCK": block}, 4, 1
