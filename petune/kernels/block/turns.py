"""Two halves of a batch go through fused blocks in turns: while what one of them sends is on its way between
ranks, the other computes.

A pass of blocks is a generator that stops behind every step that talks to other ranks (`Step.talks`). Such a
step runs on a stream of its own, which first waits for all that was launched before, and the pass goes on
when its turn comes again, once the stream has done it:

    device    A: qkv, attention, out    B: qkv, attention, out    A: norm, MLP     B: norm, MLP
    between                             A: all-reduce             B: all-reduce    A: all-reduce

A sum over ranks needs a kernel between its two messages, the terms and the parts of the sum. On the stream
between, it would wait until a large product of the other half has left the device. So the message leaves it
to the pass (`later`), which adds up on its own stream as its turn comes, and says the rest then. Where ranks
say two things with so little between, passes also stop behind their first product after them, and one of them
has gone two turns when the other begins; what is in brackets is on its way still:

    device    A: attention, out    B: qkv      A: sum, norm    B: attention, out    A: up        B: sum, norm
    between   (B: parts)           A: terms    (A: terms)      A: parts             B: terms     (B: terms)

Nothing that a step on its way reads may be freed meanwhile, so the pass holds it until then. What such a step
makes lies in memory of its stream, which is used again only behind all that was launched before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import TypeVar

import torch

T = TypeVar("T")
InTurns = Generator[None, None, T]  # a pass, and what it gives in the end
# what is left of a message, to be done on the stream of the pass: gives what is to be said after it, or None
Ending = Callable[[], "Callable[[], None] | None"]

_left: ContextVar[list[Ending] | None] = ContextVar("what is left of a message", default=None)


def later() -> list[Ending] | None:
    """Where whoever talks may leave the end of a message; None where nobody would come back for it."""
    return _left.get()


def then(work: Callable[[], object]) -> None:
    """Do `work` on what a message brings: now, or once its end has been done too."""
    if (left := later()) is None:
        work()
    else:
        left.append(partial(_only, work))


def _only(work: Callable[[], object]) -> None:
    work()


class Turns:
    """How one pass takes turns with another, where its steps talk to other ranks; at once on a CPU. split:
    whether it stops behind its first product after it has talked, too."""

    def __init__(self, device: torch.device, split: bool = False) -> None:
        self.stream = _between(device) if device.type == "cuda" else None
        self.split, self.stopped = split, False

    def talk(self, say: Callable[[], None]) -> Iterator[None]:
        """Run a step that talks, let the other pass have its turn, and wait; again for what it says later."""
        left: list[Ending] = []
        yield from self._said(say, left)
        while left:
            if (rest := left.pop(0)()) is not None:
                yield from self._said(rest, left)
        self.stopped = False

    def stop(self) -> Iterator[None]:
        """Let the other pass have its turn behind a product, if it is the first one since this has talked."""
        if self.split and not self.stopped:
            self.stopped = True
            yield

    def _said(self, say: Callable[[], None], left: list[Ending]) -> Iterator[None]:
        """Run `say` on the stream between passes, let the other pass have its turn, and wait."""
        if self.stream is None:
            _leaving(say, left)
            yield
            return
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            _leaving(say, left)
        done = self.stream.record_event()
        yield
        current.wait_event(done)


def _leaving(say: Callable[[], None], left: list[Ending]) -> None:
    token = _left.set(left)
    try:
        say()
    finally:
        _left.reset(token)


@cache
def _between(device: torch.device) -> torch.cuda.Stream:
    """One stream a device: what ranks say has one order."""
    return torch.cuda.Stream(device)


def join(device: torch.device) -> None:
    """Let the current stream wait for the one between passes, where these have ended by an error: what is
    being captured has to end on one stream."""
    if device.type == "cuda":
        with suppress(RuntimeError):  # nothing was said in this capture yet
            torch.cuda.current_stream(device).wait_stream(_between(device))


def alone(steps: InTurns[T]) -> T:
    """What a pass gives that has nobody beside it."""
    (found,) = together(steps)
    return found


def together(*passes: InTurns[T], ahead: int = 0) -> list[T]:
    """What passes give that go in turns, the first of them so many turns ahead of the others."""
    found: dict[int, T] = {}

    def turn(at: int) -> None:
        if at not in found:
            try:
                next(passes[at])
            except StopIteration as end:
                found[at] = end.value

    for _ in range(ahead):
        turn(0)
    while len(found) < len(passes):
        for at in range(len(passes)):
            turn(at)
    return [found[at] for at in range(len(passes))]
