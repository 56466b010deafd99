"""What petune.kernels.triton.grouped launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from petune.kernels.triton.grouped import (
    _outer_form,
    _outer_kernel,
    _product_form,
    _product_kernel,
    _strides,
    outer_tile,
    product_tile,
)
from tests.kernels.variants.variant import Variant


def _products(dtype: torch.dtype, kind: str) -> Iterator[Variant]:
    """Ahead and back, by index and not, of many rows and few, wide, narrow and of an uneven width."""
    absent = {"low": None, "up": None}
    for m, k, n, rank, back, left_out in (
        (65536, 2048, 1536, 16, False, {}),
        (65536, 1536, 2048, 64, True, {"rows": None}),
        (65536, 768, 2048, 0, False, absent),
        (65536, 2880, 5760, 128, True, {}),
        (4096, 2048, 1536, 16, False, {}),
        (65536, 2048, 256, 8, False, {"rows": None}),
        (65536, 2048, 16, 0, False, absent),
        (65536, 1536, 8, 0, True, absent | {"rows": None}),
        (65536, 1536, 64, 0, True, absent | {"rows": None}),
        (65536, 8, 2048, 0, False, absent | {"rows": None}),
    ):
        tile, low = product_tile(m, k, n, 128, dtype), _shaped(1, rank)
        weight, up = (_shaped(1, of, n) if back else _shaped(1, n, of).mT for of in (k, rank))
        signature = _signature(_product_kernel, kind, "rows")
        values = _product_form(tile, 128, k, n, rank) | _strides(_shaped(1, k), weight, low, up) | left_out
        yield _product_kernel, signature, values, tile.warps, tile.stages


def _shaped(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _signature(kernel: Any, kind: str, *numbers: str) -> dict[str, str]:
    """The types of a kernel's arguments where matrices are `kind`."""
    matrices = dict.fromkeys(("x", "weight", "low", "up", "y", "left", "right", "out"), kind)
    known = matrices | {"ends": "*i32"} | dict.fromkeys(numbers, "*i64")
    return {name: known.get(name, "i32") for name in kernel.arg_names}


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        yield from _products(dtype, kind)
        for k, n, turned in ((2048, 16, False), (1536, 8, True), (1536, 64, True), (768, 768, False)):
            tile = outer_tile(k, n, dtype)
            left, right, out = (
                _shaped(1, k),
                _shaped(1, n),
                _shaped(1, n, k).mT if turned else _shaped(1, k, n),
            )
            signature = _signature(_outer_kernel, kind, "left_rows", "right_rows")
            values = _outer_form(tile, left, right, out) | {"right_rows": None}
            yield _outer_kernel, signature, values, tile.warps, tile.stages
