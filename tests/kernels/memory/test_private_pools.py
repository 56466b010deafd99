"""What CUDA graphs hold, by torch's own account of its segments."""

from __future__ import annotations

import pytest
import torch

from petune.kernels.memory.private_pools import peak_bytes, private_bytes

CUDA = torch.device("cuda", 1)


def _segment(device: int, pool: tuple[int, int], total: int, allocated: int) -> dict[str, object]:
    return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        _segment(1, (0, 0), 1000, 200),
        _segment(1, (0, 3), 500, 100),
        _segment(1, (0, 4), 60, 0),
        _segment(0, (0, 3), 9000, 0),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)


@pytest.mark.usefixtures("segments")
def test_private_pools_hold_what_no_tensor_is_known_to() -> None:
    assert private_bytes(CUDA) == 400 + 60


@pytest.mark.usefixtures("segments")
def test_the_peak_has_what_recordings_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for seen, expected in ((700, 760), (800, 800)):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, seen=seen: seen)
        assert peak_bytes(CUDA) == expected
