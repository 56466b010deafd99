"""A product with an NF4 weight that is never made dense, beside making it dense first, by the number of rows.

    PYTHONPATH=. python3 benchmarks/dequantise_matmul.py                        on a GPU, about a minute
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/dequantise_matmul.py      without one: every way, tiny

A trial: the kernel stands here because nothing in petune uses it (RESULTS.md says why). The weights are those
of an 8B block in bf16; a turn goes through COPIES of one, more than the cache holds, in one CUDA graph. Ways:
`dense`, the weight before it was quantised; `made`, made dense by petune's kernel and multiplied, as fused
blocks do it; `plain`, made dense by torch's operations; then the fused kernel by its tile,
ROWSxOUTPUTSxDEPTH/warps. us: the median of TURNS of one product. The exit code is 1 where the norm of the
difference to the product in float32 is more than LIMIT of the norm.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.triton import dequantise
from petune.models.nf4 import BLOCK, NESTED, Nf4, dynamic_levels, levels

TINY = not torch.cuda.is_available()
DEVICE, DTYPE = ("cpu", torch.float32) if TINY else ("cuda", torch.bfloat16)
WEIGHTS = [(96, 256)] if TINY else [(4096, 4096), (14336, 4096), (4096, 14336)]
ROWS = [3, 20] if TINY else [1, 16, 64, 256]
COPIES, TURNS, LIMIT = (1, 1, 0.01) if TINY else (8, 7, 0.01)
TILES = [(16, 32, 128, 4), (16, 16, 128, 4), (16, 32, 256, 4), (16, 64, 128, 4), (64, 128, 64, 8)]


@triton.jit
def _kernel(
    x,
    q,
    scales,
    nested,
    mean,
    levels,
    dynamic,
    y,
    m,
    n,
    k,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SIZE: tl.constexpr,
    NESTED: tl.constexpr,
):
    own, row = (
        tl.program_id(1) * ROWS + tl.arange(0, ROWS),
        tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS),
    )
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for begin in range(0, k, DEPTH):
        column = begin + tl.arange(0, DEPTH)
        given = tl.load(x + own[:, None] * k + column[None, :], mask=(own < m)[:, None], other=0.0)
        at = row[:, None] * (k // SIZE) + begin // SIZE + tl.arange(0, DEPTH // SIZE)[None, :]
        largest = tl.load(nested + at // NESTED, mask=(row < n)[:, None], other=0.0)
        place = tl.load(scales + at, mask=(row < n)[:, None], other=0).to(tl.int32)
        scale = tl.load(dynamic + place) * largest + tl.load(mean)
        byte = begin // 2 + tl.arange(0, DEPTH // 2)
        pair = tl.load(q + row[:, None] * (k // 2) + byte[None, :], mask=(row < n)[:, None], other=0).to(
            tl.int32
        )
        value = tl.interleave(tl.load(levels + (pair >> 4)), tl.load(levels + (pair & 15)))
        value = (value.reshape(OUTPUTS, DEPTH // SIZE, SIZE) * scale[:, :, None]).reshape(OUTPUTS, DEPTH)
        total = tl.dot(given, value.to(given.dtype).T, total)
    tl.store(
        y + own[:, None] * n + row[None, :],
        total.to(y.dtype.element_ty),
        mask=(own < m)[:, None] & (row < n)[None, :],
    )


def fused(form: Nf4, tile: tuple[int, int, int, int], x: Tensor) -> Tensor:
    """x W^T, [m, k] -> [m, n]."""
    (n, k), (rows, outputs, depth, warps) = form.shape, tile
    y, tables = x.new_empty(len(x), n), (levels(x.device), dynamic_levels(x.device))
    grid = triton.cdiv(n, outputs), triton.cdiv(len(x), rows)
    sizes = {"ROWS": rows, "OUTPUTS": outputs, "DEPTH": depth, "SIZE": BLOCK, "NESTED": NESTED}
    _kernel[grid](x, *form.tensors, *tables, y, len(x), n, k, **sizes, num_warps=warps)
    return y


def ways(form: Nf4, dense: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """The product of rows with the weight, each way."""

    def made(x: Tensor) -> Tensor:
        weight = torch.empty_like(dense)
        dequantise.dense_into(form, weight)
        return x @ weight.T

    found = {"dense": lambda x: x @ dense.T, "made": made, "plain": form.linear}
    return found | {"{}x{}x{}/{}".format(*tile): partial(fused, form, tile) for tile in TILES}


def seconds(calls: list[Callable[[], Tensor]]) -> float:
    """Of one of these calls, in a CUDA graph of all of them."""
    for call in calls:
        call()
    if TINY:
        return 0.0
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(TURNS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[1:])


def main() -> int:
    """Print a line for each weight and number of rows."""
    wrong = 0
    for shape in WEIGHTS:
        weights = [torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(COPIES)]
        forms = [Nf4.of(weight) for weight in weights]
        every = [ways(form, weight) for form, weight in zip(forms, weights, strict=True)]
        values = forms[0].dense().float()
        for rows in ROWS:
            x, line = torch.randn(rows, shape[1], dtype=DTYPE, device=DEVICE), []
            exact = x.float() @ values.T
            for name, way in every[0].items():
                off = name != "dense" and float((way(x).float() - exact).norm() / exact.norm()) > LIMIT
                wrong += off
                took = seconds([partial(each[name], x) for each in every])
                line.append(f"{name} {took * 1e6:.1f}" + " WRONG" * off)
            print(f"{shape[0]} x {shape[1]}, rows {rows}, us: " + ", ".join(line), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
