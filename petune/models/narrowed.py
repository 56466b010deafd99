"""Configs of narrower models of a family, for side networks."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from petune.models.spec import Config


def narrowing(*widths: str) -> Callable[[Config, int], Config]:
    """`Family.narrow` by the fields of a config that are widths; one that a config lacks is left out."""

    def narrow(config: Config, reduction: int) -> Config:
        small = deepcopy(config)
        for width in widths:
            if getattr(config, width, None) is not None:
                setattr(small, width, getattr(config, width) // reduction)
        return small

    return narrow
