"""Where a method may put a layer: the linears, and the experts, of every block of a family's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from petune.errors import UsageError, nearest
from petune.models.parts import OPTIONAL, Region, Role
from petune.models.spec import Family, StackName, child_of, stack_paths


@dataclass(frozen=True)
class Site:
    """One linear, or all the experts, of one block: the full module name, where it is, what it does, and
    whether it is the region's way out."""

    name: str
    module: nn.Module
    stack: StackName
    block: int
    region: Region
    role: Role
    leaves: bool


def find_sites(model: nn.Module, family: Family) -> tuple[Site, ...]:
    """Every site of `model`, in the order of the blocks.

    Raises UsageError when a region that is not cross-attention, or one of its required roles, is absent from
    a block: the table and the model disagree, and working on would silently leave part of the model out.
    """
    sites: list[Site] = []
    for stack, path in stack_paths(model, family).items():
        rule = family.stacks[stack]
        blocks = model.get_submodule(path)
        for index, block in ((int(name), child) for name, child in blocks.named_children() if name.isdigit()):
            where = f"{path}.{index}"
            for region in rule.regions_in(block):
                sites.extend(_region_sites(block, region, where, stack, index))
    return tuple(sites)


def ends_of(layer: nn.Module) -> tuple[int, int]:
    """Features that the linear of a site reads, and those that it makes: torch.nn.Linear or Conv1D, tuned or
    not."""
    if isinstance(layer, Conv1D):
        inputs, outputs = layer.weight.shape
        return inputs, outputs
    linear = cast("nn.Linear", layer)
    return linear.in_features, linear.out_features


def _region_sites(block: nn.Module, region: Region, where: str, stack: StackName, index: int) -> list[Site]:
    for end in ("enter", "leave"):
        if child_of(block, getattr(region, end)) is None:
            raise _no_module(block, f"the module {region.kind} {end}s by", getattr(region, end), where)
    leave = child_of(block, region.leave)
    found: list[Site] = []
    for role, path in region.sites.items():
        hit = child_of(block, path)
        if hit is None:
            if role in (*OPTIONAL, *region.lacks):  # gated and plain MLPs share a table
                continue
            raise _no_module(block, f"role {role!r} of {region.kind}", path, where)
        found.append(Site(f"{where}.{hit[0]}", hit[1], stack, index, region, role, hit == leave))
    if not any(site.leaves for site in found):
        raise UsageError(
            f"no role of {region.kind} is the module it leaves by", where=where, expected=region.leave
        )
    return found


def _no_module(block: nn.Module, what: str, path: str, where: str) -> UsageError:
    names = [name for name, _ in block.named_modules() if name]
    found = ", ".join(nearest(path, names)) or ", ".join(names[:8])
    return UsageError(f"no module for {what}", where=where, expected=path, found=found)
