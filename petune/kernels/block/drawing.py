"""What drops out in one call of a fused block: where its values lie in the batch, and the draws of each
dropout."""

from __future__ import annotations

from functools import cached_property
from typing import cast

from torch import Tensor

from petune.kernels.block.call import Draws, Parts, Spec
from petune.kernels.block.layout import Layout, places_of
from petune.kernels.block.program import Drawing
from petune.rng.context import bound, running
from petune.rng.dropout import Drop, draw, drop_of_heads


class Places:
    """Where rows of a call's values lie in the batch, [m] each, made when it is first asked for."""

    def __init__(self, layout: Layout, hidden: Tensor, memory: Tensor | None) -> None:
        self.layout, self.hidden, self.memory = layout, hidden, memory

    @cached_property
    def own(self) -> Tensor:
        """Of the tokens of the hidden states."""
        if self.layout.segments is None:
            return places_of(self.hidden, None, self.hidden.shape[1])
        first = running().token
        return self.within[first : first + self.hidden.shape[1]]

    @cached_property
    def within(self) -> Tensor:
        """Of all tokens of a sequence, of which a rank may hold some."""
        with bound(token=0):
            return places_of(self.hidden, self.layout.segments, self.layout.longest)

    @cached_property
    def across(self) -> Tensor:
        """Of the tokens of the memory, which every rank holds."""
        read = self.hidden if self.memory is None else self.memory
        with bound(token=0):
            return places_of(read, self.layout.memory, read.shape[1])


def drawn(spec: Spec, parts: Parts, places: Places) -> Draws:
    """The draws of a call in training, in the order in which the block's own forward draws."""

    def one(p: float, how: Drawing, across: bool = False) -> Drop | None:
        if not p:
            return None
        if how.within is None and how.head is None:
            return draw(places.across if across else places.own, p)
        return part_of(spec, draw(places.across if across else places.within, p), how)

    program, chances, groups, drops, behind = spec.program, spec.probabilities, [], [], []
    for how in program.order:
        at = how.at
        if how.kind == "group":
            groups.append(tuple(one(part.dropout, how, program.across[at]) for part in parts.groups[at]))
        elif how.kind == "bottleneck":
            part = parts.bottlenecks[at]
            behind.append(None if part.tensors is None else one(part.dropout, how))
        else:
            drops.append(one(chances[at], how))
    return Draws(tuple(groups), tuple(drops), tuple(behind))


def part_of(spec: Spec, drop: Drop, how: Drawing) -> Drop:
    """The draw for what this rank has of the features, or of the heads, inside a sub-layer that is cut or
    where tokens are traded for heads."""
    if how.head is not None:
        return drop_of_heads(drop._replace(feature=0), how.head)
    first = spec.boundaries[cast("int", how.within)].first
    if how.over == "heads":
        return drop_of_heads(drop._replace(feature=0), first // spec.program.sizes.head_dim)
    return drop._replace(feature=0 if how.over is None else first)
