"""What petune.kernels.triton.dequantise launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.dequantise import BLOCKS, COLUMNS, WARPS, _nf4_kernel, _scaled_rows_kernel
from petune.models.nf4 import BLOCK, NESTED
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for kind in ("*bf16", "*fp16", "*fp32"):
        of_nf4 = dict.fromkeys(_nf4_kernel.arg_names, "i32") | {"q": "*u8", "scales": "*u8", "out": kind}
        of_nf4 |= dict.fromkeys(("nested", "mean", "levels", "dynamic"), "*fp32")
        yield _nf4_kernel, of_nf4, {"BLOCKS": BLOCKS, "SIZE": BLOCK, "NESTED": NESTED}, WARPS, 3
        rows = dict.fromkeys(_scaled_rows_kernel.arg_names, "i32") | {"scale": "*fp32", "table": "*fp32"}
        for integers, bytes_of in ((True, "*i8"), (False, "*u8")):
            of_rows = rows | {"q": bytes_of, "out": kind}
            yield _scaled_rows_kernel, of_rows, {"INTEGERS": integers, "COLUMNS": COLUMNS}, WARPS, 3
