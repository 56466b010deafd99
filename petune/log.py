"""One logger for the library: plain lines on stderr unless the application has set up logging itself."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Timer
from typing import TextIO

PATIENCE = 2.0  # seconds that a phase may last in silence
# What a terminal obeys or hides: the control characters but line end and tab, marks and overrides of
# direction, other line ends, halves of surrogate pairs (a file name that is not UTF-8 has some, and cannot be
# printed).
_OBEYED = (
    *range(0x09),
    *range(0x0B, 0x20),
    *range(0x7F, 0xA0),
    0x061C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
)
_ESCAPED = {
    code: chr(code).encode("unicode_escape").decode() for code in (*_OBEYED, *range(0xD800, 0xE000), 0xFEFF)
}

_logger = logging.getLogger("petune")
_phases = logging.getLogger("petune.phases")


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is now: a progress bar puts itself there to keep other lines above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _prepare() -> None:
    if not _logger.handlers and not logging.getLogger().handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False


def printable(text: str) -> str:
    """`text` with everything a terminal would obey written out (`\\x1b`): labels, names and errors of
    libraries come from anywhere."""
    return text.translate(_ESCAPED)


def open_closed_streams() -> None:
    """Let standard input, output and error be the null device where this process was started without them
    (`>&-`): Python has no object for one that is closed, and the next file that is opened would get its
    number, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(nowhere, number)
                os.close(nowhere)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            stream = open(  # noqa: SIM115 - it lasts as long as the process
                number, mode, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def say(line: str) -> None:
    """Tell the user one fact."""
    _prepare()
    _logger.info("%s", printable(line))


def warn(line: str) -> None:
    """Tell the user of something that is allowed but probably not meant."""
    _prepare()
    _logger.warning("warning: %s", printable(line))


@contextmanager
def lines_once() -> Iterator[None]:
    """Within the block each line is told once, however often the work that says it is done."""
    told = set[str]()

    def fresh(record: logging.LogRecord) -> bool:
        line = record.getMessage()
        known = line in told
        told.add(line)
        return not known

    _logger.addFilter(fresh)
    try:
        yield
    finally:
        _logger.removeFilter(fresh)


@contextmanager
def phase(doing: str) -> Iterator[None]:
    """Say what the block is doing once it has taken PATIENCE seconds, while it goes on, and at its end how
    long it took then. The time of any phase is a debug record of `petune.phases`."""
    told = Event()

    def tell() -> None:
        told.set()
        say(f"{doing} ...")

    late = Timer(PATIENCE, tell)
    late.daemon = True
    began = time.perf_counter()
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()
        took = time.perf_counter() - began
        _phases.debug("%s: %.3f s", doing, took)
    if told.is_set():
        say(f"{doing}: {took:.1f} s")


def human(size: float) -> str:
    """A size in bytes for people, in powers of 1024: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:  # 1000 to 1023 would need a fourth digit
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
