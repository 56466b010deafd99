"""One step of AdamW in one pass: weight, gradient and both moments are read once, and what changes is written
once.

The random bits of stochastic rounding are those of `petune.kernels.memory.adamw`, made where they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.memory.adamw import AdamWStep
from petune.rng.dropout import MIX32

_A, _B = (tl.constexpr(multiplier) for multiplier in MIX32)
_BLOCK = 2048


@triton.jit
def _bits(element, start, stride):
    value = element * stride + start
    value = (value ^ (value >> 16 & 0xFFFF)) * _A
    value = (value ^ (value >> 13 & 0x7FFFF)) * _B
    return value ^ (value >> 16 & 0xFFFF)


@triton.jit
def _store(to, value, chance, live):
    """Rounded by the low 16 bits of `chance` where that loses bits: a carry out of them lifts the bits that
    stay."""
    if to.dtype.element_ty == tl.bfloat16:
        lifted = (value.to(tl.int32, bitcast=True) + (chance & 0xFFFF)) & -0x10000
        value = tl.where(value == value, lifted.to(tl.float32, bitcast=True), value)
    tl.store(to, value.to(to.dtype.element_ty), live)


@triton.jit(do_not_specialize=["first", "start", "stride", "other", "another"])
def _adamw(
    weight, grad, mean, square, copy, size, first, start, stride, other, another,
    shrink, blend, keep, gain, rate, root, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < size
    g = tl.load(grad + place, live, 0.0).to(tl.float32)
    moment = tl.load(mean + place, live, 0.0).to(tl.float32)
    moment += blend * (g - moment)
    second = tl.load(square + place, live, 0.0).to(tl.float32) * keep + gain * g * g
    value = tl.load(weight + place, live, 0.0).to(tl.float32) * shrink - rate * moment / (
        tl.sqrt(second) / root + eps
    )
    element = (first + place).to(tl.int32)
    one, two = _bits(element, start, stride), _bits(element, other, another)
    _store(weight + place, value, one >> 16, live)
    _store(mean + place, moment, one, live)
    _store(square + place, second, two >> 16, live)
    if copy is not None:
        tl.store(copy + place, value.to(copy.dtype.element_ty), live)


def adamw_(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, rule: AdamWStep, words: Sequence[int],
    first: int = 0, copy: Tensor | None = None,
) -> None:  # fmt: skip
    """`petune.kernels.memory.adamw.adamw_`; dense tensors of float32 or bfloat16."""
    size = weight.numel()
    if size:
        shrink, blend, gain, rate, root = rule.scalars
        scalars = (shrink, blend, rule.betas[1], gain, rate, root, rule.eps)
        _adamw[(triton.cdiv(size, _BLOCK),)](
            weight, grad, mean, square, copy, size, first, *words, *scalars, BLOCK=_BLOCK, num_warps=8
        )
