"""How a model reads what is no text. The vocabulary's other words are in spec.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Input = Literal["text", "image", "audio"]  # what a model reads
Config = Any  # as in spec.py


@dataclass(frozen=True)
class Signal:
    """How a model reads what is no text. argument: of its forward pass, a tensor [rows, channels, height,
    width] of pictures or [rows, features, frames] of sounds. embeddings: the modules before the first stack
    that make hidden states of it, by the names they have beside the stack. shape: of one input that a config
    is made for; fixed: it takes no other. tokens: (config, shape of one input) -> how many tokens the first
    stack has for it. idle: tensors that pretraining alone reads, by the ends of their names."""

    kind: Literal["image", "audio"]
    argument: str
    embeddings: tuple[str, ...]
    shape: Callable[[Config], tuple[int, ...]]
    tokens: Callable[[Config, Sequence[int]], int]
    fixed: bool = True
    idle: tuple[str, ...] = ()
