"""What tests of fused blocks share."""

from __future__ import annotations

import pytest

from petune.kernels.block.attention import How
from petune.kernels.block.module import FusedBlock


@pytest.fixture
def hows(monkeypatch: pytest.MonkeyPatch) -> list[How]:
    """How blocks attend, in the order of their calls."""
    seen: list[How] = []
    monkeypatch.setattr(
        FusedBlock, "hows", lambda *args, own=FusedBlock.hows: (seen.extend(made := own(*args)), made)[1]
    )
    return seen
