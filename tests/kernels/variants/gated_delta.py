"""What petune.kernels.triton.gated_delta launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from petune.kernels.triton.gated_delta import (
    PART,
    _forward_kernel,
    _pairs_kernel,
    columns_of,
    sizes_of,
    stages_of,
)
from petune.models.gated_delta import MixedHeads
from tests.kernels.variants.variant import Variant


def shapes() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Of kernels that are compiled: dtype, value features of a program through the chunks, and sizes."""
    for kind, rows, packed in (("*bf16", 1, True), ("*bf16", 4, False), ("*fp16", 4, True)):
        heads = MixedHeads(16, 128, 32, 128)
        yield kind, columns_of(heads, rows), sizes_of(heads, torch.empty(0) if packed else None)


def signature(kernel: Any, kind: str) -> dict[str, str]:
    """What each argument of a kernel is where values are of this kind."""
    plain = {"samples": "*i64", "samples_row": "i32", "tokens": "i32", "members": "i32"}
    plain |= dict.fromkeys(("scale", "eps", "root"), "fp32")
    plain |= dict.fromkeys(("g", "dg", "dbeta", "decay", "units"), "*fp32")
    return {name: plain.get(name, kind) for name in kernel.arg_names}


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for kind, columns, sizes in shapes():
        yield _pairs_kernel, signature(_pairs_kernel, kind), sizes | {"PART": PART}, 4, 1
        own = sizes | {"BV": columns}
        yield _forward_kernel, signature(_forward_kernel, kind), own, 4, stages_of(columns)
