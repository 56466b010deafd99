"""Measuring devices: known seconds give back the device that they were made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from petune.estimate.cluster import LinkSpeed, scaled
from petune.estimate.forecast import sketch
from petune.estimate.measure import _half, _runner, cluster_of, fitted, link_of
from petune.estimate.part_seconds import line
from petune.estimate.rank_shares import share_of
from petune.estimate.workload import workload
from petune.kernels.memory.block_cost import CPU
from petune.parallel import link_speed as link_speed_module
from petune.parallel.link import Link as Talk
from petune.parallel.link_speed import link_speed
from petune.parallel.plan import Cut
from tests.pool import run
from tests.written_recipes import recipe_of


@pytest.mark.parametrize(
    ("speed", "traffic", "launch"), [(0.5, 0.5, 1e-5), (3.0, 3.0, 0.0), (1.0, 1.0, 1e-4), (2.0, 0.25, 1e-5)]
)
def test_a_device_is_told_by_its_seconds(speed: float, traffic: float, launch: float, tmp_path: Path) -> None:
    drawn = sketch(recipe_of("llama-causal", tmp_path))
    work, half = workload(drawn), _half(drawn)
    assert half is not None
    rates = replace(scaled(CPU, speed), launch=launch, memory=CPU.memory * traffic)

    def seconds(rows: int, cut: Cut | None) -> float:
        found = 0.0
        for part in work.parts(0, len(work.blocks)).elements():
            one, share = line(rates, part, rows), share_of(part, cut, 0)
            found += sum(fixed + share * slope for fixed, slope in (one.forward, one.backward))
        return found

    points = [(rows, None, seconds(rows, None)) for rows in (1, 2, 4)]
    if speed == traffic:
        found = fitted(work, CPU, points)
        assert found == (pytest.approx(speed), pytest.approx(traffic), pytest.approx(launch, abs=1e-9))
    points += [(rows, half[0], seconds(rows, half[0])) for rows in (1, 4)]
    found = fitted(work, CPU, points)
    assert found == (
        pytest.approx(speed, rel=0.01),
        pytest.approx(traffic, rel=0.01),
        pytest.approx(launch, abs=1e-7),
    )


def test_seconds_that_fit_no_device_give_one_rate(tmp_path: Path) -> None:
    """A half that took longer than the whole, as the machine did something else."""
    drawn = sketch(recipe_of("llama-causal", tmp_path))
    work, half = workload(drawn), _half(drawn)
    assert half is not None
    points = [(1, None, 1.0), (2, None, 2.0), (4, None, 4.0), (1, half[0], 9.0), (4, half[0], 1.0)]
    speed, traffic, launch = fitted(work, CPU, points)
    assert speed == traffic > 0 and launch >= 0


@pytest.mark.parametrize("name", ["llama-causal", "t5-seq2seq"])
def test_a_half_of_the_blocks_runs_alone(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(name, tmp_path, batch_size=2)
    drawn = sketch(recipe, 2, "cpu")
    half = _half(drawn)
    assert half is not None
    weights = [sum(value.numel() for value in one.parameters()) for one in (half[1], drawn.model)]
    assert weights[0] < 0.75 * weights[1]
    _runner(drawn, half[1], torch.device("cpu"))(2)
    assert _half(sketch(recipe_of("gpt2-causal", tmp_path))) is None, "its linears are not cut"


def test_devices_of_a_machine_are_numbered(tmp_path: Path) -> None:
    facts = [
        {"preset": "CPU", "speed": speed, "traffic": 1.0, "launch": 1e-6, "memory": 2**30}
        for speed in (2.0, 1.0)
    ]
    fast, slow = cluster_of(facts, LinkSpeed(1e-4, 1e9)).devices
    assert (fast.name, slow.name) == ("CPU 0", "CPU 1")
    assert fast.rates.matmul == 2 * slow.rates.matmul and fast.rates.memory == slow.rates.memory
    assert fast.memory == 2**30


def test_every_kind_of_message_is_measured_as_blocks_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed_module, "LARGE", {"cpu": 2**18})
    monkeypatch.setattr(link_speed_module, "TIMES", 1)
    own, other = run(2, link_speed, torch.device("cpu"))
    assert own.keys() == other.keys()
    link = link_of(own)
    assert link.bandwidth == own["gradients"][1] and all(rate > 0 for _, rate in own.values())
    for kind in ("all-reduce", "all-gather", "uneven reduce-scatter", "all-to-all", "send"):
        assert link.of(kind) == LinkSpeed(*own[kind])
    assert link.of("hidden uneven all-gather") == link.of("uneven all-gather")
    assert link.of("slice") is link and link.of("hidden all-reduce") == link.of("all-reduce")


def told_by_a_slow_rank() -> tuple[dict[str, tuple[float, float]], bool, bool]:
    """What is found where the second rank takes twice as long; whether a block's sum leaves its terms, and
    whether tokens of several rows are gathered, which is dearer than those of one."""
    rank, group = dist.get_rank(), dist.group.WORLD
    ways = dict(link_speed_module._ways(Talk(group), torch.device("cpu"), 2**10))
    say: Any = ways["all-reduce"][2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_speed_module, "_seconds", lambda say, device: 1.0 + rank)
        gathered: Any = ways["all-gather"][2]()
        return link_speed(torch.device("cpu")), say() is not say.args[0], len(gathered) > 1


def test_a_message_is_as_slow_as_on_the_rank_that_is_done_last() -> None:
    (own, apart, several), (other, *_) = run(2, told_by_a_slow_rank)
    assert own == other and apart and several
    assert own["all-reduce"][0] == 1.0 and own["all-gather"][0] == 2.0, "two messages, and one"
