"""What drops out in a call of a fused block: where its values lie in the batch, and each draw."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, cast

from torch import Tensor

from petune.kernels.block.call import BlockLayers, Draws, Spec
from petune.kernels.block.cores import Drawing
from petune.kernels.block.layout import Layout, places_of
from petune.kernels.block.program import Program
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
        with bound(token=0, folded=False):
            return places_of(self.hidden, self.layout.segments, self.layout.longest)

    @cached_property
    def across(self) -> Tensor:
        """Of the tokens of the memory, which every rank holds."""
        read = self.hidden if self.memory is None else self.memory
        with bound(token=0, folded=False):
            return places_of(read, self.layout.memory, read.shape[1])


Side = Literal["own", "within", "across"]  # of the places of a draw


def side_of(program: Program, how: Drawing) -> Side:
    """The tokens for which something is drawn."""
    if how.kind == "group" and program.across[how.at]:
        return "across"
    return "own" if how.within is None and how.head is None else "within"


def sides(program: Program, draws: Draws) -> list[Side]:
    """Those of each of `draws.all`."""
    of = {(how.kind, how.at): side_of(program, how) for how in program.order}
    every: list[tuple[Drop | None, Side]] = [
        (one, of["group", at]) for at, group in enumerate(draws.groups) for one in group
    ]
    every += [(one, of["drop", at]) for at, one in enumerate(draws.drops)]
    every += [(one, of["bottleneck", at]) for at, one in enumerate(draws.bottlenecks)]
    every += [(one, "own") for drawn in draws.cores for one in drawn]
    return [side for one, side in every if one is not None]


def drawn(spec: Spec, parts: BlockLayers, places: Places) -> Draws:
    """The draws of a call in training, in the order in which the block's own forward draws."""

    def one(p: float, how: Drawing) -> Drop | None:
        if not p:
            return None
        found = draw(getattr(places, side_of(program, how)), p)
        return found if how.within is None and how.head is None else part_of(spec, found, how)

    program, chances, groups, drops, behind = spec.program, spec.probabilities, [], [], []
    cores = []
    for how in program.order:
        at = how.at
        if how.kind == "group":
            groups.append(tuple(one(part.dropout, how) for part in parts.groups[at]))
        elif how.kind == "core":  # which says itself with what probability
            cores.append(tuple(draw(places.own, 1.0) for _ in range(spec.called[at].draws)))
        elif how.kind == "bottleneck":
            part = parts.bottlenecks[at]
            behind.append(None if part.tensors is None else one(part.dropout, how))
        else:
            drops.append(one(chances[at], how))
    return Draws(tuple(groups), tuple(drops), tuple(behind), tuple(cores))


def part_of(spec: Spec, drop: Drop, how: Drawing) -> Drop:
    """The draw for what this rank has of the features, or of the heads, inside a sub-layer that is cut or
    where tokens are traded for heads."""
    if how.head is not None:
        return drop_of_heads(drop._replace(feature=0), how.head)
    first = spec.boundaries[cast("int", how.within)].first
    if how.over == "heads":
        return drop_of_heads(drop._replace(feature=0), first // spec.program.sizes.head_dim)
    return drop._replace(feature=0 if how.over is None else first)
