"""One logger for the library: plain lines on stderr unless the application has set up logging itself."""

from __future__ import annotations

import logging

_logger = logging.getLogger("petune")


def _prepare() -> None:
    if not _logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
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


def human(size: float) -> str:
    """A size in bytes for people, in powers of 1024: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:  # 1000 to 1023 would need a fourth digit
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
