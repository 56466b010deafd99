"""What petune.kernels.triton.mixer launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.mixer import (
    FEATURES,
    HEADS,
    TOKENS,
    WARPS,
    _convolution_backward_kernel,
    _convolution_kernel,
    _gated_norm_backward_kernel,
    _gated_norm_kernel,
)
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    plain = {"samples": "*i64", "samples_row": "i32", "tokens": "i32", "heads": "i32", "eps": "fp32"}
    plain["parts"] = "*fp32"
    for kind, packed in (("*bf16", True), ("*fp16", False)):
        conv = {"PACKED": packed, "F": 8192, "TAPS": 4, "BT": TOKENS, "BF": FEATURES}
        norm = {"N": 128, "BN": 128, "BH": HEADS}
        launched = (
            (_convolution_kernel, conv),
            (_convolution_backward_kernel, conv | {"WANTED": packed}),
            (_gated_norm_kernel, norm),
            (_gated_norm_backward_kernel, norm),
        )
        for kernel, own in launched:
            given = {name: plain.get(name, kind) for name in kernel.arg_names}
            yield kernel, given, own, WARPS, 3
