"""Bytes on a device at the peak of a step's passes, by what holds them.

Weights, gradients and optimizer state are the sizes of their tensors. Activations are what remains of the
peak: all that the passes make and have not freed, so what autograd keeps, the temporary tensors of that
moment, and copies of weights that autocast keeps. On CUDA the peak is that of torch's caching allocator. On
the CPU a `Ledger` takes its place: it counts every storage that an operation returns, from then until it is
freed, and cannot see what a kernel allocates and frees inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from petune.parallel import local
from petune.profiling.repeat_step import Rehearsal
from petune.run.summary import resting


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of this rank's device: frozen + tuned + at_peak + optimizer + activations + other = peak, of the
    forward and backward passes.

    gradients: in all; at_peak: those that are there at the peak. other: batches, caches and workspaces, on
    CUDA alone. update: the peak of clipping and the optimizer's step. reserved: what CUDA's allocator holds
    of the device, 0 on the CPU.
    """

    frozen: int
    tuned: int
    gradients: int
    at_peak: int
    optimizer: int
    activations: int
    other: int
    peak: int
    update: int
    reserved: int


class Ledger(TorchDispatchMode):
    """Bytes of the storages that operations have made while it is entered and that are still alive, and the
    most there ever were."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.device = device
        self.live = self.peak = 0
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata for storage in _storages((args, kwargs), self.device)}
        made = func(*args, **kwargs)
        for storage in _storages(made, self.device):
            # else a view, or a result written into an argument
            if storage._cdata not in given and storage._cdata not in self._held:
                self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def free(_: Any) -> None:
            del self._held[key]
            self.live -= size

        self._held[key] = weakref.ref(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)

    def rest(self) -> None:
        """Let the peak begin anew from what is alive now."""
        self.peak = self.live


def _storages(values: Any, device: torch.device) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if _on(value, device)]


def _on(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device == device and value.layout == torch.strided


class _Arrivals:
    """Bytes of gradients that were there when the peak was last raised; asked at every gradient that is
    ready, and at the end."""

    def __init__(self, tuned: Iterable[nn.Parameter], peak: Callable[[], int]) -> None:
        self.peak, self.highest, self.at_peak = peak, peak(), 0
        self.there: dict[int, int] = {}
        self.handles = [value.register_post_accumulate_grad_hook(self._arrived) for value in tuned]

    def _arrived(self, parameter: Tensor) -> None:
        self.look()
        assert parameter.grad is not None
        self.there[id(parameter)] = local(parameter.grad).nbytes

    def look(self) -> None:
        if (now := self.peak()) > self.highest:
            self.highest, self.at_peak = now, sum(self.there.values())

    def done(self) -> int:
        """Bytes of gradients at the peak."""
        self.look()
        for handle in self.handles:
            handle.remove()
        return self.at_peak


def measure(rehearsal: Rehearsal) -> MemoryUse:
    """The memory of one step. The optimizer must have stepped before, or its state would still be to come."""
    device = rehearsal.runner.mesh.device
    return _on_cuda(rehearsal, device) if device.type == "cuda" else _on_cpu(rehearsal, device)


def _on_cpu(rehearsal: Rehearsal, device: torch.device) -> MemoryUse:
    micro, held = rehearsal.batches(), resting(rehearsal.runner.modules, rehearsal.optimizer, device)
    ledger, rest = Ledger(device), sum(held.values())
    with ledger:
        arrivals = _Arrivals(rehearsal.tuned.values(), lambda: ledger.peak)
        rehearsal.passes(micro)
        there, peak, gradients = arrivals.done(), ledger.peak, _gradients(rehearsal, device)
        ledger.rest()
        rehearsal.update()
    return MemoryUse(**held, gradients=gradients, at_peak=there, activations=peak - there, other=0, peak=rest + peak,
                     update=rest + ledger.peak, reserved=0)  # fmt: skip


def _on_cuda(rehearsal: Rehearsal, device: torch.device) -> MemoryUse:
    micro, held = rehearsal.batches(), resting(rehearsal.runner.modules, rehearsal.optimizer, device)
    torch.cuda.synchronize(device)
    before, rest = torch.cuda.memory_allocated(device), sum(held.values())
    torch.cuda.reset_peak_memory_stats(device)
    arrivals = _Arrivals(rehearsal.tuned.values(), lambda: torch.cuda.max_memory_allocated(device))
    rehearsal.passes(micro)
    there, peak = arrivals.done(), torch.cuda.max_memory_allocated(device)
    gradients = _gradients(rehearsal, device)
    torch.cuda.reset_peak_memory_stats(device)
    rehearsal.update()
    update, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    return MemoryUse(**held, gradients=gradients, at_peak=there, activations=peak - before - there, other=before - rest, peak=peak,
                     update=update, reserved=reserved)  # fmt: skip


def _gradients(rehearsal: Rehearsal, device: torch.device) -> int:
    tuned: Mapping[str, nn.Parameter] = rehearsal.tuned
    return _sum((value.grad for value in tuned.values() if value.grad is not None), device)


def _sum(values: Iterable[Tensor], device: torch.device) -> int:
    return sum(part.nbytes for part in map(local, values) if part.device == device)
