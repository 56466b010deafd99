"""What is computed of rows that are sorted by expert, in plain torch: what each operation means, and what
runs where there is no faster form.

Every operation has the same signature here and in petune/kernels/triton/ (grouped.py, routed.py);
petune/kernels/grouped.py chooses. On a GPU in bfloat16 products are torch's grouped products, elsewhere a
loop over the groups that have rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.reference import Act, activate, activate_backward, wide

ALPHA, LIMIT = 1.702, 7.0  # of gates that are clamped

# ------------------------------------------------------------------ products


def product(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    *,
    rows: Tensor | None = None,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """x[rows of g] weight[g] + low[rows of g] up[g], [m, n], rounded once where a kernel can.

    weight: [groups, k, n], any strides. rows [m]: the row of x that each row of the result reads, None where
    x [m, k] is sorted already. low [m, r], up [groups, r, n]: of a low-rank update, or None.
    """
    x = x if rows is None else x[rows]
    y = _product(x, weight, ends)
    return y if low is None or up is None else y.add_(_product(low, up, ends))


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if by_torch(x, weight):
        return F.grouped_mm(x, weight, offs=ends)
    y = x.new_empty(len(x), weight.shape[2])
    for group, first, end in _spans(ends):
        torch.mm(x[first:end], weight[group], out=y[first:end])
    return y


def outer(
    x: Tensor, dy: Tensor, ends: Tensor, *, x_rows: Tensor | None = None, dy_rows: Tensor | None = None
) -> Tensor:
    """x[rows of g]^T dy[rows of g], [groups, k, n]. x_rows, dy_rows: as `rows` of `product`."""
    x, dy = x if x_rows is None else x[x_rows], dy if dy_rows is None else dy[dy_rows]
    if by_torch(x, dy):
        rows = torch.diff(ends, prepend=ends.new_zeros(1))  # what is written for none is nobody's promise
        return F.grouped_mm(x.T, dy, offs=ends).masked_fill_((rows == 0)[:, None, None], 0)
    found = x.new_zeros(len(ends), x.shape[1], dy.shape[1])
    for group, first, end in _spans(ends):
        torch.mm(x[first:end].T, dy[first:end], out=found[group])
    return found


def _spans(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end) of each group that has rows."""
    last = ends.tolist()
    firsts = [0, *last[:-1]]
    return [
        (group, first, end)
        for group, (first, end) in enumerate(zip(firsts, last, strict=True))
        if end > first
    ]


def by_torch(*operands: Tensor) -> bool:
    """Whether torch's grouped products take these: on a GPU from Ampere on, in bfloat16, with rows or columns
    that begin at multiples of 16 bytes."""
    return all(
        one.is_cuda
        and torch.cuda.get_device_capability(one.device) >= (8, 0)
        and one.numel() > 0
        and one.dtype is torch.bfloat16
        and 1 in one.stride()[-2:]
        and max(one.stride()[-2:]) % 8 == 0
        and one.data_ptr() % 16 == 0
        for one in operands
    )


# ------------------------------------------------------------------ copies of a token


def combined(y: Tensor, inverse: Tensor, chosen: int, weights: Tensor | None = None) -> Tensor:
    """sum_j weights[t, j] y[inverse[t chosen + j]], [tokens, n], rounded once.

    inverse [tokens * chosen]: where each copy of a token lies among the rows y [m, n], -1 for none. weights
    [tokens, chosen], any float dtype: None for ones.
    """
    copies = y[inverse].masked_fill_((inverse < 0)[:, None], 0).view(-1, chosen, y.shape[1])
    if weights is None:
        return copies.sum(1)
    return (wide(copies) * wide(weights)[..., None]).sum(1).to(y.dtype)


# ------------------------------------------------------------------ the activation


def gated(gate_up: Tensor, share: Tensor, act: Act) -> Tensor:
    """act(gate) * up * share, [m, c], rounded once. gate_up [m, 2 c] is gate | up; share [m], any float
    dtype, is what each row counts. act "clamped": see `_clamped`."""
    if act == "clamped":
        return (_clamped(wide(gate_up))[0] * wide(share)[:, None]).to(gate_up.dtype)
    return (activate(wide(gate_up), act, True)[0] * wide(share)[:, None]).to(gate_up.dtype)


def dgated(dm: Tensor, gate_up: Tensor, share: Tensor, act: Act) -> tuple[Tensor, Tensor, Tensor]:
    """(the gradient of gate_up, that of share [m] in float32 (float64 for float64), what `gated` gave) of the
    gradient dm [m, c] of what `gated` gave."""
    values, grad, each = wide(gate_up), wide(dm), wide(share)[:, None]
    if act == "clamped":
        h, slopes = _clamped(values)
        d_gate_up = (slopes * (grad * each)[..., None]).flatten(1)
        return d_gate_up.to(gate_up.dtype), (grad * h).sum(1), (h * each).to(gate_up.dtype)
    d_gate_up = activate_backward(grad * each, values, act, True)[0]
    h, _ = activate(values, act, True)
    return d_gate_up.to(gate_up.dtype), (grad * h).sum(1), (h * each).to(gate_up.dtype)


def _clamped(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(h [m, c] = (up + 1) gate sigmoid(ALPHA gate) of gate up to LIMIT and up within it, which take turns in
    gate_up [m, 2 c]; the slopes [m, c, 2] of h by both)."""
    gate, up = gate_up[:, ::2], gate_up[:, 1::2]
    inside = torch.stack([gate <= LIMIT, up.abs() <= LIMIT], -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
    share = torch.sigmoid(ALPHA * gate)
    swish = gate * share
    by_gate = up * (share + ALPHA * swish * (1 - share))
    return up * swish, torch.stack([by_gate, swish], -1) * inside
