"""Which form of the operations runs: chosen once per device and dtype, with the reason said in the log.

Blocks call them directly: torch's dispatcher would cost more than a small model's kernel.
petune.kernels.torch_ops registers each with torch.library, for torch.compile and for use alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import torch

from petune.errors import UsageError
from petune.kernels import reference
from petune.kernels.configs import KernelsName
from petune.models.form import DENSE_INTO

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Ops:
    """The operations of petune.kernels.reference, which says what each means, in one form."""

    name: str
    rms_norm: Callable[..., Any]
    rms_norm_backward: Callable[..., Any]
    layer_norm: Callable[..., Any]
    layer_norm_backward: Callable[..., Any]
    rope_: Callable[..., Any]
    rope_backward: Callable[..., Any]
    rope_unscale: Callable[..., Any]
    norm_rope: Callable[..., Any]
    norm_rope_backward: Callable[..., Any]
    activate: Callable[..., Any]
    activate_backward: Callable[..., Any]
    add_low: Callable[..., Any]
    unscale: Callable[..., Any]
    over_lengths: Callable[..., Any]
    mix: Callable[..., Any]
    mix_backward: Callable[..., Any]
    total: Callable[..., Any]
    linear_low: Callable[..., Any]
    cross_entropy_: Callable[..., Any]
    quantise: Callable[..., Any]
    transposed: Callable[..., Any]
    dense_into: Callable[..., Any]
    drop: Callable[..., Any]
    dropped_low: Callable[..., Any]
    dropped_low_backward: Callable[..., Any]
    add_dropped_low_: Callable[..., Any]


_FILES = {
    **dict.fromkeys(("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward"), "norm"),
    **dict.fromkeys(("rope_", "rope_backward", "rope_unscale"), "rope"),
    **dict.fromkeys(("norm_rope", "norm_rope_backward"), "norm_rope"),
    "activate": "activation",
    "activate_backward": "activation_backward",
    **dict.fromkeys(("add_low", "linear_low", "quantise", "total"), "residual"),
    **dict.fromkeys(("unscale", "over_lengths"), "scaling"),
    **dict.fromkeys(("mix", "mix_backward"), "mixing"),
    "transposed": "transpose",
    "dense_into": "dequantise",
    "cross_entropy_": "loss",
    "drop": "dropout",
    **dict.fromkeys(("dropped_low", "dropped_low_backward", "add_dropped_low_"), "dropped_low"),
}
NAMES = tuple(field.name for field in fields(Ops) if field.name != "name")


@lru_cache
def reference_ops() -> Ops:
    """Plain torch, on any device and in any dtype."""
    return Ops("reference", **{name: getattr(reference, name) for name in NAMES})


@lru_cache
def triton_ops() -> Ops:
    """Triton's kernels, which from then on make quantised weights dense on GPUs outside fused blocks too.
    Raises ImportError where Triton is not there."""
    files: dict[str, ModuleType] = {
        file: import_module(f"petune.kernels.triton.{file}") for file in set(_FILES.values())
    }
    ops = Ops("triton", **{name: getattr(files[_FILES[name]], name) for name in NAMES})
    DENSE_INTO["cuda"] = ops.dense_into
    return ops


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels cannot run there, or None."""
    if device.type != "cuda":
        return f"they need a CUDA device, and the model is on {device.type}"
    if dtype not in DTYPES:
        return f"they do not compute in {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        has = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"they need compute capability 8.0, {torch.cuda.get_device_name(device)} has {has}"
    try:
        triton_ops()
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return None


def select(name: KernelsName, device: torch.device, dtype: torch.dtype) -> Ops | None:
    """The operations a setting means on this device, None for "off" and for "auto" where Triton cannot run.

    Raises UsageError for an unknown name, and for "triton" where it is impossible.
    """
    if name not in get_args(KernelsName):
        raise UsageError(
            f"kernels {name!r} is unknown", where="kernels", expected=", ".join(get_args(KernelsName))
        )
    if name == "off":
        return None
    if name == "reference":
        return reference_ops()
    reason = refusal(device, dtype)
    if reason is None:
        return triton_ops()
    if name == "triton":
        what, remedy = "kernels: triton, but they cannot run here", "use kernels: auto"
        raise UsageError(what, where="kernels", found=reason, remedy=remedy)
    return None
