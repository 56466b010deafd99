"""Which tensors decay under AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

from torch import Tensor


def decays(name: str, value: Tensor) -> bool:
    """Whether the tensor of this name decays: biases, gates and norms do not, of which those of each head may
    have a row of weights for each (Command R+)."""
    return value.dim() > 1 and not name.removesuffix(".weight").lower().endswith("norm")
