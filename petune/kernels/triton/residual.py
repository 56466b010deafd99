"""Sums of matrices: a product with its low-rank update, rows as eight-bit floats, and what many programs each
summed a share of.

A low-rank update is a matrix product on tiles that are in registers anyway: tl.dot with the rank padded by
masks to a power of two of at least 16, the narrowest a tensor core takes. Ranks up to `MAX_RANK` have
registers to spare; above it `add_low` takes several turns, and other launchers raise ValueError. A sum that
runs across programs is written as partial sums in float32 and added up in one order by `total`: the same call
gives the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.block.dense import matmul32
from petune.kernels.reference import LowFactors

MAX_RANK = 64
MAX_COLUMNS = 32768  # of a row to quantise that lies in the registers of one program
PART = 16384  # of a longer row at a time, which is read twice
TOTAL_BLOCK = 1024


class Tile(NamedTuple):
    """What a program works on at a time. resident: programs that a multiprocessor of an H200 holds."""

    rows: int
    columns: int
    warps: int
    stages: int
    resident: int


def power_of(size: int, most: int | None = None) -> int:
    """The power of two that covers `size`, from 16, the least a tensor core takes, to `most`."""
    found = max(16, 1 << (size - 1).bit_length())
    return found if most is None else min(most, found)


def padded(rank: int) -> int:
    """The power of two that a rank is padded to; ValueError above `MAX_RANK`."""
    if rank > MAX_RANK:
        raise ValueError(f"a low-rank update of rank {rank}, but these kernels take up to {MAX_RANK}")
    return power_of(rank)


def dense_rows(x: Tensor) -> Tensor:
    """A matrix whose rows are dense each."""
    return x if x.stride(1) == 1 else x.contiguous()


@lru_cache(maxsize=1024)
def shares(walks: int, steps: int, places: int) -> int:
    """How many programs to share each of `walks` walks of `steps` steps between, where `places` programs run
    at once.

    The fewest rounds of the longest share, a program counting as one step more: what it costs to begin and to
    leave a partial sum.
    """
    return min(
        range(1, min(steps, 32) + 1), key=lambda parts: -(-walks * parts // places) * (1 - -steps // parts)
    )


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# ------------------------------------------------------------------ partial sums


def total(parts: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """`petune.kernels.reference.total`, in order. torch's sum over a leading dim of few makes a third of the
    memory's bandwidth; that of two tensors makes all of it."""
    if len(parts) == 1 and out is None:
        return parts[0].to(dtype)
    result = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device) if out is None else out
    size = result.numel()
    if len(parts) == 2 and parts.dtype == dtype:
        torch.add(*parts, out=result)
    elif size:
        _total_kernel[(triton.cdiv(size, TOTAL_BLOCK),)](
            parts, result, len(parts), size, parts.stride(0), BLOCK=TOTAL_BLOCK, num_warps=4
        )
    return result


@triton.jit(do_not_specialize=["count"])
def _total_kernel(parts, result, count, size, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < size
    value = tl.zeros((BLOCK,), tl.float32)
    for _ in range(count):
        value += tl.load(parts + place, mask=live, other=0.0).to(tl.float32)
        parts += stride
    tl.store(result + place, value.to(result.dtype.element_ty), mask=live)


# ------------------------------------------------------------------ a low-rank update


def linear_low(
    x: Tensor, weight: Tensor, bias: Tensor | None, low: LowFactors, out: Tensor | None = None
) -> Tensor:
    """`petune.kernels.reference.linear_low`: cuBLAS's product in float32, summed and rounded by a kernel."""
    product = matmul32(x, weight.T)
    return add_low(None if bias is None else bias.expand_as(product), product, low, out=out)


def add_low(
    x: Tensor | None, y: Tensor, low: LowFactors, columns: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`petune.kernels.reference.add_low`, for any rank."""
    (rows, width), (s, b) = y.shape, low
    out = torch.empty((rows, width), dtype=s.dtype, device=y.device) if out is None else out
    if not rows:
        return out
    tile, rank = _add_tile(s.dtype), s.shape[1]
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.columns),)
    _add_low_kernel[grid](
        *(x, y, out, s, b, columns, rows, width, 0 if x is None else x.stride(0)),
        *(y.stride(0), s.stride(0), b.stride(0), out.stride(0)), RANK=rank, R=padded(min(rank, MAX_RANK)),
        BM=tile.rows, BN=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _add_tile(dtype: torch.dtype) -> Tile:
    return Tile(64, 64, 4, 1, 6) if dtype.itemsize == 2 else Tile(32, 32, 4, 1, 4)


@triton.jit(do_not_specialize=["rows"])
def _add_low_kernel(
    x, y, out, s, b, columns, rows, width, x_stride, y_stride, s_stride, b_stride, out_stride,
    RANK: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(width, BN)
    row = (tl.program_id(0) // tiles).to(tl.int64) * BM + tl.arange(0, BM)
    col = (tl.program_id(0) % tiles).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (row < rows)[:, None] & (col < width)[None, :]
    value = tl.load(y + row[:, None] * y_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if columns is not None:
        value *= tl.load(columns + col, mask=col < width, other=0.0)[None, :]
    if x is not None:
        value += tl.load(x + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    for start in range(0, RANK, R):
        k = start + tl.arange(0, R)
        left = tl.load(
            s + row[:, None] * s_stride + k[None, :],
            mask=(row < rows)[:, None] & (k < RANK)[None, :],
            other=0.0,
        )
        right = tl.load(
            b + col[:, None] * b_stride + k[None, :],
            mask=(col < width)[:, None] & (k < RANK)[None, :],
            other=0.0,
        )
        value += tl.dot(left, tl.trans(right), input_precision="ieee")
    tl.store(out + row[:, None] * out_stride + col[None, :], value.to(out.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------ eight-bit floats


def quantise(x: Tensor, by: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`petune.kernels.reference.quantise`."""
    rows, width = x.shape
    q = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        kernel, block = _quantise_kernel, triton.next_power_of_2(width)
        if width > MAX_COLUMNS:
            kernel, block = _quantise_long_kernel, PART
        bits, native = q.view(torch.uint8), x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)
        by = None if by is None else by.contiguous()
        warps = _quantise_warps(block)
        kernel[(rows,)](x, bits, scale, by, width, x.stride(0), BLOCK=block, NATIVE=native, num_warps=warps)
    return q, scale


def _quantise_warps(block: int) -> int:
    return min(32, max(1, block // 1024))


@triton.jit
def _quantise_kernel(x, q, scale, by, width, x_stride, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + col, mask=col < width, other=0.0).to(tl.float32)
    if by is not None:
        value *= tl.load(by + col, mask=col < width, other=0.0)
    unit = _unit(tl.max(tl.abs(value), 0))
    tl.store(scale + row, unit)
    tl.store(q + row * width + col, _eight_bits(value, unit, NATIVE), mask=col < width)


@triton.jit
def _quantise_long_kernel(x, q, scale, by, width, x_stride, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + col, mask=col < width, other=0.0).to(tl.float32)
        if by is not None:
            value *= tl.load(by + col, mask=col < width, other=0.0)
        largest = tl.maximum(largest, tl.abs(value))
    unit = _unit(tl.max(largest, 0))
    tl.store(scale + row, unit)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + col, mask=col < width, other=0.0).to(tl.float32)
        if by is not None:
            value *= tl.load(by + col, mask=col < width, other=0.0)
        tl.store(q + row * width + col, _eight_bits(value, unit, NATIVE), mask=col < width)


@triton.jit
def _unit(largest):
    """What a row whose largest value this is has for one."""
    return tl.maximum(largest / 448.0, 1e-12)


@triton.jit
def _eight_bits(value, unit, NATIVE: tl.constexpr):
    """The bits of `value` in such units."""
    value = tl.minimum(tl.maximum(value * (1.0 / unit), -448.0), 448.0)
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else _e4m3(value)


@triton.jit
def _e4m3(value):
    """The bits of the float8_e4m3fn nearest to each float32 up to 448, ties to even, where a device has no
    instruction for it."""
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # 3 of 23 mantissa bits stay; the bias 127 becomes 7
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 the grid is 2^-9, the last place of 2^14
    tiny = (tl.abs(value) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    return (tl.where(size < (121 << 23), tiny, normal) | (bits >> 24 & 0x80)).to(tl.uint8)
