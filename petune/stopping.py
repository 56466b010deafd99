"""SIGTERM and Ctrl-C ask a run to stop at the next safe place, where it saves; a second Ctrl-C interrupts as ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType


class StopAsked(Exception):
    """Unwinds to the loop, which saves and ends the run."""


class StopRequest:
    """Whether a stop has been asked for, and by which signal."""

    def __init__(self) -> None:
        self.name: str | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        with suppress(OSError):  # not print: a handler may have interrupted one
            os.write(2, b"stopping after this step, then saving; Ctrl-C again aborts at once\n")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch both signals inside the block, where a process can (its main thread)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self, anyone: Callable[[Sequence[bool]], list[bool]] = list) -> None:
        """Raise StopAsked if a stop has been asked for, here or in any process: `anyone` says so, and each of them must call this."""
        if anyone([self.name is not None])[0]:
            raise StopAsked(self.name or "another process")
