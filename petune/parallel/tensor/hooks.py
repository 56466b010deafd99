"""Transitions hooked on where regions are entered and left, so that a model that `slices.cut` has narrowed
computes what the whole did.

What is hooked follows from the layouts of neighbouring regions alone. A hook that does not find its input
raises. All state lies on modules and hook objects, never in closures, so copying a model copies it whole.

        connection   region    enter                                leave
        whole        heads     copy (backward: sum)                 reduce
        sequence     heads     gather (backward: reduce-scatter)    reduce-scatter
        sequence     sequence  nothing; attention exchanges keys and values
        whole        whole     nothing (a mixer)
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from petune.errors import UsageError
from petune.models.boundary import Boundary, BoundaryHook, SharedByCopies, boundary_of, put_boundary
from petune.models.spec import Family, Region, Shape, child_of
from petune.models.stack import ends_here
from petune.models.transition import transition
from petune.models.tuned_linear import TunedLayer
from petune.parallel.boundary import SequenceBoundary, WholeBoundary
from petune.parallel.collectives import MaybeGroup, alone
from petune.parallel.copy_engines import CopyEngines
from petune.parallel.mesh import Mesh
from petune.parallel.plan import Cut
from petune.parallel.sequence.exchange import Cross, GatherExchange, Ring, Ulysses
from petune.parallel.tensor.overlap import Overlap, TiledLeave, make_overlap
from petune.parallel.tensor.own_tokens import share_tokens
from petune.parallel.tensor.shard_params import features_of, module_at, stacks_of
from petune.parallel.tensor.stack_edges import StackEdges
from petune.rng.context import running

# by the connection of blocks, and by how attention on own tokens sees the others'
BOUNDARIES: dict[str, Any] = {"whole": WholeBoundary, "sequence": SequenceBoundary}
EXCHANGES: dict[str, Any] = {"gather": GatherExchange, "ulysses": Ulysses, "ring": Ring}


def cross(model: nn.Module, family: Family, mesh: Mesh) -> None:
    """Hook the communication of the plan's layouts on a model that `cut` has narrowed."""
    plan = mesh.plan.cut
    if plan is None or mesh.plan.tp == 1:
        return
    group, rank = mesh.groups["tp"], mesh.at.tp
    shape, overlap = family.shape(cast("Any", model).config), make_overlap(plan, group, rank, mesh.device)
    model.register_forward_pre_hook(RefuseRecording(plan), with_kwargs=True)
    put_boundaries(model, family, plan, rank, group, mesh.engines)
    stacks = list(stacks_of(model, family))
    shares = plan.connection == "sequence" and ends_here(model, family)  # no stage before has a head
    tokens = share_tokens(model, group, rank) if shares else None
    for at, (_, stack) in enumerate(stacks, 1):
        stack.edges.append(StackEdges(plan, group, rank, tokens if at == len(stacks) else None))
        for index, block in stack.numbered:
            for region in stack.rule.regions_in(block):
                _cross_region(
                    block, region, f"{stack.name}.{index}", StackEdges(plan, group, rank), shape, overlap
                )
        ladder = stack._modules.get("side")
        if ladder is not None and plan.connection == "sequence":  # one more region in the connection's layout
            if stack.rule.positions is not None:
                what = "a side network has own tokens here, and its attention scores those of all itself"
                raise UsageError(what, where=f"{stack.name}.side", remedy="use tp, pp or dp")
            for _, block in cast("Any", ladder).numbered:
                for region in stack.rule.regions:
                    if region.kind == "attention" and child_of(block, region.enter) is not None:
                        _put_exchange(region, module_at(block, region.enter, "side")[1], plan, group, rank)
                        _hand_memory(block, region, rank)


def put_boundaries(
    model: nn.Module,
    family: Family,
    plan: Cut,
    rank: int,
    group: MaybeGroup = None,
    engines: CopyEngines | None = None,
) -> None:
    """Say of every sub-layer that `cut` has narrowed which boundary it has, and of attention on own tokens
    which exchange. Without a group nothing can be computed, only foretold. engines: by which they talk."""
    shape, kind = family.shape(cast("Any", model).config), BOUNDARIES[plan.connection]
    for _, stack in stacks_of(model, family):
        for _, block in stack.numbered:
            regions = stack.rule.regions_in(block)
            for region in (one for one in regions if not one.within):
                enter = module_at(block, region.enter, stack.name)[1]
                if region.kind == "attention" and plan.attention == "sequence":
                    _put_exchange(region, enter, plan, group, rank, engines)
                if plan.layout(region.kind) == "heads":
                    # of a mixture the shared expert alone draws dropout by its features
                    drawing = next((one for one in regions if one.within and region.mixture), region)
                    way_out = next(
                        features_of(drawing, plan, shape)[role]
                        for role, path in drawing.sites.items()
                        if path == drawing.leave
                    )
                    shares = [one / sum(plan.sequence) for one in plan.sequence] or [1.0] * (rank + 1)
                    first, largest = sum(way_out[0][:rank]), max(shares)
                    put_boundary(enter, kind(group, first, plan.overlap, shares[rank], largest, engines))


def _put_exchange(
    region: Region,
    enter: nn.Module,
    plan: Cut,
    group: MaybeGroup,
    rank: int,
    engines: CopyEngines | None = None,
) -> None:
    """Say of attention on own tokens how it sees the others'."""
    cast("Any", enter).exchange = (
        Cross(rank, plan.sequence)
        if region.cross
        else EXCHANGES[plan.exchange](group, rank, plan.sequence, overlapped=plan.overlap, engines=engines)
    )


def _hand_memory(block: nn.Module, region: Region, rank: int) -> None:
    """Let own queries see the whole of an encoder's tokens."""
    for role in ("k", "v") if region.cross else ():
        if (found := child_of(block, region.sites[role])) is not None:
            across = Across(rank)
            found[1].register_forward_pre_hook(across.before)
            found[1].register_forward_hook(across.after)


def _cross_region(
    block: nn.Module, region: Region, where: str, edges: StackEdges, shape: Shape, overlap: Overlap | None
) -> None:
    plan, group, rank = edges.plan, edges.group, edges.rank
    if plan.layout(region.kind) == "whole":
        return
    enter = module_at(block, region.enter, where)[1]
    if plan.layout(region.kind) == "sequence":
        if region.kind == "attention":
            _hand_memory(block, region, rank)
        return
    if not region.within:
        leave, boundary = module_at(block, region.summed, where)[1], cast("Boundary", boundary_of(enter))
        enter.register_forward_pre_hook(
            EnterHook(boundary, group, f"{where}.{region.enter}", overlap), with_kwargs=True
        )
        out = leave.after_sum() if isinstance(leave, TunedLayer) else leave
        tiles = overlap.row(leave) if overlap is not None else None
        out.register_forward_hook(LeaveHook(boundary, group, rank, tiles))
    if region.kind == "attention":
        cast("Any", enter).first_head = sum(plan.heads[:rank])
    _tell_features(block, region, plan, rank, shape, overlap)


def _tell_features(
    block: nn.Module, region: Region, plan: Cut, rank: int, shape: Shape, overlap: Overlap | None
) -> None:
    """Hook the linears of a region cut by heads, to tell dropout where features lie; not those of experts."""
    leave, sizes = child_of(block, region.leave), features_of(region, plan, shape)
    for role, choices in region.sites.items():
        found = child_of(block, choices)
        if found is not None and role != "experts":
            if overlap is not None and found != leave:
                overlap.column(found[1])
            features = Features(sum(sizes[role][0][:rank]), row=found == leave)
            found[1].register_forward_pre_hook(features.before)
            if not features.row:
                found[1].register_forward_hook(features.after)


@dataclass
class Features(BoundaryHook):
    """Hooks on a site of a region cut by heads, which tell dropout where features lie: whole before a column
    site, from `first` after it and before a row site."""

    first: int
    row: bool

    def before(self, module: nn.Module, args: Any) -> None:
        """Before the linear."""
        running().feature = self.first if self.row else 0

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the linear."""
        running().feature = self.first


@dataclass
class Across(BoundaryHook):
    """Hooks on what reads a whole encoder from a decoder cut by sequence: its tokens are the encoder's, from
    the first on."""

    rank: int

    def before(self, module: nn.Module, args: Any) -> None:
        """Before the linear."""
        running().token = 0

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the linear."""
        running().token = sum(running().sizes[: self.rank])


@dataclass
class EnterHook(SharedByCopies, BoundaryHook):
    """Hook before a region cut by heads: every rank needs the hidden states of the whole sequence."""

    boundary: Boundary
    group: dist.ProcessGroup
    where: str
    overlap: Overlap | None = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with its first input as the region needs it. Raises RuntimeError when there is none."""
        if args:
            return (self.widen(args[0]), *args[1:]), kwargs
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": self.widen(kwargs["hidden_states"])}
        raise RuntimeError(f"{self.where} was called without hidden states, found {sorted(kwargs)}")

    def widen(self, hidden: Tensor) -> Tensor:
        """Hidden states of every token, or a stand-in; their gradient is summed over the ranks."""
        now = running()
        now.token = now.feature = 0
        if self.overlap is not None:
            if hidden.dim() == 2:
                what = "overlap hides communication in tiles of rows, and these lie one behind the other"
                raise UsageError(what, where=self.where, remedy="remove overlap")
            return self.overlap.enter(hidden)
        if alone(self.group):
            return hidden
        boundary = self.boundary.here()
        own = now.sizes[dist.get_rank(self.group)] if boundary.connection == "sequence" else 0
        return in_rows(hidden, own, lambda x: transition(x, boundary.enter, boundary.enter_backward))


@dataclass
class LeaveHook(BoundaryHook):
    """Hook after the way out of a region cut by heads: partial sums become what the connection works on."""

    boundary: Boundary
    group: dist.ProcessGroup
    rank: int
    tiles: TiledLeave | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LeaveHook:
        return replace(self, tiles=deepcopy(self.tiles, memo))

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The sum over ranks, whole or this rank's tokens of it, of the first of what a module gives."""
        if isinstance(output, tuple):
            return self.summed(module, output[0]), *output[1:]
        return self.summed(module, output)

    def summed(self, module: nn.Module, output: Tensor) -> Tensor:
        """The sum over ranks of a tensor."""
        now, whole = running(), self.boundary.connection == "whole"
        if self.tiles is not None:
            output = self.tiles.summed(module, output)
        elif not alone(self.group):
            boundary = self.boundary.here()
            tokens = 0 if whole else sum(now.sizes)
            output = in_rows(output, tokens, lambda x: transition(x, boundary.leave, boundary.leave_backward))
        now.token, now.feature = 0 if whole else sum(now.sizes[: self.rank]), 0
        return output


def in_rows(x: Tensor, tokens: int, act: Callable[[Tensor], Tensor]) -> Tensor:
    """act(x), where a block may have laid rows of so many tokens one behind the other, [m, width]."""
    if x.dim() > 2 or not tokens:
        return act(x)
    return act(x.unflatten(0, (-1, tokens))).flatten(0, 1)


@dataclass
class RefuseRecording(SharedByCopies):
    """Hook before the model: recorded hidden states and attentions would be shards."""

    plan: Cut

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Raises UsageError when the call asks for them."""
        config = getattr(model, "config", None)
        for name in ("output_hidden_states", "output_attentions"):
            given = kwargs.get(name)
            if getattr(config, name, False) if given is None else given:
                if name == "output_hidden_states" and self.plan.connection == "whole":
                    continue
                remedy = "record them in a single process: parallel=none"
                raise UsageError(f"{name} would give one rank's part of them", remedy=remedy)
