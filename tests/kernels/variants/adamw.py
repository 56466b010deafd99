"""What petune.kernels.triton.adamw launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.adamw import _BLOCK, _adamw
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """All in bfloat16, float32 masters with a copy in bfloat16, all in float32, as `tests/kernels/gate.py`
    compiles them."""
    numbers = dict.fromkeys(("size", "first", "start", "stride", "other", "another"), "i32")
    numbers |= dict.fromkeys(("shrink", "blend", "keep", "gain", "rate", "root", "eps"), "fp32")
    for kept, grad, copied in (
        ("*bf16", "*bf16", False),
        ("*fp32", "*bf16", True),
        ("*fp32", "*fp32", False),
    ):
        signature = (
            numbers | dict.fromkeys(("weight", "mean", "square"), kept) | {"grad": grad, "copy": "*bf16"}
        )
        yield _adamw, signature, {"BLOCK": _BLOCK} | ({} if copied else {"copy": None}), 8, 1
