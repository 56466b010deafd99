"""Memory of one GPU that the other GPUs of its host read, by their copy engines and without a word from its
owner: torch's symmetric memory.

For what never changes this is the cheapest way to gather. An all-gather of NCCL keeps processors of the GPU
busy that products beside it then lack: on four H200s a gather of 384 MiB, 4.1 ms long, takes 1.5 ms from the
products beside it, and one by copy engines, 4.6 ms long, 0.6 ms (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from petune.log import say
from petune.parallel.collectives import gather_dim, least_of

ALIGNED = 256  # bytes


def aligned(nbytes: int, by: int = ALIGNED) -> int:
    """Bytes from where one tensor begins to where the next one may."""
    return -(-nbytes // by) * by


def reachable(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether the GPUs of all ranks of `group` can read one another's memory, the same on every rank.

    They can on one host where each process sees all of them and they are linked, and where the system lets
    one process map another's memory: containers may forbid it, so it is tried. All ranks must call this.
    """
    return device.type == "cuda" and _reach(device, group)


def _reach(device: torch.device, group: dist.ProcessGroup) -> bool:
    host = f"{socket.gethostname()} {os.environ.get('CUDA_VISIBLE_DEVICES')}"
    own = torch.tensor([[zlib.crc32(host.encode()), torch.cuda.current_device()]], device=device)
    if not _linked(gather_dim(own, (1,) * group.size(), 0, group).tolist()):
        return False
    try:
        mapped(ALIGNED, device, group)
        mapping = 1
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        mapping = 0
        say(f"linked GPUs send by NCCL, as this process may not map the others' memory: {error}")
    return least_of([mapping], device, group) == [1]


def _linked(ranks: Sequence[Sequence[int]]) -> bool:
    """Whether so many different GPUs are on one host and linked. ranks: the host and the GPU of each."""
    hosts, devices = (set(values) for values in zip(*ranks, strict=True))
    if len(hosts) > 1 or len(devices) < len(ranks):
        return False
    return all(
        torch.cuda.can_device_access_peer(one, other) for one in devices for other in devices if one != other
    )


class PeerMemory:
    """A place for tensors of the same sizes on every rank of `group`, which all ranks read. All ranks must
    make it together; what its tensors hold must not change once another rank may read it."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        ends = list(accumulate(aligned(value.nbytes) for value in tensors))
        self.spans = [
            slice(start, start + value.nbytes) for start, value in zip([0, *ends[:-1]], tensors, strict=True)
        ]
        self.rank, self.ranks = group.rank(), group.size()
        self.own, self.of = mapped(ends[-1], tensors[0].device, group)
        for value, span in zip(tensors, self.spans, strict=True):
            place = self.own[span].view(value.dtype).view(value.shape)
            place.copy_(value)
            value.data = place

    def places(self, whole: Tensor, number: int) -> list[tuple[Tensor, Tensor]]:
        """Where every rank's rows of the tensor of that number lie in its `whole`, and where they are read,
        beginning with this rank: so not all read from the same one at the same time. They stay where they are
        though the whole's memory is freed and taken again."""
        flat, span, found = whole.view(-1).view(torch.uint8), self.spans[number], []
        for step in range(self.ranks):
            peer = (self.rank + step) % self.ranks
            part = self.of[peer][span]
            found.append((flat[peer * len(part) :][: len(part)], part))
        return found


def mapped(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Sequence[Tensor]]:
    """`size` bytes on `device`, and the memory of every rank of `group` that was made in the same call.

    Each has a pool of its own. From torch's pool for all of them, memory that one rank has freed and another
    one has not, as garbage is collected at different times, would be taken again by the one alone: its tensor
    would stand for memory of another call, or ranks would wait for one another for ever.
    """
    made = torch.tensor([_made], device=device)
    most = int(gather_dim(made, (1,) * group.size(), 0, group).max())
    while _made < most:
        _meet(ALIGNED, device, _alone(cast("dist.ProcessGroup", dist.group.WORLD)))
    own, pool, handle = _meet(size, device, group.group_name)
    every = MappedMemory(handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size()))
    every.pool = pool
    return own, every


# How often this process has met others, of whatever group. torch counts what is said as they meet, as much in
# every group, and looks for a group's ranks where its own count stands: they wait for ever for one that has
# met others more often, as the ranks of a stage do that make larger rooms. So those behind meet nobody until
# they are as far.
_made = 0


@lru_cache(1)
def _alone(world: dist.ProcessGroup) -> str:
    """The name of a group of this rank alone, in this world, where it meets nobody."""
    group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    name: str = group.group_name
    return name


def _meet(size: int, device: torch.device, group: Any) -> tuple[Tensor, Any, Any]:
    """`size` bytes in a pool of their own, and torch's handle to those of all ranks of a named group."""
    global _made
    # multicast, which nobody needs here: groups would say more or less about it
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric  # takes a while, and only GPUs have it

    # not split: a buffer of another rank begins where its segment does
    pool = torch.cuda.MemPool(symmetric.get_mempool_allocator(device), no_split=True)
    with torch.cuda.use_mem_pool(pool, device):
        own = torch.empty(size, dtype=torch.uint8, device=device)
    _made += 1
    return own, pool, symmetric.rendezvous(own, group)


class MappedMemory(list[Tensor]):
    """The memory of every rank. pool: of this rank's, which goes back to the GPU where the pool is let go
    after it, and else stays in torch's cache."""

    pool: Any = None
