"""Devices and the links between them, as a plan sees them: measured, or read from a file.

        devices:
          big:   {rates: H200, memory: 139.8GiB}
          small: {rates: A100, speed: 0.9, memory: 39.4GiB}
        hosts:
          - {device: big, count: 8, times: 4}
          - {devices: [big, small]}
        links:
          inside:  {latency: 5e-6, bandwidth: 350e9, kinds: {send: {latency: 9e-6, bandwidth: 360e9}}}
          between: {latency: 2e-5, bandwidth: 40e9}

A device is a preset of petune.kernels.memory.block_cost (`rates`; without it the one that its name has in
it), `speed` times as fast in everything, or with `matmul` FLOP/s and everything else in that ratio. launch:
seconds between two kernels. Bandwidths are bytes/s one way, latencies seconds; kinds: of messages that go
another way than gradients do, by the names of petune.parallel.link_speed. Ranks are numbered as hosts
stand, each host's one after the other, `times` hosts alike.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, isfinite
from pathlib import Path
from typing import Any

from petune.errors import Problem, UsageError
from petune.kernels.memory.block_cost import CPU, Rates, rates_of
from petune.recipe.yaml_lines import read

_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:([KMGT]?)(i?)B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_KEYS = ("rates", "speed", "matmul", "launch", "memory")


@dataclass(frozen=True)
class Device:
    """What computes: its rates, and the bytes of its memory, None where not known."""

    name: str
    rates: Rates
    memory: int | None = None


@dataclass(frozen=True)
class LinkSpeed:
    """Seconds before the first byte of a message arrives, and bytes a second from then on, one way. kinds:
    the same of messages that have figures of their own, by name."""

    latency: float = 0.0
    bandwidth: float = inf
    kinds: tuple[tuple[str, float, float], ...] = ()

    def of(self, kind: str) -> LinkSpeed:
        """By which messages of a kind go, as `hidden uneven all-gather`: its own, else the one without the
        first word, else the link itself."""
        while True:
            for name, latency, bandwidth in self.kinds:
                if name == kind:
                    return LinkSpeed(latency, bandwidth)
            if " " not in kind:
                return self
            kind = kind.partition(" ")[2]

    def seconds(self, messages: float, size: float) -> float:
        """Of `size` bytes in all, sent in so many messages one after the other; nothing takes no time."""
        return messages * self.latency + size / self.bandwidth if size else 0.0


@dataclass(frozen=True)
class Cluster:
    """Devices in the order of ranks. hosts: the first rank of each host; inside, between: what ranks of one
    host, and those of several, talk over."""

    devices: tuple[Device, ...]
    inside: LinkSpeed = LinkSpeed()
    between: LinkSpeed = LinkSpeed()
    hosts: tuple[int, ...] = (0,)

    def link(self, ranks: Sequence[int]) -> LinkSpeed:
        """The slowest link that a ring of these ranks has, which are in rising order."""
        together = bisect_right(self.hosts, ranks[0]) == bisect_right(self.hosts, ranks[-1])
        return self.inside if together else self.between


def of_speeds(speeds: Sequence[float], memory: Sequence[int | None]) -> Cluster:
    """Devices of which nothing is known but how fast they are beside one another, and links that cost
    nothing."""
    if any(speed <= 0 or not isfinite(speed) for speed in speeds):
        found = ", ".join(map(str, speeds))
        raise UsageError("speeds are positive numbers", where="--speeds", found=found, remedy="1,2,0.5")
    pairs = zip(speeds, memory, strict=True)
    return Cluster(
        tuple(Device(f"{speed:g}", scaled(replace(CPU, launch=0.0), speed), size) for speed, size in pairs)
    )


def scaled(rates: Rates, speed: float) -> Rates:
    """Those of a device that is so many times as fast in everything."""
    changed: dict[str, Any] = {
        name: tuple((length, rate * speed) for length, rate in getattr(rates, name))
        for name in ("attention", "attention_backward")
    }
    changed |= {
        name: getattr(rates, name) * speed for name in ("matmul", "matmul_fp8", "memory", "link", "hashes")
    }
    return replace(rates, launch=rates.launch / speed, **changed)


def read_size(text: str) -> int | None:
    """Bytes of `24GiB`, `8GB` or `24` (GiB); None for what is no size."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    number, prefix, binary = found.groups()
    unit = 2**30 if prefix is None else (1024 if binary else 1000) ** _POWERS[prefix.upper()]
    return int(float(number) * unit)


# ---------------------------------------------------------------- a file


def read_cluster(file: Path) -> Cluster:
    """The cluster a file describes. Raises UsageError with everything that is wrong in it."""
    try:
        document = read(file.read_bytes(), str(file))
    except OSError as error:
        what, remedy = f"this file cannot be read: {error.strerror}", "give the file of a cluster"
        raise UsageError(what, where=str(file), remedy=remedy) from None
    if document.problems:
        raise UsageError(document.problems)
    reader = _Reader(str(file), [])
    tree = reader.mapping(document.tree, "", ("devices", "hosts", "links"))
    kinds = {
        name: reader.device(name, value) for name, value in reader.all(tree.get("devices"), "devices").items()
    }
    listed = tree.get("hosts")
    if not isinstance(listed, list | tuple) or not listed:
        reader.fault("hosts", "a list, as [{device: NAME, count: 8}]", listed)
        listed = []
    hosts = [host for at, one in enumerate(listed) for host in reader.hosts(f"hosts[{at}]", one, kinds)]
    links = reader.mapping(tree.get("links"), "links", ("inside", "between"))
    found = {name: reader.link(name, links.get(name)) for name in ("inside", "between")}
    if reader.faults:
        raise UsageError(reader.faults)
    firsts = accumulate((len(host) for host in hosts[:-1]), initial=0)
    return Cluster(tuple(kinds[name] for host in hosts for name in host), **found, hosts=tuple(firsts))


@dataclass(frozen=True)
class _Reader:
    """Takes values of a tree, and writes down what is wrong with them."""

    file: str
    faults: list[Problem]

    def fault(self, where: str, expected: str, found: Any) -> None:
        shown = "nothing" if found is None else str(found)
        self.faults.append(
            Problem(f"{where or 'the file'} does not take this value", self.file, expected, shown)
        )

    def all(self, value: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(value, dict) or not value:
            self.fault(where, "a mapping", value)
            return {}
        return value

    def mapping(self, value: Any, where: str, known: Sequence[str]) -> Mapping[str, Any]:
        given = self.all(value, where)
        for key in given.keys() - set(known):
            self.fault(f"{where}.{key}".strip("."), f"one of {', '.join(known)}", "this key")
        return given

    def number(self, where: str, value: Any, least: float = 0.0) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value < inf:
            return float(value)
        self.fault(where, "a number" + (" above 0" if least else ""), value)
        return 1.0

    def device(self, name: str, value: Any) -> Device:
        where = f"devices.{name}"
        given = self.mapping(value, where, _KEYS)
        preset = rates_of(str(given.get("rates", name)))
        numbers = {
            key: self.number(f"{where}.{key}", given[key], 0.0 if key == "launch" else 1e-9)
            for key in ("speed", "matmul", "launch")
            if key in given
        }
        speed = numbers.get("speed", 1.0) * numbers.get("matmul", preset.matmul) / preset.matmul
        rates = scaled(replace(preset, name=name), speed)
        memory = read_size(str(given["memory"])) if "memory" in given else None
        if "memory" in given and not memory:
            self.fault(f"{where}.memory", "24GiB, 24GB or 24", given["memory"])
        return Device(name, replace(rates, launch=numbers.get("launch", rates.launch)), memory)

    def hosts(self, where: str, value: Any, kinds: Mapping[str, Device]) -> Iterator[list[str]]:
        """The names of the devices of each of some hosts that are alike."""
        given = self.mapping(value, where, ("device", "devices", "count", "times"))
        count, times = (
            int(self.number(f"{where}.{key}", given.get(key, 1), 1)) for key in ("count", "times")
        )
        named = given.get("devices", given.get("device"))
        names = [str(one) for one in named] if isinstance(named, list | tuple) else [str(named)] * count
        if wrong := [name for name in names if name not in kinds]:
            self.fault(f"{where}.device", f"one of {', '.join(kinds)}", wrong[0])
        yield from [names] * times

    def link(self, name: str, value: Any) -> LinkSpeed:
        where = f"links.{name}"
        given = value if isinstance(value, dict) else {}
        kinds = self.all(given["kinds"], f"{where}.kinds") if "kinds" in given else {}
        own = (self._speed(f"{where}.kinds.{kind}", one) for kind, one in kinds.items())
        return LinkSpeed(
            *self._speed(where, value), tuple((kind, *speed) for kind, speed in zip(kinds, own, strict=True))
        )

    def _speed(self, where: str, value: Any) -> tuple[float, float]:
        given = self.mapping(value, where, ("latency", "bandwidth", "kinds")[: 3 - where.count(".kinds.")])
        latency = self.number(f"{where}.latency", given.get("latency", 0.0))
        return latency, self.number(f"{where}.bandwidth", given.get("bandwidth"), 1e-9)
