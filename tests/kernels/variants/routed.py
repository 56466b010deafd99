"""What petune.kernels.triton.routed launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from petune.kernels.triton.routed import (
    BACK_BM,
    BACK_BN,
    BM,
    BN,
    COLUMNS,
    WARPS,
    _combine_kernel,
    _dgated_kernel,
    _gated_kernel,
)
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for kind in ("*bf16", "*fp32"):
        known = dict.fromkeys(("y", "out", "gate_up", "m", "dm", "d_gate_up"), kind)
        known |= {"inverse": "*i64"} | dict.fromkeys(("weights", "share", "dshare"), "*fp32")
        signatures = {
            kernel: {name: known.get(name, "i32") for name in kernel.arg_names}
            for kernel in (_combine_kernel, _gated_kernel, _dgated_kernel)
        }
        own: dict[str, Any] = {"CHOSEN": 8, "BLOCK": COLUMNS}
        for absent in ({"weights": None}, {}):
            yield _combine_kernel, signatures[_combine_kernel], own | absent, WARPS, 3
        for act in ("silu", "gelu_tanh", "clamped"):
            for kernel, rows, columns in ((_gated_kernel, BM, BN), (_dgated_kernel, BACK_BM, BACK_BN)):
                yield kernel, signatures[kernel], {"ACT": act, "BM": rows, "BN": columns}, WARPS, 3
