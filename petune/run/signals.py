"""SIGTERM, SIGHUP and Ctrl-C stop a run: at once while it is prepared, then at the next safe place, where it
saves. A second Ctrl-C interrupts. An output that nobody reads any more stops it likewise."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from petune.errors import Stopped


def stopping() -> list[signal.Signals]:
    """The signals that stop a run here: SIGHUP, of a terminal that is closed, not under nohup."""
    hung_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hung_up]


class StopAsked(Exception):
    """Unwinds to the loop, which saves and ends the run."""


class StopNow(BaseException):
    """Unwinds a preparation that leaves nothing behind. No Exception: libraries catch those, and a stop is
    none of their errors."""


class StopRequest:
    """Whether a stop has been asked for, and by which signal. `saves`: whether there is a run by now, which
    is saved first."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.cause: OSError | None = None
        self.saves = False
        self.when, self.remedy = "before training began; nothing was written", "start it again"

    def output_lost(self, cause: OSError) -> None:
        """Ask for a stop, as what the run says cannot be delivered any more."""
        self.name, self.cause = self.name or f"the loss of its output ({cause.strerror})", cause

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        if not self.saves:
            raise StopNow
        with suppress(OSError):  # not print: a handler may have interrupted one
            os.write(2, b"stopping after this step, then saving; Ctrl-C again aborts at once\n")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals inside the block, where a process can (its main thread). Raises Stopped for one
        that came in time."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in stopping()}
        try:
            yield
        except StopNow:
            raise Stopped(f"stopped by {self.name} {self.when}", remedy=self.remedy) from self.cause
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def save_first(self) -> None:
        """From here on a signal is heeded at the next `check`, whose caller saves. Raises StopNow for one
        that a library has swallowed."""
        self.saves = True
        if self.name is not None:
            raise StopNow

    def at_once(self, when: str, remedy: str) -> None:
        """Until `save_first` a signal is heeded at once again, as nothing new could be saved. Raises StopNow
        for one that has come."""
        self.when, self.remedy, self.saves = when, remedy, False
        if self.name is not None:
            raise StopNow

    def noted(self) -> Callable[[Callable[[Sequence[bool]], list[bool]]], None]:
        """`check` as things stand now: a signal that comes later is heeded by the next one."""
        name = self.name

        def check(anyone: Callable[[Sequence[bool]], list[bool]]) -> None:
            if anyone([name is not None])[0]:
                raise StopAsked(name or "another process")

        return check

    def check(self, anyone: Callable[[Sequence[bool]], list[bool]] = list) -> None:
        """Raise StopAsked if a stop has been asked for, here or in any process: `anyone` says so, and each of
        them must call this."""
        self.noted()(anyone)
