"""Layers of a fused block, each seen before to be what its block takes it for, as they are at this moment."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from petune.errors import UsageError
from petune.models.tuned_linear import TunedLayer, TunedLinear
from petune.models.tuned_parts import BottleneckPart, LowRank

_FIRST = "call petune.kernels.fuse.unfuse(model) before layers are exchanged"


def exchanged(name: str, layer: object) -> UsageError:
    """The error of a layer that another has taken the place of: which of the two was to be computed would be
    a guess."""
    what = f"a layer of a fused block was exchanged: {name}"
    return UsageError(what, found=type(layer).__name__, remedy=_FIRST)


def known_part(layer: nn.Module) -> LowRank:
    """`low_rank_of` for a layer that has been seen to be one of its own: asking a protocol again costs more
    than the part."""
    if type(layer) is nn.Linear:
        return LowRank(layer.weight, layer.bias)
    if type(layer) is Conv1D:
        return LowRank(layer.weight, layer.bias, transposed=True)
    part = layer.low_rank() if isinstance(layer, TunedLinear) else None
    if part is None:
        raise UsageError(f"a layer of a fused block has become a {type(layer).__name__}", remedy=_FIRST)
    return part


def known_bottleneck(layer: nn.Module) -> BottleneckPart:
    """The same of a layer that has been seen to have a bottleneck."""
    part = layer.bottleneck() if isinstance(layer, TunedLayer) else None
    assert part is not None, "a layer has a bottleneck always or never"
    return part
