"""One step of AdamW on a flat tensor, bfloat16 rounded stochastically: its meaning, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from petune.kernels.dispatch import refusal
from petune.rng.dropout import MIX32


class AdamWStep(NamedTuple):
    """AdamW's numbers for one tensor and one step, the first of which is 1."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    step: int

    @property
    def scalars(self) -> tuple[float, float, float, float, float]:
        """What a weight shrinks to; shares of the gradient and of its square in the moments; step size; root
        of the second correction."""
        first, second = self.betas
        size = self.lr / (1 - first**self.step)
        return 1 - self.lr * self.decay, 1 - first, 1 - second, size, (1 - second**self.step) ** 0.5


@torch.no_grad()
def adamw_(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    rule: AdamWStep,
    words: Sequence[int],
    first: int = 0,
    copy: Tensor | None = None,
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019, algorithm 2) in place, in float32 whatever the tensors
    are.

    weight, grad, mean, square: flat, [n]; of float32 or bfloat16, of which the last is rounded
    stochastically: up with the probability that makes its mean right, by a hash of `words` and the element's
    place, `first` and on. copy [n]: also takes the weight, rounded to nearest.
    """
    shrink, blend, gain, size, root = rule.scalars
    wide = torch.promote_types(weight.dtype, torch.float32)
    value, moment, second = (tensor.to(wide) for tensor in (weight, mean, square))
    g = grad.to(wide)
    value = value.mul(shrink)
    moment = moment.lerp(g, blend)
    second = second.mul(rule.betas[1]).addcmul_(g, g, value=gain)
    value.addcdiv_(moment, (second.sqrt() / root).add_(rule.eps), value=-size)
    one, two = random_bits(words, first, len(weight), weight.device)
    weight.copy_(rounded(value, one >> 16, weight.dtype))
    mean.copy_(rounded(moment, one, mean.dtype))
    square.copy_(rounded(second, two >> 16, square.dtype))
    if copy is not None:
        copy.copy_(value)


def rounded(values: Tensor, chance: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`; from float32 to bfloat16 stochastically, by the low 16 bits of `chance`, int32.
    Not a number stays that."""
    if dtype is not torch.bfloat16:
        return values.to(dtype)
    lifted = ((values.float().view(torch.int32) + (chance & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(values.isnan(), values, lifted).to(dtype)


def random_words(seed: int, step: int, name: str) -> tuple[int, int, int, int]:
    """Two starts and two odd strides, int32, of which a tensor's random bits in one step are made."""
    digest = blake2b(f"{seed} {step} {name}".encode(), digest_size=16).digest()
    start, stride, other, another = (
        int.from_bytes(digest[at : at + 4], "little", signed=True) for at in range(0, 16, 4)
    )
    return start, stride | 1, other, another | 1


def random_bits(words: Sequence[int], first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two words of 32 random bits for each element from `first` on, int32 [count]: murmur3's finaliser of
    start + element * stride."""
    element = torch.arange(first, first + count, device=device).to(torch.int32)
    found = []
    for start, stride in (words[:2], words[2:]):
        bits = element * stride + start
        for shift, multiplier in zip((16, 13), MIX32, strict=True):
            bits = (bits ^ _shifted(bits, shift)) * multiplier
        found.append(bits ^ _shifted(bits, 16))
    return found[0], found[1]


def _shifted(bits: Tensor, by: int) -> Tensor:
    """int32 shifted right, zeros coming in: torch shifts the sign in, which would leave every result's
    highest bit 0."""
    return (bits >> by).bitwise_and(2 ** (32 - by) - 1)


def adamw_for(device: torch.device, kind: torch.dtype) -> Callable[..., None]:
    """`adamw_`, or the kernel that does the same."""
    found: Callable[..., None] = (
        adamw_ if refusal(device, kind) else import_module("petune.kernels.triton.adamw").adamw_
    )
    return found
