"""What petune.kernels.triton.activation_backward launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from petune.kernels.block.packed_linear import SUMMED
from petune.kernels.triton.activation_backward import _activate_backward_kernel, _backward_tile
from tests.kernels.variants.activation import FORMS, form_of, signature_of
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        for act, gated, paired, rank, below, drops, absent in FORMS:
            sums_b, sums_a = 0 < rank <= SUMMED, 0 < below <= SUMMED
            values = form_of(act, gated, paired, rank, below, drops)
            values |= {"SUMS_B": sums_b, "SUMS_A": sums_a}
            values |= ({"b": None} if rank and not paired else {}) | (
                {} if below and not sums_a else {"h": None}
            )
            values |= dict.fromkeys(absent)
            tile = _backward_tile(dtype, below > 0 and not (sums_b or sums_a), "columns" not in absent)
            values |= {"BM": tile.rows, "BN": tile.columns, "STAGES": tile.stages}
            yield (
                _activate_backward_kernel,
                signature_of(_activate_backward_kernel, kind),
                values,
                tile.warps,
                3,
            )
