"""Layers of a fused block, each seen before to be what its block takes it for, as they are at this moment."""

from __future__ import annotations

from torch import nn

from petune.errors import UsageError
from petune.models.tuned_linear import TunedLayer, known_linear_of
from petune.models.tuned_parts import BottleneckPart, LowRank

_FIRST = "call petune.kernels.fuse.unfuse(model) before layers are exchanged"


def exchanged(name: str, layer: object) -> UsageError:
    """The error of a layer whose place another has taken: which was to be computed would be a guess."""
    what = f"a layer of a fused block was exchanged: {name}"
    return UsageError(what, found=type(layer).__name__, remedy=_FIRST)


def known_part(layer: nn.Module) -> LowRank:
    """The linear map of a layer that has been seen to be one."""
    part = known_linear_of(layer)
    if part is None:
        raise UsageError(f"a layer of a fused block has become a {type(layer).__name__}", remedy=_FIRST)
    return part


def known_bottleneck(layer: nn.Module) -> BottleneckPart:
    """The same of a layer that has been seen to have a bottleneck."""
    part = layer.bottleneck() if isinstance(layer, TunedLayer) else None
    assert part is not None, "a layer has a bottleneck always or never"
    return part
