"""Process groups that outlive the connections behind them: after a rank was replaced, whatever holds one
holds the new group.

Modules, hooks and pipeline stages hold the groups of their mesh. torch can end a group and make another, but
not one that is the same object; this one passes every call on to torch's group of the moment. It is used only
where ranks may be replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

_OWN = ("rank", "size", "boxed", "unbox", "_id", "_pybind11_conduit_v1_")  # of the object itself
_all: WeakSet[LastingGroup] = WeakSet()


class LastingGroup(dist.ProcessGroup):
    """torch's group `now`, which can be exchanged for another of the same ranks."""

    def __init__(self, now: dist.ProcessGroup) -> None:
        super().__init__(now.rank(), now.size())  # type: ignore[call-arg]  # without a store: this one connects nothing
        self.now: dist.ProcessGroup | None = None
        self.refuses = False
        self.renew(now)
        _all.add(self)

    def renew(self, now: dist.ProcessGroup) -> None:
        """Stand for `now` from here on."""
        world = dist.distributed_c10d._world
        world.pg_map[self], world.pg_group_ranks[self] = world.pg_map[now], world.pg_group_ranks[now]
        self.now, self.refuses = now, False

    @property
    def _device_types(self) -> Any:
        return self._group()._device_types

    @property
    def group_name(self) -> Any:
        """The name of torch's group."""
        return self._group().group_name

    def _group(self) -> dist.ProcessGroup:
        if self.now is None or self.refuses:
            raise RuntimeError("ProcessGroup: a rank was lost, and the group is not made anew yet")
        return self.now


def _passing_on(name: str) -> Callable[..., Any]:
    def pass_on(self: LastingGroup, *values: Any, **named: Any) -> Any:
        return getattr(self._group(), name)(*values, **named)

    return pass_on


# every collective, by whatever name this version of torch calls it
for _name, _method in vars(dist.ProcessGroup).items():
    if (
        callable(_method)
        and not _name.startswith("__")
        and not isinstance(_method, type)
        and _name not in _OWN
    ):
        setattr(LastingGroup, _name, _passing_on(_name))


def refuse() -> None:
    """Let no collective begin on groups that are about to be aborted."""
    for group in list(_all):
        group.refuses = True


def release() -> None:
    """Let go of torch's groups, so that ending them closes their connections and frees whoever waits there
    for this rank."""
    for group in _all:
        group.now = None
