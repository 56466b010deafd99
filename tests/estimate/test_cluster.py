"""Clusters as files: what is said of devices and links is read, and everything wrong is named at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from petune.errors import UsageError
from petune.estimate.cluster import Cluster, LinkSpeed, read_cluster, read_size
from petune.kernels.memory.block_cost import A100, H200

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
    assert (found.inside, found.between) == (LinkSpeed(5e-6, 350e9), LinkSpeed(0.0, 40e9))
    assert found.link((0, 1)) == found.link((4, 5)) == found.inside and found.link((1, 2)) == found.between


def test_devices_are_presets_and_what_is_said_of_them(tmp_path: Path) -> None:
    big, *_, small, own = read(tmp_path, TEXT).devices
    assert replace(big.rates, name="H200") == H200 and big.memory == int(139.8 * 2**30)
    assert small.rates.matmul == A100.matmul / 2 and small.rates.memory == A100.memory / 2
    assert small.memory == 40 * 10**9
    assert own.rates.matmul == 0.4e12 and own.rates.launch == 1e-5 and own.memory is None


def test_messages_go_by_the_figures_of_their_kind() -> None:
    link = LinkSpeed(1e-4, 1e9, (("all-gather", 1e-5, 2e9), ("uneven all-gather", 1e-6, 3e9)))
    assert link.of("all-gather") == link.of("hidden all-gather") == LinkSpeed(1e-5, 2e9)
    assert link.of("hidden uneven all-gather") == LinkSpeed(1e-6, 3e9)
    assert link.of("uneven all-reduce") == link.of("all-reduce") == link


def test_figures_of_a_kind_of_message_are_read(tmp_path: Path) -> None:
    kinds = "inside: {kinds: {uneven all-gather: {latency: 1e-5, bandwidth: 2e9}}, "
    text = TEXT.replace("inside: {", kinds)
    assert text != TEXT and read(tmp_path, text).inside.of("uneven all-gather") == LinkSpeed(1e-5, 2e9)


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
    assert [read_size(text) for text in ("24GiB", "24", "80GB", "much")] == [
        24 * 2**30,
        24 * 2**30,
        80 * 10**9,
        None,
    ]


def test_nothing_to_send_takes_no_time() -> None:
    link = LinkSpeed(1e-3, 1e6)
    assert link.seconds(2, 0) == 0 and link.seconds(2, 1e6) == pytest.approx(1.002)
