"""Settings of kernels and memory, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from petune.errors import UsageError
from petune.setting import setting

Level = Literal["input", "attention", "projections", "all"]  # what a block keeps, from the least to the most
KernelsName = Literal["auto", "reference", "triton", "off"]
Keep = Literal["auto", "all", "projections", "attention", "input"]
Offload = Literal["auto", "none", "input", "attention"]
Stream = Literal["none", "bf16", "fp32"]
BaseDtype = Literal["fp8", "int8", "nf4"]
KEEPS: tuple[str, ...] = get_args(Keep)
OFFLOADS: tuple[str, ...] = get_args(Offload)
STREAMS: tuple[str, ...] = get_args(Stream)
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class MemoryConfig:
    """What each block keeps for its backward pass, and where. `auto` chooses per block what fits with the
    least recomputation.

    keep, from the most memory to the least: all (only norms and activations are recomputed); projections
    (gate and up are recomputed too); attention (its output and log-sum-exp, and the block's input); input (of
    the block, nothing else). offload: what of the input and the attention output rests in pinned host memory
    meanwhile. stream: where not none, weights, gradients and AdamW states of the blocks rest in host memory;
    bf16: weights and states in bfloat16, rounded stochastically, 6 bytes a parameter; fp32: states and, of
    bfloat16 weights, masters in float32, 14 bytes a parameter.
    """

    keep: Keep = setting("auto", f"per block: {', '.join(KEEPS)}", choices=KEEPS)
    offload: Offload = setting(
        "auto", "to pinned host memory: auto, none, input, attention (and input)", choices=OFFLOADS
    )
    tile: int | None = setting(None, "tokens per tile of the MLP; null: chosen", ge=128)
    budget: float | None = setting(None, "GiB of device memory to stay within; null: what is free", gt=0)
    host: float | None = setting(
        None, "GiB of pinned host memory to use at most; null: 80 % of what is free", gt=0
    )
    stream: Stream = setting(
        "none",
        "full, one device: weights and states of blocks on the host: none, bf16, fp32",
        choices=STREAMS,
    )


def make_memory(setting: MemoryConfig | Mapping[str, Any] | str) -> MemoryConfig:
    """The config that "auto", a keep by name or a mapping of fields means. Raises UsageError for what it
    cannot be."""
    if isinstance(setting, MemoryConfig):
        return setting
    values: Mapping[str, Any] = {"keep": setting} if isinstance(setting, str) else setting
    if not isinstance(values, Mapping):
        what, expected = "memory is not a setting", "auto, a keep by name or a mapping"
        raise UsageError(what, where="memory", expected=expected, found=repr(setting))
    known = {entry.name: entry.metadata for entry in fields(MemoryConfig)}
    for name, value in values.items():
        if name not in known:
            raise UsageError(f"memory.{name} is unknown", where="memory", expected=", ".join(known))
        _check(f"memory.{name}", value, known[name])
    config = MemoryConfig(**values)
    refuse_contradiction(config)
    return config


def _check(where: str, value: Any, rule: Mapping[str, Any]) -> None:
    """Raise UsageError for a value that a field with this metadata cannot have."""
    if "choices" in rule:
        if value not in rule["choices"]:
            raise UsageError(
                f"{where} {value!r} is unknown", where=where, expected=", ".join(rule["choices"])
            )
        return
    number = isinstance(value, int if "ge" in rule else int | float) and not isinstance(value, bool)
    if value is not None and not (
        number and value >= rule.get("ge", value) and ("gt" not in rule or value > rule["gt"])
    ):
        expected = (
            f"a whole number of at least {rule['ge']}" if "ge" in rule else f"a number above {rule['gt']}"
        )
        raise UsageError(f"{where} cannot be {value!r}", where=where, expected=f"{expected}, or None")


def refuse_contradiction(config: MemoryConfig) -> None:
    """Raise UsageError where the fields of a config do not go together."""
    if config.keep == "input" and config.offload == "attention":
        what = "a block that keeps its input alone has no attention output to offload"
        where, expected, remedy = "memory.offload", "input, none or auto", "or keep: attention"
        raise UsageError(what, where=where, expected=expected, found="attention", remedy=remedy)
    if config.keep == "all" and config.tile is not None:
        what, where = "the MLP of a block that keeps all is not tiled", "memory.tile"
        expected, remedy = "none with keep: all", "keep: projections, or less"
        raise UsageError(what, where=where, expected=expected, found=str(config.tile), remedy=remedy)


Parks = Literal["none", "input", "attention"]  # what rests in host memory, from the least to the most


@dataclass(frozen=True)
class Rung:
    """What one block keeps and where: MemoryConfig's keep and offload, decided."""

    keep: Level = "all"
    offload: Parks = "none"
