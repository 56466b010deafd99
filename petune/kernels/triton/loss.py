"""Cross-entropy and its gradient in the logits' own memory, a program for each row.

The first pass over a row keeps a running maximum and, in every lane, the sum of exp(score - maximum), which
is rescaled when the maximum grows (Milakov and Gimelshein 2018, arXiv:1805.02867); lanes meet once, at the
end. The second pass writes the gradient over the scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.4e38)  # a finite start: minus infinity less minus infinity is not a number


@triton.jit
def _capped(x, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(x / SOFTCAP), or x itself."""
    x = x.to(tl.float32)
    if SOFTCAP != 0.0:
        x = SOFTCAP * (2.0 * tl.sigmoid(x * (2.0 / SOFTCAP)) - 1.0)
    return x


@triton.jit
def _cross_entropy(
    logits, labels, losses, logs, stride, columns,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    label = tl.load(labels + number)
    lanes = tl.arange(0, BLOCK)
    if label < 0:
        for start in range(0, columns, BLOCK):
            tl.store(
                row + start + lanes, tl.zeros((BLOCK,), row.dtype.element_ty), mask=start + lanes < columns
            )
        tl.store(losses + number, 0.0)
        tl.store(logs + number, 0.0)
        return

    hit = _capped(tl.load(row + label, mask=label < columns, other=float("nan")), SOFTCAP)
    highest = LOWEST
    sums = tl.zeros((BLOCK,), tl.float32)
    scores = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + lanes < columns
        x = _capped(tl.load(row + start + lanes, mask=inside, other=0.0), SOFTCAP)
        if SMOOTHING != 0.0:
            scores += tl.where(inside, x, 0.0)
        x = tl.where(inside, x, float("-inf"))
        higher = tl.maximum(highest, tl.max(x, 0))
        sums = sums * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    log = highest + tl.log(tl.sum(sums, 0))
    loss = log - (1.0 - SMOOTHING) * hit
    if SMOOTHING != 0.0:
        loss -= SMOOTHING * tl.sum(scores, 0) / columns
    tl.store(losses + number, loss)
    tl.store(logs + number, log)

    for start in range(0, columns, BLOCK):
        inside = start + lanes < columns
        x = _capped(tl.load(row + start + lanes, mask=inside, other=0.0), SOFTCAP)
        grad = tl.exp(x - log) - tl.where(start + lanes == label, 1.0 - SMOOTHING, 0.0)
        if SMOOTHING != 0.0:
            grad -= SMOOTHING / columns
        if SOFTCAP != 0.0:
            slope = x * (1.0 / SOFTCAP)
            grad *= 1.0 - slope * slope
        tl.store(row + start + lanes, grad.to(row.dtype.element_ty), mask=inside)


def cross_entropy_(
    logits: Tensor, labels: Tensor, softcap: float = 0.0, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`petune.kernels.reference.cross_entropy_`."""
    rows, columns = logits.shape
    losses, logs = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    if rows == 0:
        return losses, logs
    block, warps = _launch(columns)
    _cross_entropy[(rows,)](
        *(logits, labels.contiguous(), losses, logs, logits.stride(0), columns),
        *(float(softcap), float(smoothing), block),
        num_warps=warps,
    )
    return losses, logs


def _launch(columns: int) -> tuple[int, int]:
    """Columns at a time, and warps: sixteen columns a lane, two vector loads of bfloat16."""
    block = min(8192, triton.next_power_of_2(columns))
    return block, max(1, block // 512)
