"""What petune.kernels.triton.mixing launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.mixing import BLOCK, WARPS, _mix_backward_kernel, _mix_kernel
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for kernel in (_mix_kernel, _mix_backward_kernel):
        for kind in ("*bf16", "*fp32"):
            signature = dict.fromkeys(kernel.arg_names, kind)
            signature |= {"gate": "*fp32", "parts": "*fp32", "size": "i32", "sharpness": "fp32"}
            own = {name: signature[name] for name in kernel.arg_names}
            yield kernel, own, {"BLOCK": BLOCK}, WARPS, 3
