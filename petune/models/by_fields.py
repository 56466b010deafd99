"""What the table of a family says of a config by the names of its fields: sizes, depths, and how it is made
narrower for side networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

from petune.models.spec import Config, Shape, StackName


def sized(heads: str, width: str, columns: str) -> Callable[[Config], Shape]:
    """`Family.shape` of attention of which every head has its own keys and values."""

    def shape(config: Config) -> Shape:
        number, whole = getattr(config, heads), getattr(config, width)
        return Shape(number, number, whole // number, getattr(config, columns), whole)

    return shape


def deep(blocks: Mapping[StackName, str]) -> Callable[[Config], dict[StackName, int]]:
    """`Family.depth` of stacks."""
    return lambda config: {stack: getattr(config, field) for stack, field in blocks.items()}


def narrowing(*widths: str) -> Callable[[Config, int], Config]:
    """`Family.narrow` by the fields that are widths; one that a config lacks is left out."""

    def narrow(config: Config, reduction: int) -> Config:
        small = deepcopy(config)
        for width in widths:
            if getattr(config, width, None) is not None:
                setattr(small, width, getattr(config, width) // reduction)
        return small

    return narrow
