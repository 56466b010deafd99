"""Steps that have become slow are told of once, and only when they stay slow."""

from __future__ import annotations

import pytest

from petune.run.pace import FIRST, STEPS, Pace, crowded


def said(pace: Pace, speeds: list[float]) -> list[str]:
    return [line for speed in speeds if (line := pace.look({"tokens_per_s": speed}))]


def test_a_hundred_slow_steps_are_told_of_once() -> None:
    pace = Pace(several=True)
    assert said(pace, [5.0] + [300.0] * FIRST + [100.0] * (STEPS - 1)) == []
    (line,) = said(pace, [99.0] * 3 * STEPS)
    assert "99 tokens/s, then 300" in line and "petune plan --auto" in line


def test_a_step_at_its_pace_begins_the_count_anew() -> None:
    pace = Pace(several=False)
    assert said(pace, [1.0] + [300.0] * FIRST + ([50.0] * (STEPS - 1) + [200.0]) * 3) == []


def test_the_first_step_sets_no_pace_and_one_process_has_no_plan() -> None:
    pace = Pace(several=False)
    assert said(pace, [9000.0] + [300.0] * FIRST + [150.0] * 2 * STEPS) == []
    (line,) = said(pace, [50.0] * STEPS)
    assert "plan" not in line


@pytest.mark.parametrize(("threads", "load", "told"), [(2, 9.0, True), (1, 9.0, False), (2, 3.9, False)])
def test_threads_on_cores_that_others_use_are_warned_of(
    threads: int, load: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert any("OMP_NUM_THREADS=1" in line for line in crowded()) == told
