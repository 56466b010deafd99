"""What petune.kernels.triton.norm_rope launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.norm_rope import (
    KINDS,
    _backward_tile,
    _forward_tile,
    _how,
    _norm_rope_backward_kernel,
    _norm_rope_kernel,
)
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for kind, table in (("*bf16", "*bf16"), ("*bf16", "*fp32"), ("*fp32", "*fp32")):
        for half, values, keyed, *how in KINDS:
            matrices = dict.fromkeys(("raw", "dq", "dk", "dv", "out", "q_weight", "k_weight"), kind)
            floats = {"cos": table, "sin": table, "sums": "*fp32", "eps": "fp32"}
            for kernel, tile in (
                (_norm_rope_kernel, _forward_tile(half)),
                (_norm_rope_backward_kernel, _backward_tile(half)),
            ):
                signature = {name: "i32" for name in kernel.arg_names} | matrices | floats
                constants = {"VALUES": values, "KEYED": keyed, **_how(half, *how)}
                constants |= {"BM": tile.rows, "STAGES": tile.stages}
                for absent in ({},) if kernel is _norm_rope_kernel else ({}, {"sums": None}):
                    yield kernel, signature, constants | absent, tile.warps, 3
