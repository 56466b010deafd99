"""The gated delta rule by Triton's kernels: one autograd node, which keeps of each chunk its state and two
matrices of pairs of its tokens. `petune.models.gated_delta` computes it elsewhere, and in float32."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petune.kernels.dispatch import refusal
from petune.models.gated_delta import KERNELS, MixedHeads
from petune.models.transition import applied

DTYPES = (torch.bfloat16, torch.float16)
Both = tuple[ModuleType, ModuleType]
WIDEST = 128  # key features of a head: a program holds the states of all


def mixed_rule(
    x: Tensor, g: Tensor, beta: Tensor, samples: Tensor | None, heads: MixedHeads
) -> Tensor | None:
    """`petune.models.gated_delta.mixed_rule`, or None where no kernel computes it."""
    if not supported(x.dtype, heads) or (kernels := _kernels(x.device, x.dtype)) is None:
        return None
    return applied(_Rule, x, g, beta, samples, heads, kernels)


def supported(dtype: torch.dtype, heads: MixedHeads) -> bool:
    """Whether there are kernels for such values and heads."""
    return dtype in DTYPES and heads.keys <= WIDEST


@lru_cache
def _kernels(device: torch.device, dtype: torch.dtype) -> Both | None:
    return None if refusal(device, dtype) is not None else both()


def both() -> Both:
    """Ahead and back. Raises ImportError where Triton is not there."""
    ahead, back = (import_module(f"petune.kernels.triton.gated_delta{name}") for name in ("", "_backward"))
    return ahead, back


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        g: Tensor,
        beta: Tensor,
        samples: Tensor | None,
        heads: MixedHeads,
        kernels: Both,
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


def compute_mixers() -> None:
    """Let mixers be computed by kernels where these can, from now on."""
    KERNELS["cuda"] = mixed_rule
