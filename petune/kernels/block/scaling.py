"""What a group's results, or its inputs, are multiplied by: vectors that train (DoRA, (IA)^3).

Of results, y = c * (x W^T + bias - o + s b^T) + o, summed in float32 and rounded once; those of gate | up
are rounded before, and scaled in float32 by the activation that reads them. (IA)^3's c is its vector and o is
0. DoRA's c is m / ||W + b a||, the norm a constant, and o its bias, which is not scaled. The way back is

        dz = c * dy        d vector = sum over rows of dy * (y - o), over the vector

so that no product is made again and nothing is kept beside y; an entry that is exactly 0 has no gradient.
Of inputs, x W^T becomes (x * l) W^T, with dl = the sum over rows of x * dx', dx = l * dx'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from petune.kernels.dispatch import Ops
from petune.kernels.reference import wide
from petune.models.tuned_parts import LowRank

FactorsOfPart = Callable[[int], tuple[Tensor, Tensor]]  # a with its scale, and b, of a part


def columns_of(parts: Sequence[LowRank], factors: FactorsOfPart, ops: Ops) -> Tensor | None:
    """c [sum of outputs], float32 or wider: ones where a part is not scaled; None where none is."""
    if not any(part.by is not None and part.scales_outputs for part in parts):
        return None
    found = [_columns(part, at, factors, ops) for at, part in enumerate(parts)]
    return torch.cat(found) if len(found) > 1 else found[0]


def _columns(part: LowRank, at: int, factors: FactorsOfPart, ops: Ops) -> Tensor:
    if part.by is None or not part.scales_outputs:
        dtype = torch.promote_types(part.weight.dtype, torch.float32)
        return torch.ones(part.outputs, dtype=dtype, device=part.weight.device)
    if part.scaling == "outputs":
        return wide(part.by).flatten()
    found: Tensor = ops.over_lengths(part.by.flatten(), part.weight, *factors(at))
    return found


def own_of(parts: Sequence[LowRank], columns: Tensor) -> Tensor | None:
    """o [sum of outputs], in the dtype of c; None where all of it is 0."""
    if not any(part.scaling == "lengths" and part.bias is not None for part in parts):
        return None
    own = [
        columns.new_zeros(part.outputs)
        if part.bias is None or part.scaling != "lengths"
        else part.bias.to(columns.dtype)
        for part in parts
    ]
    return torch.cat(own) if len(own) > 1 else own[0]


def over_vector(sums: Tensor, by: Tensor) -> Tensor:
    """`sums` [n] over a vector, of its shape; 0 where that is 0."""
    return (sums.view(by.shape) / wide(by)).masked_fill_(by == 0, 0)


def scaled_inputs(x: Tensor, by: Tensor) -> Tensor:
    """x * by, rounded to the dtype of x."""
    return torch.mul(x, by.flatten(), out=torch.empty_like(x))
