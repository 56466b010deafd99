"""Mixers by Triton's kernels: the gated delta rule as one autograd node, which keeps of each chunk its state
and two matrices of pairs of its tokens, and what is around it as two more, which keep what goes into them.
`petune.models` computes them elsewhere, and in float32."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from petune.kernels.dispatch import refusal
from petune.models.gated_delta import KERNELS, WIDEST, MixedHeads, MixerKernels
from petune.models.transition import applied

DTYPES = (torch.bfloat16, torch.float16)
Modules = tuple[ModuleType, ModuleType, ModuleType]


def mixed_rule(
    x: Tensor, g: Tensor, beta: Tensor, samples: Tensor | None, heads: MixedHeads
) -> Tensor | None:
    """`petune.models.gated_delta.mixed_rule`, or None where no kernel computes it."""
    kernels = _kernels(x.device, x.dtype) if x.dtype in DTYPES and heads.keys <= WIDEST else None
    return None if kernels is None else applied(_Rule, x, g, beta, samples, heads, kernels)


@lru_cache
def _kernels(device: torch.device, dtype: torch.dtype) -> Modules | None:
    return None if refusal(device, dtype) is not None else modules()


def modules() -> Modules:
    """The modules of kernels: the rule ahead and back, and what is around it. Raises ImportError where Triton
    is not there."""
    names = "gated_delta", "gated_delta_backward", "mixer"
    ahead, back, around = (import_module(f"petune.kernels.triton.{name}") for name in names)
    return ahead, back, around


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        g: Tensor,
        beta: Tensor,
        samples: Tensor | None,
        heads: MixedHeads,
        kernels: Modules,
    ) -> Tensor:
        x, g, beta = x.contiguous(), g.contiguous(), beta.contiguous()
        y, kept = kernels[0].forward(x, g, beta, samples, heads)
        ctx.heads, ctx.kernels = heads, kernels
        ctx.save_for_backward(x, g, beta, samples, *kept)
        return y  # type: ignore[no-any-return]  # a module's, by name

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, g, beta, samples, *kept = ctx.saved_tensors
        dx, dg, dbeta = ctx.kernels[1].backward(
            dy, x, g, beta, samples, ctx.heads, ctx.kernels[0].ChunksKept(*kept)
        )
        return dx, dg.to(g.dtype), dbeta.to(beta.dtype), None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, samples: Tensor | None, kernels: ModuleType) -> Tensor:
        x, weight, ctx.kernels = x.contiguous(), weight.contiguous(), kernels
        ctx.save_for_backward(x, weight, samples)
        return kernels.convolution(x, weight, samples)  # type: ignore[no-any-return]  # as above

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, samples = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        dx, dweight = ctx.kernels.convolution_backward(dy, x, weight, samples, wanted)
        return dx, dweight.to(weight.dtype) if wanted else None, None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, kernels: ModuleType) -> Tensor:
        x, gate, ctx.eps, ctx.kernels = x.contiguous(), gate.contiguous(), eps, kernels
        ctx.save_for_backward(x, gate, weight)
        return kernels.gated_norm(x, gate, weight, eps)  # type: ignore[no-any-return]  # as above

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        dx, dgate, dweight = ctx.kernels.gated_norm_backward(dy, x, gate, weight, ctx.eps)
        return dx, dgate, dweight.to(weight.dtype) if ctx.needs_input_grad[2] else None, None, None


def convolution(x: Tensor, weight: Tensor, samples: Tensor | None) -> Tensor | None:
    """SiLU of `petune.models.gated_delta.causal_convolution`, or None where no kernel computes it; samples:
    None where each row is one."""
    kernels = _kernels(x.device, x.dtype) if x.dtype in DTYPES else None
    return None if kernels is None else applied(_Convolution, x, weight, samples, kernels[2])


def gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor | None:
    """A module of transformers' gated RMS norms on x [heads, features] and gate, or None where no kernel
    computes it: another module, other dtypes, wide heads."""
    alike = x.dtype in DTYPES and gate.dtype == x.dtype and x.shape[1] <= 2 * WIDEST
    known = type(norm).__name__.endswith("RMSNormGated") and getattr(norm, "activation", "silu") == "silu"
    kernels = _kernels(x.device, x.dtype) if alike and known and not _watched(norm) else None
    if kernels is None:
        return None
    return applied(_GatedNorm, x, gate, norm.weight, norm.variance_epsilon, kernels[2])


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


MIXERS = MixerKernels(mixed_rule, convolution, gated_norm)


def compute_mixers() -> None:
    """Let mixers be computed by kernels where these can, from now on."""
    KERNELS["cuda"] = MIXERS
