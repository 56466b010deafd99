"""How fast the ranks of a group talk: small and large messages of every kind that blocks say, by the way they
would go in a run, while nothing else is sent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from petune.parallel.collectives import Transfer, all_max_
from petune.parallel.copy_engines import CopyEngines
from petune.parallel.link import Link
from petune.parallel.peer_memory import reachable
from petune.parallel.plan import apportion

# bytes of a large message: as many as the hidden states of a thousand tokens, and of a batch on a GPU
LARGE = {"cpu": 2**22, "cuda": 2**26}
TIMES = 9
HIDDEN, UNEVEN = "hidden ", "uneven "  # before the names of messages that may go another way
ROWS = 4  # of a message: parts of one row lie as they are wanted, those of several are copied to be so
FIRST = 3  # times as much has the first rank of what is cut unevenly as any other


def link_speed(device: torch.device) -> dict[str, tuple[float, float]]:
    """Of each kind of message between all ranks: seconds that one between neighbours of a ring takes by
    itself, and bytes/s of large ones, until the last rank goes on, as a block's next region waits for all.
    Every rank calls it, and finds the same.

    Kinds are those of petune.estimate.comm_cost within blocks, `send` between stages, and `gradients`: a sum
    through the group, in place. HIDDEN ones are behind other work, where they go another way.
    """
    group = dist.group.WORLD
    assert group is not None, "the ranks have met"
    link = Link(group, CopyEngines(group, device) if reachable(device, group) else None)
    small, large = (dict(_ways(link, device, size)) for size in (1, LARGE[device.type]))
    pairs = [[_seconds(ways[name][2], device) for ways in (small, large)] for name in small]
    slowest = torch.tensor(pairs, dtype=torch.float64, device=device)
    all_max_([slowest], group)
    found = {}
    for name, (few, many) in zip(small, slowest.tolist(), strict=True):
        found[name] = few / small[name][0], large[name][1] / max(many - few, 1e-9)
    return found


MessageWay = tuple[int, float, Callable[[], object]]  # messages one after the other, bytes that a rank sends


def _ways(link: Link, device: torch.device, size: int) -> Iterator[tuple[str, MessageWay]]:
    """Every kind of message of `size` bytes in all, or the least that it can have. What linked stages send is
    not there: they read it from one another's memory, as a gather does."""
    ranks, own = dist.get_world_size(), dist.get_rank()
    tokens = FIRST + ranks - 1
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = size // dtype.itemsize // (ROWS * tokens * ranks)
    whole = torch.zeros((ROWS, tokens * ranks, max(1, width)))
    whole = whole.to(device, dtype)
    ring, size = ranks - 1, whole.nbytes
    yield "gradients", (2 * ring, 2 * size * ring / ranks, partial(dist.all_reduce, whole))
    apart = link.engines is not None and ranks > 2
    for hidden, by in (("", link), (HIDDEN, replace(link, hidden=True)))[: 1 + apart]:
        # On a GPU fused blocks sum in place; on a CPU what a block has made stays, and is copied first.
        way = partial(by.all_reduce, whole, own=device.type == "cuda")
        yield f"{hidden}all-reduce", (2 * ring, 2 * size * ring / ranks, way)
        for uneven, shares in (("", (1,) * ranks), (UNEVEN, (FIRST, *(1,) * ring))):
            sizes = apportion(tokens * ranks, shares)
            sent, part = ring * size * max(sizes) / sum(sizes), whole[:, : sizes[own]].contiguous()
            name = hidden + uneven
            yield f"{name}all-gather", (ring, sent, partial(by.gather, part, sizes))
            yield f"{name}reduce-scatter", (ring, sent, partial(by.reduce_scatter, whole, sizes))
    piece = whole[:, :tokens].contiguous()
    yield "all-to-all", (ring, ring * piece.nbytes, partial(_trade, link, piece))
    if link.engines is None:
        after, before = (own + 1) % ranks, (own - 1) % ranks
        yield "send", (1, size, lambda: Transfer(whole, tuple(whole.shape), link.group, after, before).wait())


def _trade(link: Link, piece: Tensor) -> None:
    """Give every other rank as much as it gives."""
    others = [rank for rank in range(link.ranks) if rank != dist.get_rank()]
    rooms = {rank: torch.empty_like(piece) for rank in others}
    shapes = dict.fromkeys(others, piece.shape)
    link.swap(dict.fromkeys(others, piece), shapes, piece.dtype, rooms.__getitem__, piece.nbytes, _read)


def _read(parts: Mapping[int, Tensor]) -> None:
    """What has come is not looked at."""


def _seconds(say: Callable[[], object], device: torch.device) -> float:
    """The median of some."""
    found = []
    for _ in range(TIMES + 2):
        dist.barrier()
        began = time.perf_counter()
        say()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])
