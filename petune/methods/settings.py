"""The settings of `wrap` by method, for type checkers and editors alone. What they mean stands at the fields
of petune/methods/configs.py; a test compares names and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from petune.kernels.configs import BaseDtype, KernelsName, MemoryConfig

Names = str | Sequence[str]


class SharedSettings(TypedDict, total=False):
    """What `wrap` takes for every method."""

    kernels: KernelsName
    memory: MemoryConfig | Mapping[str, Any] | str
    base_dtype: BaseDtype | None


class LoraSettings(SharedSettings, total=False):
    """Of lora and dora."""

    r: int
    alpha: float | None
    rslora: bool
    dropout: float
    targets: Names
    exclude: Sequence[str]
    layers: Sequence[int] | None
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    bias: str
    token_rows: Sequence[int]
    init: str
    init_iterations: int | None
    lr_ratio: float | None
    also_train: Names


class Ia3Settings(SharedSettings, total=False):
    """Of ia3."""

    targets: Names
    inputs: Names
    also_train: Names


class MissSettings(SharedSettings, total=False):
    """Of miss."""

    r: int
    dropout: float
    targets: Names
    exclude: Sequence[str]
    also_train: Names


class AdapterSettings(SharedSettings, total=False):
    """Of adapter."""

    kind: str
    reduction: int
    activation: str
    dropout: float
    scale: float | None
    also_train: Names


class SideSettings(SharedSettings, total=False):
    """Of side."""

    reduction: int
    layers: Sequence[int] | None
    end: str
    alpha: float | None
    start: str
    fisher_rows: int | None
    temperature: float
    dropout: float
    also_train: Names


class HeadSettings(SharedSettings, total=False):
    """Of head."""

    also_train: Names
