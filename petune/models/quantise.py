"""Which weights of a model are quantised, and that they can be: those of the linears and of the experts in
the blocks of its family, whether they are fused or not."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from petune.errors import UsageError
from petune.models.experts import is_experts, weights_of
from petune.models.frozen_weight import FORMS, form_of, quantised
from petune.models.parts import FINE
from petune.models.sharded import shards_of
from petune.models.sites import find_sites
from petune.models.spec import Family


def check_base_dtype(base_dtype: str | None) -> None:
    """Raise UsageError for a form that there is none of."""
    if base_dtype not in (None, *FORMS):
        raise UsageError(
            f"base_dtype {base_dtype!r} is unknown", where="base_dtype", expected=", ".join(FORMS)
        )


def quantise_blocks(
    model: nn.Module, family: Family | None, base_dtype: str, device: torch.device | None = None
) -> None:
    """Put quantised weights in the place of those of every linear, and of all experts, in the blocks of a
    model, one by one; a shared one stays shared, a quantised one what it is. The few rows by which a mixer's
    state is written and decays stay as they are.

    The model may be on the meta device; device: where it will compute, None for where it is. Raises
    UsageError, before the first, for a model of no known family, and for a weight that trains, is sharded or
    that the form cannot hold.
    """
    if family is None:
        what = "base_dtype quantises the blocks of a family that petune knows"
        raise UsageError(what, where="base_dtype", found=type(model).__name__, remedy="leave it out")
    if shards_of(model) is not None:
        what = f"base_dtype: {base_dtype} quantises whole weights, and these are sharded"
        raise UsageError(what, where="base_dtype", remedy="remove base_dtype, or use dp without shard")
    layers = [one.module for one in find_sites(model, family) if one.role not in FINE]
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for layer in layers:
        for name in weights_of(layer) if is_experts(layer) else ("weight",):
            _refuse(layer.get_parameter(name), base_dtype, device)
            places.setdefault(layer.get_parameter(name), []).append((layer, name))
    while places:  # nothing but the model refers to a weight, so that it is freed before the next one's turn
        own, held = places.popitem()
        made = quantised(own, base_dtype)
        for layer, name in held:
            setattr(layer, name, made)
            if own.dim() == 3:
                # transformers' loop multiplies with one expert at a time; its other ways copy all of them
                cast("Any", layer).config._experts_implementation = "eager"


def _refuse(weight: nn.Parameter, base_dtype: str, device: torch.device | None) -> None:
    """Raise UsageError for a weight that trains, and for one that the form cannot hold."""
    if weight.requires_grad:
        what = f"base_dtype: {base_dtype} needs weights that do not train"
        raise UsageError(what, where="base_dtype", remedy="leave it out, or train other weights")
    form = form_of(weight, base_dtype)
    if (found := form.refused(device or weight.device, weight.dtype, weight.shape)) is not None:
        what = f"base_dtype: {base_dtype} cannot be had here"
        raise UsageError(what, where="base_dtype", expected=form.needs, found=found, remedy="leave it out")
