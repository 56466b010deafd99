"""What petune.kernels.triton.attention launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from petune.kernels.triton.attention import (
    _STAGES,
    _forward_kernel,
    _keys_kernel,
    _prepare_kernel,
    _queries_kernel,
    _tile,
)
from petune.kernels.triton.residual import power_of
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """What is launched for heads of 64 to 512 columns, as `tests/kernels/gate.py` compiles it."""
    kernels: tuple[Any, ...] = (_forward_kernel, _prepare_kernel, _keys_kernel, _queries_kernel)
    fixed = {name: "i32" for kernel in kernels for name in kernel.arg_names}  # strides, and what is not below
    fixed |= (
        dict.fromkeys(("lse", "delta", "parts", "bias", "sinks"), "*fp32")
        | {"buckets": "*i32"}
        | dict.fromkeys(("rescale", "scale"), "fp32")
    )
    fixed |= dict.fromkeys(("numbers", "places", "tokens"), "*i64") | dict.fromkeys(
        ("starts", "others"), "*i32"
    )
    alone, drawn = ("others", "bias", "parts"), ("numbers", "places", "tokens")  # what a call may lack
    # A head's columns, the longest segment, whether causal, what it lacks, what else it has.
    cases: list[tuple[torch.dtype, int, int, bool, tuple[str, ...], dict[str, Any]]] = [
        (torch.bfloat16, 64, 512, False, alone, {}),
        (torch.bfloat16, 128, 512, True, alone, {}),
        (torch.bfloat16, 64, 512, False, alone + drawn, {}),
        (torch.bfloat16, 64, 16, True, alone, {}),
        (torch.float32, 64, 512, False, alone, {}),
        (torch.float32, 128, 512, True, alone, {}),
        (torch.bfloat16, 64, 512, False, ("others", "parts", *drawn), {}),
        (torch.bfloat16, 64, 512, True, ("others",), {}),
        (torch.bfloat16, 128, 512, False, ("others", *drawn), {}),
        (torch.bfloat16, 64, 512, False, ("bias", "parts"), {}),
        (torch.bfloat16, 128, 2048, True, alone + drawn, {"WINDOW": 1024, "CAP": 50.0}),
        (torch.bfloat16, 256, 2048, True, alone + drawn, {"CAP": 50.0}),
        (torch.bfloat16, 512, 2048, True, alone + drawn, {}),
        (torch.float32, 64, 512, False, ("others", *drawn), {}),
        (torch.bfloat16, 64, 2048, True, alone + drawn, {"WINDOW": 128, "sinks": True}),
        (torch.bfloat16, 64, 1024, False, alone + drawn, {"WINDOW": 65}),
        (torch.bfloat16, 64, 512, False, alone + drawn, {"positions": True}),
    ]
    for dtype, d, longest, causal, missing, own in cases:
        block, warps = _tile(dtype, d, longest, "bias" not in missing)
        _, warps_back = _tile(dtype, d, longest, "bias" not in missing, back=True)
        kind = "*bf16" if dtype == torch.bfloat16 else "*fp32"
        positions = "by_query", "by_key", "left_scores"
        signature = fixed | dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv", *positions), kind)
        signature |= {"base": "*i64" if causal else "i64"}
        values: dict[str, Any] = {
            "HEADS": 16,
            "GROUP": 1,
            "D": d,
            "W": power_of(d),
            "BLOCK": block,
            "CAUSAL": causal,
            "LOADED": causal,
        }
        values |= {"WINDOW": 0, "CAP": 0.0, "sinks": None} | own | dict.fromkeys(missing)
        if not values.pop("positions", False):
            values |= dict.fromkeys((*positions, "buckets"))
        if values["sinks"]:
            del values["sinks"]  # no constant then
        for kernel in kernels:
            yield (
                kernel,
                signature,
                {name: value for name, value in values.items() if name in kernel.arg_names},
                warps if kernel is _forward_kernel else warps_back,
                _STAGES,
            )
