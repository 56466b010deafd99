"""What is around the gated delta rule in a mixer: the causal convolution with SiLU behind it, and the norm of
heads that a gate scales.

Both passes of each read and write every element once; between them sums are float32, rounded once. Gradients
of weights are sums over tokens: each program leaves its part, and torch adds the parts up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petune.kernels.triton.gated_delta import numbers_of
from petune.kernels.triton.residual import power_of

TOKENS, FEATURES = 16, 128  # of a program of the convolution
HEADS = 32  # of a program of the norm
WARPS = 4


def convolution(x: Tensor, weight: Tensor, samples: Tensor | None) -> Tensor:
    """SiLU of `petune.models.gated_delta.causal_convolution`, in the dtype of x; x and weight dense. samples:
    None where each row is one."""
    y = torch.empty_like(x)
    _, tokens, features = x.shape
    if x.numel():
        _convolution_kernel[_grid(x)](
            *(x, weight, *numbers_of(samples, x), y, tokens), **_form(samples, features, weight.shape[1])
        )
    return y


def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, samples: Tensor | None, weight_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """(gradient of x, of the weight in float32 if it is wanted)."""
    dx, (_, tokens, features), taps = torch.empty_like(x), x.shape, weight.shape[1]
    grid = _grid(x)
    parts = dx
    if weight_grad:
        parts = weight.new_zeros(grid[0] * grid[2], features, taps, dtype=torch.float32)
    if x.numel():
        _convolution_backward_kernel[grid](
            *(dy.contiguous(), x, weight, *numbers_of(samples, x), dx, parts, tokens),
            **_form(samples, features, taps),
            WANTED=weight_grad,
        )
    return dx, parts.sum(0) if weight_grad else None


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate); x and gate [heads, features], of one dtype, dense."""
    y, (heads, features) = torch.empty_like(x), x.shape
    if heads:
        _gated_norm_kernel[(triton.cdiv(heads, HEADS),)](
            x, gate, weight, y, heads, eps, N=features, BN=power_of(features), BH=HEADS, num_warps=WARPS
        )
    return y


def gated_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and gate, and of the weight in float32."""
    dx, dgate, (heads, features) = torch.empty_like(x), torch.empty_like(gate), x.shape
    grid = (triton.cdiv(heads, HEADS),)
    parts = x.new_empty(*grid, features, dtype=torch.float32)
    if heads:
        _gated_norm_backward_kernel[grid](
            *(dy.contiguous(), x, gate, weight, dx, dgate, parts, heads, eps),
            **{"N": features, "BN": power_of(features), "BH": HEADS},
            num_warps=WARPS,
        )
    return dx, dgate, parts.sum(0)


# ------------------------------------------------------------------ convolution


def _grid(x: Tensor) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[1], TOKENS), triton.cdiv(x.shape[2], FEATURES), x.shape[0]


def _form(samples: Tensor | None, features: int, taps: int) -> dict[str, int]:
    form = {"PACKED": samples is not None, "F": features, "TAPS": taps, "BT": TOKENS, "BF": FEATURES}
    return form | {"num_warps": WARPS}


@triton.jit
def _tapped(
    x, weight, samples, at, column, tokens, PACKED: tl.constexpr, F: tl.constexpr, TAPS: tl.constexpr
):
    """The convolution at tokens of a row, float32: [tokens, features]."""
    total = tl.zeros((at.shape[0], column.shape[0]), tl.float32)
    for back in tl.static_range(TAPS):
        value = _shifted(x, samples, at, -back, column, tokens, PACKED, F)
        tap = tl.load(weight + column * TAPS + (TAPS - 1 - back), mask=column < F, other=0.0)
        total += value * tap.to(tl.float32)[None, :]
    return total


@triton.jit
def _shifted(x, samples, at, by: tl.constexpr, column, tokens, PACKED: tl.constexpr, F: tl.constexpr):
    """What x is so many tokens further on, in float32, 0 where that is another sample's."""
    there = at + by
    same = (there >= 0) & (there < tokens) & (at >= 0) & (at < tokens)
    if PACKED:
        number = tl.load(samples + at, mask=same, other=-1)
        same = same & (number == tl.load(samples + there, mask=same, other=-2))
    inside = same[:, None] & (column < F)[None, :]
    return tl.load(x + there.to(tl.int64)[:, None] * F + column[None, :], mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit(do_not_specialize=["tokens"])
def _convolution_kernel(
    x, weight, samples, samples_row, y, tokens,
    PACKED: tl.constexpr, F: tl.constexpr, TAPS: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    at, column = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BF + tl.arange(0, BF)
    x += row * tokens * F
    z = _tapped(x, weight, samples + row * samples_row, at, column, tokens, PACKED, F, TAPS)
    inside = (at < tokens)[:, None] & (column < F)[None, :]
    y += (row * tokens + at)[:, None] * F + column[None, :]
    tl.store(y, (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _convolution_backward_kernel(
    dy, x, weight, samples, samples_row, dx, parts, tokens,
    PACKED: tl.constexpr, F: tl.constexpr, TAPS: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
    WANTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    at, column = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BF + tl.arange(0, BF)
    x += row * tokens * F
    dy += row * tokens * F
    samples += row * samples_row
    total = tl.zeros((BT, BF), tl.float32)
    for on in tl.static_range(TAPS):
        # what reaches the token that is so many further on, of this sample alone
        z = _tapped(x, weight, samples, at + on, column, tokens, PACKED, F, TAPS)
        open = tl.sigmoid(z)
        grad = _shifted(dy, samples, at, on, column, tokens, PACKED, F) * open * (1 + z * (1 - open))
        tap = tl.load(weight + column * TAPS + (TAPS - 1 - on), mask=column < F, other=0.0)
        total += grad * tap.to(tl.float32)[None, :]
        if WANTED:
            own = _shifted(x, samples, at, 0, column, tokens, PACKED, F)
            part = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
            into = parts + (part.to(tl.int64) * F + column) * TAPS + (TAPS - 1 - on)
            tl.store(into, tl.sum(grad * own, 0), mask=column < F)
    inside = (at < tokens)[:, None] & (column < F)[None, :]
    dx += (row * tokens + at)[:, None] * F + column[None, :]
    tl.store(dx, total.to(dx.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------ norm


@triton.jit
def _row(start, at, heads, N: tl.constexpr, BN: tl.constexpr):
    column = tl.arange(0, BN)
    inside = (at < heads)[:, None] & (column < N)[None, :]
    return tl.load(start + at.to(tl.int64)[:, None] * N + column[None, :], mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def _put(start, value, at, heads, N: tl.constexpr, BN: tl.constexpr):
    column = tl.arange(0, BN)
    inside = (at < heads)[:, None] & (column < N)[None, :]
    into = start + at.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(into, value.to(start.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["heads"])
def _gated_norm_kernel(x, gate, weight, y, heads, eps, N: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):
    at, column = tl.program_id(0) * BH + tl.arange(0, BH), tl.arange(0, BN)
    own, z = _row(x, at, heads, N, BN), _row(gate, at, heads, N, BN)
    scale = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(own * own, 1) / N + eps)
    _put(y, own * rstd[:, None] * scale[None, :] * z * tl.sigmoid(z), at, heads, N, BN)


@triton.jit(do_not_specialize=["heads"])
def _gated_norm_backward_kernel(
    dy, x, gate, weight, dx, dgate, parts, heads, eps, N: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    at, column = tl.program_id(0) * BH + tl.arange(0, BH), tl.arange(0, BN)
    own, z, grad = _row(x, at, heads, N, BN), _row(gate, at, heads, N, BN), _row(dy, at, heads, N, BN)
    scale = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    rstd, open = tl.rsqrt(tl.sum(own * own, 1) / N + eps), tl.sigmoid(z)
    normed, reached = own * rstd[:, None], grad * z * open
    _put(dgate, grad * normed * scale[None, :] * open * (1 + z * (1 - open)), at, heads, N, BN)
    tl.store(parts + tl.program_id(0) * N + column, tl.sum(reached * normed, 0), mask=column < N)
    reached *= scale[None, :]
    along = tl.sum(reached * normed, 1) / N
    _put(dx, (reached - normed * along[:, None]) * rstd[:, None], at, heads, N, BN)
