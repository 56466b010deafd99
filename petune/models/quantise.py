"""Which weights of a model are quantised, and that they can be: those of the linears in the blocks of its
family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from petune.errors import UsageError
from petune.models.frozen_weight import FORMS, quantised
from petune.models.spec import Family, find_sites


def quantise_blocks(model: nn.Module, family: Family, base_dtype: str) -> None:
    """Put quantised weights in the place of those of every linear in the blocks of a model, which may be on
    the meta device. Raises as `quantise_layers`."""
    quantise_layers([site.module for site in find_sites(model, family)], base_dtype)


def quantise_layers(layers: Sequence[nn.Module], base_dtype: str) -> None:
    """Put quantised weights in the place of those of linears, one by one; a shared one stays shared. Raises
    UsageError, before the first, for a weight that trains and for one that the form cannot hold."""
    form, linears = FORMS[base_dtype], cast("Sequence[Any]", layers)
    for weight in (layer.weight for layer in linears):
        if weight.requires_grad:
            raise UsageError(
                f"base_dtype: {base_dtype} needs weights that do not train",
                where="base_dtype",
                remedy="use method: lora",
            )
        if (found := form.refused(weight.device, weight.dtype, weight.shape)) is not None:
            raise UsageError(
                f"base_dtype: {base_dtype} cannot be had here",
                where="base_dtype",
                expected=form.needs,
                found=found,
                remedy="leave it out",
            )
    made: dict[nn.Parameter, nn.Parameter] = {}
    for layer in linears:
        layer.weight = made.setdefault(layer.weight, quantised(layer.weight, base_dtype))
