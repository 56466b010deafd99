"""Ranks of one host whose GPUs reach one another's memory, and what they need to talk there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from petune.parallel.cuda_driver import CudaDriver
from petune.parallel.peer_memory import mapped


class Linked:
    """The ranks of `group`, of which peer_memory.reachable says so. All of them make it together."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.ranks = group.rank(), group.size()
        self.driver = self._driver()

    def _driver(self) -> CudaDriver:
        return CudaDriver(self.device)

    def _shared(self, size: int) -> tuple[Tensor, Sequence[Tensor]]:
        """Bytes, of any value, that all ranks reach: this rank's, and those of each. All ask together."""
        return mapped(size, self.device, self.group)

    def _flags(self, count: int) -> tuple[Tensor, Sequence[Tensor]]:
        """The same of `count` numbers of 32 bits, which are 0."""
        own, every = self._shared(4 * count)
        own.zero_()
        self._together()
        return own, every

    def _together(self) -> None:
        """Wait on the host until all devices have done everything."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
