"""What of a model one rank holds: tensors narrowed in place to its heads and columns, and what is remembered
of it.

`cut` talks to nobody, so it runs on meta tensors too. It learns how a layer is cut from the layer itself
(`splits`), and which tensor is whose from the family's table.

**Which gradients are sums.** A whole tuned tensor inside a region cut by heads sees only this rank's heads or
columns: its gradient is one term of a sum over the axis. Where the connection is cut by sequence, so is that
of every whole tensor inside a stack. The bias of a row site lies on the first rank alone and is added before
the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.models import experts
from petune.models.expert_form import cut_experts
from petune.models.frozen_weight import QuantisedWeight
from petune.models.joined import MEMBERS, rows_of_heads
from petune.models.nf4 import Nf4, refuse_cut_block
from petune.models.spec import CutKind, Family, Member, Pieces, Region, Shape, TensorSplit, child_of
from petune.models.stack import Stack, own_stacks, stacks_in
from petune.models.tuned_linear import TunedLayer, TunedLinear, linear_splits
from petune.parallel.mesh import Axis, Coordinate
from petune.parallel.plan import Cut, ParallelPlan, in_grains


@dataclass(frozen=True)
class Slice:
    """How one tensor lies across an axis: `sizes` along `dim`, in the order of ranks; "owner": whole, on the
    first rank alone. pieces: where the dim is several one behind the other, each of which is cut, the sizes
    of each."""

    dim: int | Literal["owner"]
    sizes: tuple[int, ...] = ()
    axis: Axis = "tp"
    pieces: tuple[tuple[int, ...], ...] = ()

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """(where it begins in the whole, length) along `dim` of each piece that a rank has."""
        pieces = self.pieces or (self.sizes,)
        firsts = [sum(map(sum, pieces[:at])) + sum(own[:rank]) for at, own in enumerate(pieces)]
        return [(first, own[rank]) for first, own in zip(firsts, pieces, strict=True)]

    def together(self, value: Tensor) -> Tensor:
        """The whole, of what ranks have one behind the other."""
        if not self.pieces:
            return value
        dim = cast("int", self.dim)
        ranks = [
            own.split([piece[rank] for piece in self.pieces], dim)
            for rank, own in enumerate(value.split(list(self.sizes), dim))
        ]
        return torch.cat([own[at] for at in range(len(self.pieces)) for own in ranks], dim)


@dataclass
class Placed:
    """What saving, clipping and the one sum of gradients need to know, by full tensor name.

    slices: every tensor that is cut, tuned or frozen. partial: tensors that are whole but whose gradient is
    one term of a sum over the tp axis, if they train.
    """

    slices: dict[str, Slice] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)


def cut(model: nn.Module, family: Family, plan: ParallelPlan, at: Coordinate) -> Placed:
    """Narrow the tensors of every region that is cut by heads to the slices of the rank `at`, in place.

    Works on meta tensors. Raises UsageError for a layer that says nothing of how it is cut.
    """
    placed = Placed()
    if plan.cut is None:
        return placed
    shape = family.shape(cast("Any", model).config)
    for path, stack in stacks_of(model, family):
        inside = {f"{path}.{name}" for name, _ in stack.named_parameters(remove_duplicate=False)}
        for index, block in stack.numbered:
            for region in stack.rule.regions_in(block):
                if plan.cut.layout(region.kind) == "heads":
                    placed.partial |= _cut_region(
                        block, region, f"{path}.{index}", plan.cut, shape, at.tp, placed.slices
                    )
        if plan.cut.connection == "sequence":
            placed.partial |= inside
    placed.partial -= set(placed.slices)
    return placed


def stacks_of(model: nn.Module, family: Family) -> Iterator[tuple[str, Stack]]:
    """The stacks of a model, made its own if they are not yet, with their full names."""
    own_stacks(model, family)
    yield from stacks_in(model).items()


def _cut_region(
    block: nn.Module, region: Region, where: str, cut: Cut, shape: Shape, rank: int, slices: dict[str, Slice]
) -> set[str]:
    """Narrow one region; returns the full names of its whole tensors, which become partial."""
    sizes = features_of(region, cut, shape)
    whole: set[str] = set()
    leave = child_of(block, region.leave)
    seen: set[str] = set()
    for role, choices in region.sites.items():
        if (found := child_of(block, choices)) is None:
            continue
        name, layer = found
        kind: CutKind = "row" if leave is not None and layer is leave[1] else "column"
        seen |= {f"{name}.{own}" for own, _ in layer.named_parameters()}
        for own, split in splits_of(layer, kind, f"{where}.{name}").items():
            whole |= narrow(layer, own, split, sizes[role], rank, f"{where}.{name}", slices)
        if isinstance(layer, TunedLinear) and kind == "column":
            layer.cut_to([one[rank] for one in sizes[role]])
    enter = module_at(block, region.enter, where)
    for tensors, shares in ((region.by_head, cut.heads), (region.by_kv_head, cut.kv_heads)):
        for name, dim in tensors.items():
            if child_of(enter[1], name.rpartition(".")[0]) is not None:
                whole |= narrow(enter[1], name, dim, (shares,), rank, f"{where}.{enter[0]}", slices)
                seen.add(f"{enter[0]}.{name}")
    if region.kind == "attention":
        _tell_heads(enter[1], region, cut.heads[rank], cut.kv_heads[rank])
    if isinstance(enter[1], TunedLayer):  # which acts after the sum
        seen |= {f"{enter[0]}.{name}" for name in enter[1].tuned()}
    rest = {f"{enter[0]}.{name}" for name, _ in enter[1].named_parameters()} - seen
    return whole | {f"{where}.{name}" for name in rest}


def _tell_heads(enter: Any, region: Region, heads: int, kv_heads: int) -> None:
    """Say in attention that is cut how many heads are here: in a config of its own where it asks that."""
    counts = dict.fromkeys(region.head_counts, heads) | dict.fromkeys(region.kv_counts, kv_heads)
    if any(name.startswith("config.") for name in counts):
        enter.config = copy.copy(enter.config)
    for name, count in counts.items():
        owner, _, leaf = name.rpartition(".")
        setattr(enter.config if owner else enter, leaf, count)


def features_of(region: Region, cut: Cut, shape: Shape) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Features per rank of what each role makes, the way out takes: of each part of a linear of several."""
    if region.kind == "mlp":
        number = getattr(shape, region.columns)  # of which not all MLPs have as many
        exact = number == sum(cut.columns)
        columns = cut.columns if exact else in_grains(number, cut.columns)
        return {role: (columns,) * len(MEMBERS.get(role, (role,))) for role in region.sites}
    ranks = [
        rows_of_heads(heads, keys, shape.head_dim, region.gated)
        for heads, keys in zip(cut.heads, cut.kv_heads, strict=True)
    ]
    queries = tuple(heads * shape.head_dim for heads in cut.heads)  # of the way out
    return {
        role: tuple(
            tuple(one[part] for one in ranks) if part in MEMBERS["qkv"] else queries
            for part in MEMBERS.get(role, (role,))
        )
        for role in region.sites
    }


def refuse_cut_form(base_dtype: str, cut: Cut, shape: Shape) -> None:
    """Raise UsageError for shares into which weights that are held in `base_dtype` cannot be cut: what
    `narrow` would meet in a rank, seen before there are any."""
    if cut.columns and shape.experts:
        raise cut_experts(base_dtype)
    queries = tuple(heads * shape.head_dim for heads in cut.heads)
    for sizes in (queries, cut.columns) if base_dtype == Nf4.name else ():
        for start, length in zip(accumulate(sizes, initial=0), sizes, strict=False):
            refuse_cut_block(start, length, sum(sizes))


def splits_of(layer: nn.Module, kind: CutKind, where: str) -> Mapping[str, TensorSplit]:
    """How the tensors of a linear are cut: torch's own as is known, any other as it declares.

    Raises UsageError for a layer that says nothing, or nothing of one of its tensors.
    """
    if experts.is_experts(layer):
        return _declared(layer, experts.splits_of(layer), where)
    if type(layer) is nn.Linear:
        return linear_splits(kind)
    if not isinstance(layer, TunedLinear):
        expected = "a torch.nn.Linear itself, or a TunedLinear"
        raise UsageError(
            f"{type(layer).__name__} does not say how it is cut across ranks", where=where, expected=expected
        )
    return _declared(layer, layer.splits(kind), where)


def _declared(layer: nn.Module, declared: Mapping[str, TensorSplit], where: str) -> Mapping[str, TensorSplit]:
    if unsaid := [name for name, _ in layer.named_parameters() if name not in declared]:
        sides = {"expected": ", ".join(declared), "found": ", ".join(unsaid)}
        what = f"`splits` of {type(layer).__name__} does not say how all of its tensors are cut"
        raise UsageError(what, where=where, **sides)
    return declared


def narrow(
    layer: nn.Module,
    own: str,
    split: TensorSplit,
    parts: Sequence[tuple[int, ...]],
    rank: int,
    where: str,
    slices: dict[str, Slice],
    axis: Axis = "tp",
) -> set[str]:
    """Narrow one tensor of `layer`, which is called `where`; returns its full name if it stays whole inside
    the region. parts: features of each rank, of each part where the layer is several."""
    module = layer.get_submodule(own.rpartition(".")[0])
    leaf = own.rpartition(".")[2]
    value = getattr(module, leaf)
    if value is None or split == "after":
        return set()
    if split is None:
        return {f"{where}.{own}"}
    if split == "owner":
        slices[f"{where}.{own}"] = Slice("owner", (), axis)
        if rank:
            _without(module, leaf, value)
        return set()
    if isinstance(split, Member):
        parts, split = [parts[split.number]], split.dim
    dim, number, places = split if isinstance(split, Pieces) else Pieces(split)
    pieces = tuple(tuple(size * places for size in sizes) for sizes in parts) * number
    sizes = tuple(map(sum, zip(*pieces, strict=True)))
    if sum(sizes) != value.shape[dim]:
        sides = {"expected": str(sum(sizes)), "found": f"{value.shape[dim]} in dim {dim}"}
        raise UsageError(
            "the plan's shares do not add up to this tensor's size", where=f"{where}.{own}", **sides
        )
    found = Slice(dim, sizes, axis, pieces if len(pieces) > 1 else ())
    slices[f"{where}.{own}"] = found
    part = _taken(value.detach(), dim, found.spans(rank))
    setattr(module, leaf, nn.Parameter(part, requires_grad=value.requires_grad))
    for count, dim in (("out_features", 0), ("in_features", 1)):
        if leaf == "weight" and hasattr(module, count):
            setattr(module, count, part.shape[dim])
    return set()


def _taken(value: Tensor, dim: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """What lies in `spans`, (first, length) along a dim, one behind the other, in memory of its own."""
    if isinstance(value, QuantisedWeight) and len(spans) > 1 and not dim:
        return QuantisedWeight(value.form.picked(spans), part=True)
    if isinstance(value, QuantisedWeight) and value.dim() == 3 and dim:  # whose columns would be dense
        value.form.narrow(dim, *spans[0])
    own = [value.narrow(dim, first, length) for first, length in spans]
    return torch.cat(own, dim) if len(own) > 1 else own[0].clone()


def _without(module: nn.Module, leaf: str, value: Tensor) -> None:
    """Take out another rank's tensor. Experts add their biases unasked, so zeros stand there."""
    module.register_parameter(leaf, None)
    if experts.is_experts(module):
        del module._parameters[leaf]
        place = torch.device("cpu") if value.is_meta else value.device
        zeros = torch.zeros(value.shape, dtype=value.dtype, device=place)
        module.register_buffer(leaf, zeros, persistent=False)


def module_at(block: nn.Module, path: str, where: str) -> tuple[str, nn.Module]:
    """The module of `block` that a path of the family's table means, with the choice that exists. Raises
    UsageError when none does."""
    found = child_of(block, path)
    if found is None:
        raise UsageError("the family's table names a module that is not there", where=where, expected=path)
    return found
