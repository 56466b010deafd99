"""What petune.kernels.triton.loss launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.loss import _cross_entropy, _launch
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """What is launched for bfloat16 logits of a large vocabulary, for the compile gate."""
    block, warps = _launch(128256)
    pointers = {"logits": "*bf16", "labels": "*i64", "losses": "*fp32", "logs": "*fp32"}
    for softcap, smoothing in ((0.0, 0.0), (30.0, 0.1)):
        constants = {"SOFTCAP": softcap, "SMOOTHING": smoothing, "BLOCK": block}
        yield _cross_entropy, {**pointers, "stride": "i32", "columns": "i32"}, constants, warps, 3
