"""One logger for the library: plain lines on stderr unless the application has set up logging itself."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TextIO

PATIENCE = 2.0  # seconds that a phase may last in silence

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


def say(line: str) -> None:
    """Tell the user one fact."""
    _prepare()
    _logger.info(line)


def warn(line: str) -> None:
    """Tell the user of something that is allowed but probably not meant."""
    _prepare()
    _logger.warning("warning: %s", line)


@contextmanager
def phase(doing: str) -> Iterator[None]:
    """Say what the block is doing once it has taken PATIENCE seconds, while it goes on. Its time is a debug record of `petune.phases`."""
    late = Timer(PATIENCE, say, [f"{doing} ..."])
    late.daemon = True
    began = time.perf_counter()
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()
        _phases.debug("%s: %.3f s", doing, time.perf_counter() - began)


def human(size: float) -> str:
    """A size in bytes for people, in powers of 1024: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:  # 1000 to 1023 would need a fourth digit
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
