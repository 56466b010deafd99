"""What petune.kernels.triton.activation launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from petune.kernels.triton.activation import KernelAct, _activate_kernel, _forward_tile
from petune.kernels.triton.residual import padded
from tests.kernels.variants.variant import Variant

NO_SCALE, NO_OWN = ("columns", "own"), ("own",)  # what is not there
# activation, gated, paired, ranks of low and of below, dropped, what of a scale is not there
FORMS: tuple[tuple[KernelAct, bool, bool, int, int, bool, tuple[str, ...]], ...] = (
    ("silu", True, True, 16, 16, False, NO_SCALE),
    ("silu", True, False, 32, 16, True, NO_SCALE),
    ("gelu_tanh", True, False, 0, 0, False, NO_SCALE),
    ("silu", True, True, 64, 64, True, NO_SCALE),
    ("silu", True, True, 0, 64, True, NO_SCALE),
    ("gelu", False, False, 16, 16, False, NO_SCALE),
    ("relu", False, False, 64, 0, False, NO_SCALE),
    ("silu", True, True, 16, 16, False, NO_OWN),
    ("silu", True, True, 32, 32, False, NO_OWN),
    ("silu", True, True, 64, 64, False, NO_OWN),
    ("gelu_tanh", True, True, 16, 16, False, ()),
)


def signature_of(kernel: Any, kind: str) -> dict[str, str]:
    """The types of a kernel's arguments where matrices are `kind`."""
    matrices = ("u", "h", "s", "b", "a", "dh", "du", "ds")
    own = {name: kind if name in matrices else "i32" for name in kernel.arg_names}
    own |= dict.fromkeys(("sums", "columns", "own"), "*fp32")
    return own | {"numbers": "*i64", "base": "i64", "scale": "fp32"}


def form_of(act: KernelAct, gated: bool, paired: bool, rank: int, below: int, drops: bool) -> dict[str, Any]:
    """The constants by which both kernels are told one of `FORMS`."""
    ranks = {"RANK": rank, "R": padded(rank), "BELOW": below, "J": padded(below)}
    return {"ACT": act, "GATED": gated, "PAIRED": paired, **ranks, "DROPS": drops, "LOADED": False}


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        for act, gated, paired, rank, below, drops, absent in FORMS:
            tile = _forward_tile(dtype, "columns" not in absent)
            values = form_of(act, gated, paired, rank, below, drops)
            values |= {"BM": tile.rows, "BN": tile.columns, "STAGES": tile.stages}
            values |= dict.fromkeys(absent)
            yield _activate_kernel, signature_of(_activate_kernel, kind), values, tile.warps, 3
