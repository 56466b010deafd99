"""What turns passes of a stack into something that does the same again: CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from petune.errors import PetuneError

Replay = Callable[[], None]


class NotRecorded(RuntimeError):
    """A pass that has run cannot be recorded."""


@contextmanager
def _nothing_freed() -> Iterator[None]:
    """Garbage is collected before and not during: graphs and memory of another model, which a capture forbids
    to free, would end the process."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CudaRecorder:
    """CUDA graphs of passes of a stack on one device, which share a pool of memory and so must not be
    replayed between each other's two passes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def refusal(self) -> str | None:
        """Why nothing can be recorded or replayed at this moment, or None."""
        if torch.cuda.is_current_stream_capturing():
            return "the call is part of another CUDA graph"
        if torch.cuda.current_stream(self.device) != torch.cuda.default_stream(self.device):
            return "the call is not on the default stream"
        return None

    def record(self, *passes: Replay) -> list[Replay]:
        """Passes that follow one another again, over the memory they are recorded on. All run once before, so
        that kernels are compiled, which a capture cannot. Raises NotRecorded where one cannot be recorded,
        and what the passes raise where they are tried."""
        with torch.cuda.device(self.device):
            for run in passes:
                run()
            with _nothing_freed():
                return [self._captured(run) for run in passes]

    def _captured(self, run: Replay) -> Replay:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                run()
        except (RuntimeError, PetuneError) as error:
            torch.cuda.set_stream(stream)  # a capture that cannot end leaves its own
            raise NotRecorded(str(error.__context__ or error)) from error  # what it could not end for
        return graph.replay
