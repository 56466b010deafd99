"""Gradients of attention's scores of positions, of those of all pairs:

        by_query[h, i, b] = scale sum_j dS[h, i, j]     by_key[h, j, b] = scale sum_i dS[h, i, j]

over the keys j, or queries i, at a distance j - i whose bucket is b. Distances of a bucket lie in a row, most
buckets have one, so a program adds up what few there are, and owns what it writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 16, 64, 4  # of a tile


def bucket_sums(
    dscores: Tensor, buckets: Tensor, starts: Tensor, scale: float, sums: Tensor, *, by_key: bool
) -> None:
    """Write `sums` [heads, m, columns], of any float dtype. dscores [heads, m, longest]: of each query those of
    the keys of its segment from the first one on, or by_key of each key those of the queries. buckets: int32
    [2 L - 1], the column for each distance key - query, which does not grow with it. starts: int32 [segments
    + 1], rows of the segments."""
    heads, m, longest = dscores.shape
    if not m:
        return
    columns = torch.arange(sums.shape[2], dtype=torch.int32, device=buckets.device)
    growing = buckets.flip(0).contiguous()
    ends = len(buckets) - torch.searchsorted(growing, columns, out_int32=True)
    firsts = len(buckets) - torch.searchsorted(growing, columns, right=True, out_int32=True)
    blocks = triton.cdiv(longest, ROWS)
    _bucket_sums_kernel[((len(starts) - 1) * heads * blocks,)](
        *(dscores, sums, firsts.int(), ends.int(), starts, m, blocks, longest, sums.shape[2]),
        *(len(buckets) // 2, float(scale)),
        HEADS=heads, BY_KEY=by_key, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["m", "blocks", "zero"])
def _bucket_sums_kernel(
    dscores, sums, firsts, ends, starts, m, blocks, longest, columns, zero, scale,
    HEADS: tl.constexpr, BY_KEY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    segment, head = program // blocks // HEADS, (program // blocks % HEADS).to(tl.int64)
    own, first = program % blocks * ROWS + tl.arange(0, ROWS), tl.load(starts + segment)
    length = tl.load(starts + segment + 1) - first
    if program % blocks * ROWS >= length:
        return
    real, row = (own < length)[:, None], head * m + first + own
    # of the distances from the first of all on, those to tokens of the segment
    low = own - length + 1 + zero if BY_KEY else zero - own
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        there = column < columns
        start = tl.maximum(tl.load(firsts + column, there, 0)[None], low[:, None])
        end = tl.minimum(tl.load(ends + column, there, 0)[None], (low + length)[:, None])
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for more in range(0, tl.max(tl.max(end - start, 1), 0)):
            distance = start + more - zero
            other = own[:, None] - distance if BY_KEY else own[:, None] + distance
            inside = real & (start + more < end)
            total += tl.load(dscores + row[:, None] * longest + other, inside, 0.0).to(tl.float32)
        at = row[:, None] * columns + column[None]
        tl.store(sums + at, (total * scale).to(sums.dtype.element_ty), real & there[None])
