"""The sum of several rows of numbers, which is what ranks add up: every term is read once and the sum rounded
once. torch's sum over a leading dim of four makes a third of the memory's bandwidth, its sum of two all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.triton.residual import Variant

BLOCK = 4096  # elements of a program
WARPS = 8


def total(terms: Tensor, out: Tensor) -> None:
    """`petune.kernels.reference.total`."""
    size = out.numel()
    if len(terms) == 2:
        torch.add(*terms, out=out)
    elif size:
        grid = (triton.cdiv(size, BLOCK),)
        _total_kernel[grid](terms, out, size, terms.stride(0), TERMS=len(terms), BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _total_kernel(terms, out, size, stride, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    found = tl.load(terms + at, mask=inside, other=0.0).to(tl.float32)
    for term in tl.static_range(1, TERMS):
        found += tl.load(terms + tl.cast(stride, tl.int64) * term + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for kind in ("*bf16", "*fp32"):
        signature = {"terms": kind, "out": kind, "size": "i32", "stride": "i32"}
        yield _total_kernel, signature, {"TERMS": 4, "BLOCK": BLOCK}, WARPS, 3
