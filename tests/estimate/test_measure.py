"""Measuring devices: known seconds give back the device that they were made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from petune.estimate.cluster import Link, scaled
from petune.estimate.forecast import sketch
from petune.estimate.measure import cluster_of, fitted
from petune.estimate.workload import line, workload
from petune.kernels.memory.block_cost import CPU, Rates
from tests.written_recipes import recipe_of


@pytest.mark.parametrize(("speed", "launch"), [(0.5, 1e-5), (3.0, 0.0), (1.0, 1e-4)])
def test_a_device_is_told_by_its_seconds(speed: float, launch: float, tmp_path: Path) -> None:
    work = workload(sketch(recipe_of("llama-causal", tmp_path)))

    def seconds(rates: Rates, rows: int) -> float:
        parts = work.parts(0, len(work.blocks)).elements()
        return sum(
            sum(way)
            for part in parts
            for one in (line(rates, part, rows),)
            for way in (one.forward, one.backward)
        )

    rates = replace(scaled(CPU, speed), launch=launch)
    found = fitted(work, CPU, [(rows, seconds(rates, rows)) for rows in (1, 2, 4)])
    assert found == (pytest.approx(speed), pytest.approx(launch, abs=1e-9))


def test_devices_of_a_machine_are_numbered(tmp_path: Path) -> None:
    facts = [{"preset": "CPU", "speed": speed, "launch": 1e-6, "memory": 2**30} for speed in (2.0, 1.0)]
    fast, slow = cluster_of(facts, Link(1e-4, 1e9)).devices
    assert (fast.name, slow.name) == ("CPU 0", "CPU 1")
    assert fast.rates.matmul == 2 * slow.rates.matmul and fast.memory == 2**30
