"""What petune.kernels.triton.rope launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from petune.kernels.triton.rope import (
    _backward_tile,
    _beyond,
    _forward_tile,
    _places,
    _rope_backward_kernel,
    _rope_kernel,
    _rope_unscale_kernel,
)
from tests.kernels.variants.variant import Variant

# complex numbers of a head, how they lie, and columns, where these are more
_VARIANTS = (
    *((half, False, None) for half in (64, 32, 40, 128)),
    *((64, True, None), (32, True, 128), (48, False, 128)),
)


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for dtype, kind, table in (
        (torch.bfloat16, "*bf16", "*bf16"),
        (torch.bfloat16, "*bf16", "*fp32"),
        (torch.float32, "*fp32", "*fp32"),
    ):
        for half, neighbours, width in _VARIANTS:
            tables = {"cos": table, "sin": table}
            for kernel, tile in (
                (_rope_kernel, _forward_tile(dtype, half)),
                (_rope_backward_kernel, _backward_tile(half)),
            ):
                matrices = ("qkv", "dq", "dk", "dv", "out")
                signature = {name: kind if name in matrices else "i32" for name in kernel.arg_names} | tables
                values = _places(half, neighbours, width)
                values |= _beyond(half, values["WIDTH"]) if kernel is _rope_backward_kernel else {}
                values |= {"BM": tile.rows, "BN": tile.columns, "STAGES": tile.stages}
                yield kernel, signature, values, tile.warps, 3
        tile, scaled = _backward_tile(64), dict.fromkeys(("columns", "own", "sums"), "*fp32")
        of_qkv = dict.fromkeys(("dq", "dk", "dv", "qkv", "out"), kind) | dict.fromkeys(("cos", "sin"), table)
        signature = dict.fromkeys(_rope_unscale_kernel.arg_names, "i32") | of_qkv | scaled
        values = {"BM": tile.rows, "BN": tile.columns, "STAGES": tile.stages}
        cells: tuple[tuple[dict[str, None], int], ...] = ({}, 64), ({"own": None}, 64), ({}, 48)
        for absent, half in cells:
            how = _places(half, False, 128) | _beyond(half, 128)
            yield _rope_unscale_kernel, signature, values | how | absent, tile.warps, 3
