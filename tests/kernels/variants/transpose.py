"""What petune.kernels.triton.transpose launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.transpose import TILE, WARPS, _transpose_kernel
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    signature = {"source": "*u8", "target": "*u8"} | dict.fromkeys(("n", "k", "stride", "pitch"), "i32")
    yield _transpose_kernel, signature, {"TILE": TILE}, WARPS, 3
