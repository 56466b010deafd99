"""Pages of a run in progress are told how its ranks are, until it ends or its folder is another run's."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from petune.parallel.launch.beats import Health
from petune.run import rank_health
from petune.run.rank_health import FILE, told

HEARD = [Health(0, 0.0, 4, (0.5, 100, "cpu")), Health(1, 2.5, 3)]


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_health, "EVERY_S", 0.01)
    monkeypatch.setattr(rank_health.process_group, "health", lambda: HEARD)


def wait_for(path: Path) -> None:
    for _ in range(2000):
        if path.exists():
            return
        time.sleep(0.01)
    pytest.fail(f"no {path.name}")


def test_how_ranks_are_is_written_until_the_run_ends(tmp_path: Path) -> None:
    with told(tmp_path, lambda: False):
        wait_for(tmp_path / FILE)
        found = json.loads((tmp_path / FILE).read_text())
        assert found["at"] == pytest.approx(time.time(), abs=60)
        assert [one["rank"] for one in found["ranks"]] == [0, 1]
        assert found["ranks"][0]["work"] == [0.5, 100, "cpu"] and found["ranks"][1]["work"] is None
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_into_a_folder_that_is_lost(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("another run's")
    with told(tmp_path, lambda: True):
        time.sleep(0.1)
    assert (tmp_path / FILE).read_text() == "another run's"


def test_a_folder_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    with told(tmp_path / "gone", lambda: False):
        time.sleep(0.1)
    assert not (tmp_path / "gone").exists()
