"""How fast the ranks of a group talk: a small and a large all-reduce, while nothing else is sent."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

LARGE = 2**22  # bytes, as many as the hidden states of a thousand tokens
TIMES = 20


def link_speed(device: torch.device) -> tuple[float, float]:
    """Seconds that a message between neighbours of a ring takes by itself, and bytes/s of large ones. Every
    rank of the group calls it."""
    ranks = dist.get_world_size()
    small, large = (_seconds(torch.zeros(size // 4, device=device)) for size in (4, LARGE))
    sent = 2 * LARGE * (ranks - 1) / ranks
    return small / (2 * (ranks - 1)), sent / max(large - small, 1e-9)


def _seconds(values: torch.Tensor) -> float:
    """The median of some all-reduces."""
    found = []
    for _ in range(TIMES + 3):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[3:])
