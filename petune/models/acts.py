"""The activations that kernels compute on their own, by transformers' names for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

ACTS: Mapping[str, Literal["silu", "gelu", "gelu_tanh", "relu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
