"""A quiet petune: wrap's line is no part of what these tests print."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("petune")
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(level)
