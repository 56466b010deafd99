"""What petune.kernels.triton.bucket_sums launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.bucket_sums import COLUMNS, ROWS, WARPS, _bucket_sums_kernel
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for kind in ("*bf16", "*fp32"):
        signature = dict.fromkeys(_bucket_sums_kernel.arg_names, "i32")
        signature |= dict.fromkeys(("dscores", "sums"), kind) | {"scale": "fp32"}
        signature |= dict.fromkeys(("firsts", "ends", "starts"), "*i32")
        for by_key in (False, True):
            values = {"HEADS": 16, "BY_KEY": by_key, "ROWS": ROWS, "COLUMNS": COLUMNS}
            yield _bucket_sums_kernel, signature, values, WARPS, 3
