"""Clusters as files: what is written is read back, and everything wrong is named at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from petune.errors import UsageError
from petune.estimate.cluster import Cluster, Device, Link, read_cluster, scaled, size_of, written
from petune.kernels.memory.block_cost import A100, CPU, H200

TEXT = """
devices:
  big: {rates: H200, memory: 139.8GiB}
  small: {rates: A100, speed: 0.5, memory: 40GB}
  own: {matmul: 0.4e12, launch: 1e-5}
hosts:
  - {device: big, count: 2, times: 2}
  - {devices: [small, own]}
links:
  inside: {latency: 5e-6, bandwidth: 350e9}
  between: {bandwidth: 40e9}
"""


def read(folder: Path, text: str) -> Cluster:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return read_cluster(file)


def test_ranks_are_numbered_as_hosts_stand(tmp_path: Path) -> None:
    found = read(tmp_path, TEXT)
    assert [device.name for device in found.devices] == ["big"] * 4 + ["small", "own"]
    assert found.hosts == (0, 2, 4)
    assert (found.inside, found.between) == (Link(5e-6, 350e9), Link(0.0, 40e9))
    assert found.link((0, 1)) == found.link((4, 5)) == found.inside and found.link((1, 2)) == found.between


def test_devices_are_presets_and_what_is_said_of_them(tmp_path: Path) -> None:
    big, *_, small, own = read(tmp_path, TEXT).devices
    assert replace(big.rates, name="H200") == H200 and big.memory == int(139.8 * 2**30)
    assert small.rates.matmul == A100.matmul / 2 and small.rates.memory == A100.memory / 2
    assert small.memory == 40 * 10**9
    assert own.rates.matmul == 0.4e12 and own.rates.launch == 1e-5 and own.memory is None


def test_messages_go_by_the_figures_of_their_kind() -> None:
    link = Link(1e-4, 1e9, (("all-gather", 1e-5, 2e9), ("uneven all-gather", 1e-6, 3e9)))
    assert link.of("all-gather") == link.of("hidden all-gather") == Link(1e-5, 2e9)
    assert link.of("hidden uneven all-gather") == Link(1e-6, 3e9)
    assert link.of("uneven all-reduce") == link.of("all-reduce") == link


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    devices = (Device("CPU 0", CPU, 2**30), Device("CPU 1", scaled(CPU, 0.25), None))
    kinds = (("uneven all-gather", 1e-5, 2e9), ("send", 1e-6, 4e9))
    cluster = Cluster(devices, Link(1e-4, 1e9, kinds), Link(1e-4, 1e9))
    again = read(tmp_path, written(cluster))
    for device, same in zip(cluster.devices, again.devices, strict=True):
        assert same.memory == device.memory
        for name in ("matmul", "memory", "launch"):
            assert getattr(same.rates, name) == pytest.approx(getattr(device.rates, name), rel=1e-3)
    assert again.inside == cluster.inside


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    text = TEXT.replace("139.8GiB", "much").replace("350e9", "-1").replace("[small, own]", "[huge]")
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text.replace("launch", "lunch"))
    said = str(caught.value)
    for place in ("devices.big.memory", "links.inside.bandwidth", "hosts[1].device", "devices.own.lunch"):
        assert place in said
    with pytest.raises(UsageError, match="hosts"):
        read(
            tmp_path,
            "devices: {a: {rates: H200}}\nlinks: {inside: {bandwidth: 1}, between: {bandwidth: 1}}\n",
        )
    with pytest.raises(UsageError, match="cannot be read"):
        read_cluster(tmp_path / "nowhere.yaml")


def test_sizes_have_units_or_are_gibibytes() -> None:
    assert [size_of(text) for text in ("24GiB", "24", "80GB", "much")] == [
        24 * 2**30,
        24 * 2**30,
        80 * 10**9,
        None,
    ]


def test_nothing_to_send_takes_no_time() -> None:
    link = Link(1e-3, 1e6)
    assert link.seconds(2, 0) == 0 and link.seconds(2, 1e6) == pytest.approx(1.002)
