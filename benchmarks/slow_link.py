"""A slow link between the ranks of a group, without leave to change the machine's network.

    with slow_link(100e6, 1e-3):  # bytes a second, and seconds before the first of them
        dist.all_reduce(x)

What ranks say goes its own way first, so it is what it would be, and begins when all who take part are there.
Then it is on its way as long as a ring over such a link would take: its messages one after the other, each
with the latency, and the bytes that a rank sends. Several at once share the link, one behind the other. Until
then nobody who waits for it is told that it has come; the processor is free meanwhile. A message to one rank
is late where it is received. Only what this process says through torch.distributed is slowed, by its Python
interface, and barriers are not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

Sent = Callable[[int, Any], tuple[int, float]]  # ranks, arguments -> messages, bytes that a rank sends


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else sum(map(_bytes, value))


def _round(ranks: int, values: tuple[Any, ...], whole: int) -> tuple[int, float]:
    """A ring that goes round once with the argument `whole`, of which each rank has an equal part."""
    return ranks - 1, _bytes(values[whole]) * (ranks - 1) / ranks


def _twice(ranks: int, values: tuple[Any, ...]) -> tuple[int, float]:
    messages, size = _round(ranks, values, 0)
    return 2 * messages, 2 * size


def _lists(ranks: int, values: tuple[Any, ...], parts: int) -> tuple[int, float]:
    """The same with the list of parts in the argument `parts`: as slow as its longest."""
    return ranks - 1, (ranks - 1) * max(map(_bytes, values[parts][0]))


def _once(ranks: int, values: tuple[Any, ...]) -> tuple[int, float]:
    return 1, _bytes(values[0])


# by the names of the methods in torch 2.13, and before
SENT: Mapping[str, Sent] = {
    "allreduce": _twice,
    "all_gather_single": lambda ranks, values: _round(ranks, values, 0),
    "_allgather_base": lambda ranks, values: _round(ranks, values, 0),
    "allgather": lambda ranks, values: _lists(ranks, values, 0),
    "reduce_scatter_single": lambda ranks, values: _round(ranks, values, 1),
    "_reduce_scatter_base": lambda ranks, values: _round(ranks, values, 1),
    "reduce_scatter": lambda ranks, values: _lists(ranks, values, 1),
    "all_to_all_single": lambda ranks, values: _round(ranks, values, 1),
    "alltoall_base": lambda ranks, values: _round(ranks, values, 1),
    "broadcast": _once,
    "recv": _once,
}


@contextmanager
def slow_link(bandwidth: float, latency: float = 0.0) -> Iterator[None]:
    """Let all that this process says take its time, for the length of the block."""
    wire, kept = _Wire(bandwidth, latency), {name: vars(ProcessGroup).get(name) for name in SENT}
    for name, method in kept.items():
        if method is not None:
            setattr(ProcessGroup, name, _slow(getattr(ProcessGroup, name), SENT[name], wire))
    try:
        yield
    finally:
        for name, method in kept.items():
            if method is not None:
                setattr(ProcessGroup, name, method)


def _slow(method: Callable[..., Any], sent: Sent, wire: _Wire) -> Callable[..., Any]:
    @wraps(method)
    def slow(group: ProcessGroup, *values: Any, **more: Any) -> Any:
        work = method(group, *values, **more)
        return Late(work, wire, *sent(group.size(), values)) if group.size() > 1 else work

    return slow


class _Wire:
    """The link as this process sees it: until when it is taken."""

    def __init__(self, bandwidth: float, latency: float) -> None:
        self.bandwidth, self.latency = bandwidth, latency
        self.lock, self.free = threading.Lock(), 0.0

    def arrival(self, messages: int, size: float) -> float:
        """When that is there which is sent now."""
        with self.lock:
            self.free = max(self.free, time.monotonic()) + size / self.bandwidth
            return self.free + messages * self.latency


class Late:
    """torch's work that is done later. A thread of its own waits for it, so that it is on its way while
    whoever has asked for it computes."""

    def __init__(self, work: Any, wire: _Wire, messages: int, size: float) -> None:
        self.work, self.wire, self.messages, self.size = work, wire, messages, size
        self.there, self.error = threading.Event(), None
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        try:
            self.work.wait()
            time.sleep(max(0.0, self.wire.arrival(self.messages, self.size) - time.monotonic()))
        except BaseException as error:  # it is whoever waits for the work who is to know
            self.error: BaseException | None = error
        self.there.set()

    def wait(self, timeout: Any = None) -> bool:
        """See torch.distributed.Work; raises what the work itself does."""
        self.there.wait()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """See torch.distributed.Work."""
        return self.there.is_set()
