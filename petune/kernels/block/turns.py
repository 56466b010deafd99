"""Two halves of a batch go through a block in turns: while what one of them sends is on its way between
ranks, the other computes.

A pass of a block is a generator that stops behind every step that talks to other ranks (`Step.talks`). Such a
step runs on a stream of its own, which first waits for all that was launched before, and the pass goes on
when its turn comes again, once the stream has done it:

    device    A: qkv, attention, out    B: qkv, attention, out    A: norm, MLP     B: norm, MLP
    between                             A: all-reduce             B: all-reduce    A: all-reduce

Nothing that a step on its way reads may be freed meanwhile, so the pass holds it until then. What such a step
makes lies in memory of its stream, which is used again only behind all that was launched before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
InTurns = Generator[None, None, T]  # a pass, and what it gives in the end


class Turns:
    """Where the steps of passes that go in turns talk to other ranks; at once on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _between(device) if device.type == "cuda" else None

    def talk(self, say: Callable[[], None]) -> Iterator[None]:
        """Run a step that talks, let the other pass have its turn, and wait."""
        if self.stream is None:
            say()
            yield
            return
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            say()
        done = self.stream.record_event()
        yield
        current.wait_event(done)


@cache
def _between(device: torch.device) -> torch.cuda.Stream:
    """One stream a device: what ranks say has one order."""
    return torch.cuda.Stream(device)


def alone(steps: InTurns[T]) -> T:
    """What a pass gives that has nobody beside it."""
    (found,) = together(steps)
    return found


def together(*passes: InTurns[T]) -> list[T]:
    """What passes give that go in turns, each as far as to its next step that talks."""
    found: dict[int, T] = {}
    while len(found) < len(passes):
        for at, steps in enumerate(passes):
            if at not in found:
                try:
                    next(steps)
                except StopIteration as end:
                    found[at] = end.value
    return [found[at] for at in range(len(passes))]
