"""How long a step takes, phase by phase, and each module's forward in it: medians over repetitions.

On CUDA a module's time lies between two events in the stream, so nothing waits for the device while it is
measured; on the CPU between two readings of the clock. Phases end when the device has done all its work.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from petune.profiling.attribution import in_backward, watching
from petune.profiling.repeat_step import Rehearsal

Moment = float | torch.cuda.Event


@dataclass(frozen=True)
class Timing:
    """Median seconds of a step under no instrument: making its batches, forward and backward, clipping and
    the optimizer's step."""

    steps: int
    batches: float
    passes: float
    update: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.batches + self.passes + self.update


def timing(rehearsal: Rehearsal, steps: int) -> Timing:
    """The phases of `steps` repetitions."""
    cuda = rehearsal.runner.mesh.device.type == "cuda"
    found: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def lasting(phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize()
        found[phase].append(time.perf_counter() - began)

    for _ in range(steps):
        with lasting("batches"):
            micro = rehearsal.batches()
        with lasting("passes"):
            rehearsal.passes(micro)
        with lasting("update"):
            rehearsal.update()
    return Timing(steps, **{phase: statistics.median(seconds) for phase, seconds in found.items()})


@dataclass(frozen=True)
class Forward:
    """A module's forward passes in one step: seconds in all, and how many there are."""

    seconds: float
    calls: int


@dataclass
class _Stopwatch:
    """The forward passes of modules in one step, what is recomputed in the backward pass left out."""

    cuda: bool
    open: list[tuple[str, Moment] | None] = field(default_factory=list)
    closed: list[tuple[str, Moment, Moment]] = field(default_factory=list)

    def now(self) -> Moment:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def enter(self, path: str) -> None:
        self.open.append(None if in_backward() else (path, self.now()))

    def leave(self) -> None:
        begun = self.open.pop()
        if begun is not None:
            self.closed.append((*begun, self.now()))

    def read(self) -> dict[str, Forward]:
        """What there was, by path."""
        if self.cuda:
            torch.cuda.synchronize()
        spans: dict[str, list[float]] = defaultdict(list)
        for path, start, end in self.closed:
            spans[path].append(_between(start, end))
        return {path: Forward(sum(seconds), len(seconds)) for path, seconds in spans.items()}


def _between(start: Moment, end: Moment) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3


def forward_times(rehearsal: Rehearsal, steps: int) -> dict[str, Forward]:
    """Every module that runs, by path, over `steps` repetitions."""
    modules: Sequence[nn.Module] = rehearsal.runner.modules
    found: dict[str, list[Forward]] = defaultdict(list)
    for _ in range(steps):
        watch = _Stopwatch(rehearsal.runner.mesh.device.type == "cuda")
        with watching(modules, watch.enter, watch.leave):
            rehearsal.passes(rehearsal.batches())
        for path, one in watch.read().items():
            found[path].append(one)
        rehearsal.update()
    return {
        path: Forward(statistics.median(one.seconds for one in those), those[-1].calls)
        for path, those in found.items()
    }
