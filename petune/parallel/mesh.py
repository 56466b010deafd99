"""The ranks of a run as a mesh of three axes, pp x dp x tp, and this rank's place in it.

Where replicas share experts, dp is two axes in one, edp x ep.

`tp` is the axis along which blocks are cut, whatever the row of the table (tp, sp, galaxy ...). It varies
fastest, so that its ranks are neighbours on one host; pp varies slowest. An axis of size 1 has no group, and
whoever communicates along it does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from petune.errors import DistributedError
from petune.parallel.copy_engines import CopyEngines
from petune.parallel.launch import process_group as group
from petune.parallel.launch.lasting import LastingGroup
from petune.parallel.peer_memory import reachable
from petune.parallel.plan import ALONE, ParallelPlan

# the ranks of dp are those of edp times those of ep: replicas with the same experts, and some that share them
Axis = Literal["pp", "dp", "tp", "edp", "ep"]
AXES: tuple[Axis, ...] = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Coordinate:
    """A rank's place along each axis; ep: among the replicas that share the experts."""

    pp: int = 0
    dp: int = 0
    tp: int = 0
    ep: int = 0


def coordinate(plan: ParallelPlan, rank: int) -> Coordinate:
    """The place of world rank `rank`."""
    rest, tp = divmod(rank, plan.tp)
    pp, dp = divmod(rest, plan.dp)
    return Coordinate(pp, dp, tp, dp % plan.ep)


@dataclass(frozen=True)
class Mesh:
    """This rank in a plan. `groups` has the process group of each axis larger than 1; `devices` is torch's
    own mesh, for FSDP2."""

    plan: ParallelPlan
    rank: int
    at: Coordinate
    device: torch.device
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    devices: DeviceMesh | None = None

    def size(self, axis: Axis) -> int:
        """Ranks along `axis`."""
        return int(getattr(self.plan, axis))

    def index(self, axis: Axis) -> int:
        """This rank's place along `axis`."""
        return int(getattr(self.at, axis))

    @cached_property
    def engines(self) -> CopyEngines | None:
        """The copy engines by which the ranks of tp talk; None where these are not `linked`. All of them must
        ask together."""
        return CopyEngines(self.groups["tp"], self.device) if self.linked("tp") else None

    def linked(self, axis: Axis) -> bool:
        """Whether the ranks along an axis talk through one another's memory. Not where ranks may be replaced:
        what waits for a lost one there never ends. All of them must ask together."""
        among = self.groups[axis]
        return not isinstance(among, LastingGroup) and reachable(self.device, among)

    @property
    def main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0


def alone(device: torch.device) -> Mesh:
    """The mesh of a single process, which communicates with nobody."""
    return Mesh(ALONE, 0, Coordinate(), device)


def make_mesh(plan: ParallelPlan, device: torch.device) -> Mesh:
    """The mesh of `plan` over the process group that exists. Raises DistributedError when it has another
    number of ranks.

    Where ranks may be replaced its groups are lasting ones, and torch's mesh, which would keep old
    connections open, is left out; but for FSDP, whose parameters hold torch's own.
    """
    if plan.world == 1:
        return alone(device)
    if (found := dist.get_world_size()) != plan.world:
        raise DistributedError(
            "the plan is for another number of processes", expected=str(plan.world), found=str(found)
        )
    rank, (devices, groups) = dist.get_rank(), _cut_axes(plan, device)
    if group.replaces() and plan.sharding is None:
        lasting = {axis: LastingGroup(now) for axis, now in groups.items()}
        return Mesh(plan, rank, coordinate(plan, rank), device, lasting)
    return Mesh(plan, rank, coordinate(plan, rank), device, groups, devices)


def renew(mesh: Mesh) -> None:
    """Let the groups of `mesh`, wherever they are held, stand for those of the new process group."""
    for axis, now in _cut_axes(mesh.plan, mesh.device)[1].items():
        lasting = mesh.groups[axis]
        assert isinstance(lasting, LastingGroup)
        lasting.renew(now)


def _cut_axes(plan: ParallelPlan, device: torch.device) -> tuple[DeviceMesh, dict[str, dist.ProcessGroup]]:
    """torch's mesh, and the group of each axis larger than 1."""
    sizes = (plan.pp, plan.dp, plan.tp)
    devices = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    groups: dict[str, dist.ProcessGroup] = {
        axis: devices.get_group(axis) for axis, size in zip(AXES, sizes, strict=True) if size > 1
    }
    if plan.ep > 1:
        groups["ep"] = groups["dp"]
    if plan.ep > 1 and plan.edp > 1:
        names = ("pp", "edp", "ep", "tp")
        experts = init_device_mesh(device.type, (plan.pp, plan.edp, plan.ep, plan.tp), mesh_dim_names=names)
        groups |= {axis: experts.get_group(axis) for axis in ("edp", "ep")}
    group.limit(groups.values())
    return devices, groups
