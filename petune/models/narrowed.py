"""Configs of narrower models of a family, for side networks."""

from __future__ import annotations

from copy import deepcopy

from petune.models.spec import Config


def narrowed(config: Config, reduction: int, *widths: str) -> Config:
    """A copy of a config with these widths divided by `reduction`."""
    small = deepcopy(config)
    for width in widths:
        setattr(small, width, getattr(config, width) // reduction)
    return small
