"""GPU memory in pools of their own, which CUDA graphs have: what a recorded pass keeps lies there between its
replays, and torch counts it neither as allocated nor as free for others. Memory that other GPUs read has such
a pool too, of which little holds no tensor."""

from __future__ import annotations

import torch

COMMON = (0, 0)  # torch's name of the pool that all other tensors share


def private_bytes(device: torch.device) -> int:
    """Bytes of private pools that hold no tensor which torch knows of."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        int(segment["total_size"]) - int(segment["allocated_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != COMMON
    )


def held_bytes(device: torch.device) -> int:
    """Bytes that are held now: what torch has allocated, with private pools."""
    return torch.cuda.memory_allocated(device) + private_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes that were held at once, as far as it is known: what torch saw allocated, or what is held
    now, where that is more. Pools that are gone are not in it."""
    return max(torch.cuda.max_memory_allocated(device), held_bytes(device))
