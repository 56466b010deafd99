"""One thread and a quiet petune: the numbers of these tests do not depend on the machine's load, nor their output on wrap's line."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_quiet_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logger = logging.getLogger("petune")
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(level)
    torch.set_num_threads(threads)
