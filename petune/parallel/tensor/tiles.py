"""How tokens travel between the ranks of a region in tiles, one after another, while what is here already is
worked on.

Tiles go in pairs of a send and a receive, by one of two routes: in the ring each rank talks to its neighbours
and passes on what it got, in the star each tile goes straight to whoever needs it. `choose` measures which is
faster. Where every rank has every tile nothing is fetched, and sums of tiles are all-reduces.

**Every rank does the same thing at the same step**, whatever tile it is on, so that transfers always meet: no
step is left out for a tile without tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from petune.log import say
from petune.parallel.collectives import SEQ, Sizes, Transfer, all_max_

TileRoute = Literal["ring", "star"]  # how tiles go from rank to rank: to the next one, or to every other
ROUTES: tuple[TileRoute, ...] = ("ring", "star")
# numbers in each rank's tile when routes are timed: 64 KiB, where latency counts more than bandwidth
PROBE = 2**14
TIMINGS = 9


@dataclass(frozen=True)
class Tiles:
    """The tokens of one region in tiles: how many in each, in which order this rank takes them, and how they
    travel.

    With a route, tile i is rank i's, and `order` walks round the ranks one way or the other. Without, every
    rank has every tile.
    """

    sizes: Sizes
    order: tuple[int, ...]
    group: dist.ProcessGroup
    index: int
    route: TileRoute | None

    @property
    def steps(self) -> int:
        """How many tiles there are."""
        return len(self.sizes)

    def back(self) -> Tiles:
        """As the backward pass takes them."""
        return replace(self, order=self.order[::-1])

    def first_token(self, step: int) -> int:
        """Where the tile of `step` begins in the whole sequence."""
        return sum(self.sizes[: self.order[step]])

    def peers(self, step: int) -> tuple[int, int]:
        """The rank as far as order[step] is from here, but on the other side; and order[step] itself."""
        return (2 * self.index - self.order[step]) % self.steps, self.order[step]

    def shape(self, like: Tensor, tile: int) -> tuple[int, ...]:
        """Of tile `tile`, where `like` is another."""
        return (*like.shape[:SEQ], self.sizes[tile], *like.shape[SEQ + 1 :])

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Parts by step -> the whole, in the order of tokens."""
        return torch.cat([parts[self.order.index(tile)] for tile in range(self.steps)], SEQ)


# ---------------------------------------------------------------- tiles on their way


class Gathering:
    """All ranks' tiles, the own one, `x`, first."""

    def __init__(self, x: Tensor, tiles: Tiles) -> None:
        if x.shape[SEQ] != tiles.sizes[tiles.index]:
            what = f"dim {SEQ} of {tuple(x.shape)} does not have this rank's {tiles.sizes[tiles.index]}"
            raise ValueError(f"{what} of {tiles.sizes}")
        self.tiles, self.found = tiles, [x.contiguous()]
        self.transfers: list[Transfer] = []
        for step in range(1, tiles.steps if tiles.route == "star" else 2):
            self._fetch(step)

    def _fetch(self, step: int) -> None:
        """Begin to receive the tile of `step`: from its rank, or from the neighbour, who has it already."""
        hop = step if self.tiles.route == "star" else 1
        to, source = self.tiles.peers(hop)
        shape = self.tiles.shape(self.found[0], self.tiles.order[step])
        self.transfers.append(Transfer(self.found[step - hop], shape, self.tiles.group, to, source))

    def tile(self, step: int) -> Tensor:
        """The tile of `step`, waited for."""
        while len(self.found) <= step:
            self.found.append(self.transfers[len(self.found) - 1].wait())
            if self.tiles.route == "ring" and len(self.found) < self.tiles.steps:
                self._fetch(len(self.found))
        return self.found[step]


class Scattering:
    """Sums over ranks, of which each gets its own tile: parts go off in order, the own one last."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles
        self.transfers: list[Transfer] = []

    def put(self, part: Tensor) -> None:
        """Send off the next tile: to its rank, or in the ring, with what has come in for it, to the
        neighbour."""
        step = len(self.transfers)
        ring = self.tiles.route == "ring"
        to, source = self.tiles.peers(0 if ring else step)
        if ring and step:
            part = self.transfers[-1].wait().add_(part)
        if not ring:
            to, source = source, to
        shape = self.tiles.shape(part, self.tiles.order[step + 1] if ring else self.tiles.index)
        self.transfers.append(Transfer(part, shape, self.tiles.group, to, source))

    def finish(self, own: Tensor) -> Tensor:
        """The sum of the own tile, of which `own` is this rank's part."""
        found = own.clone(memory_format=torch.contiguous_format)
        for transfer in self.transfers[-1:] if self.tiles.route == "ring" else self.transfers:
            found.add_(transfer.wait())
        self.drain()
        return found

    def drain(self) -> None:
        """Wait for all that is under way: recomputing may stop in the middle, once it has what it needs."""
        for transfer in self.transfers:
            transfer.wait()


class Slicing:
    """Tiles of what is whole here."""

    def __init__(self, x: Tensor, tiles: Tiles) -> None:
        parts: tuple[Tensor, ...] = x.split(list(tiles.sizes), SEQ)
        self.parts = [parts[tile] for tile in tiles.order]

    def tile(self, step: int) -> Tensor:
        """The tile of `step`."""
        return self.parts[step]


class Summing:
    """Sums over ranks that every rank needs whole, tile by tile."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles
        self.parts: list[Tensor] = []
        self.works: list[Any] = []

    def put(self, part: Tensor) -> None:
        """Begin to sum the next tile."""
        self.parts.append(part.clone(memory_format=torch.contiguous_format))
        self.works.append(dist.all_reduce(self.parts[-1], group=self.tiles.group, async_op=True))

    def finish(self, own: Tensor) -> Tensor:
        """The whole sum, `own` being this rank's part of the last tile."""
        self.put(own)
        self.drain()
        return self.tiles.joined(self.parts)

    def drain(self) -> None:
        """Wait for all that is under way."""
        while self.works:
            self.works.pop(0).wait()


Incoming = Gathering | Slicing
Outgoing = Scattering | Summing


def receiving(x: Tensor, tiles: Tiles) -> Incoming:
    """Every tile, by step, of own tokens or of a whole."""
    return Slicing(x, tiles) if tiles.route is None else Gathering(x, tiles)


def sending(tiles: Tiles) -> Outgoing:
    """Sums of tiles over ranks."""
    return Summing(tiles) if tiles.route is None else Scattering(tiles)


# ---------------------------------------------------------------- choosing a route


_chosen: WeakKeyDictionary[dist.ProcessGroup, TileRoute] = WeakKeyDictionary()


def choose(group: dist.ProcessGroup, device: torch.device) -> TileRoute:
    """The route by which tiles of 64 KiB get round the ranks of `group` faster, the same on all of them; rank
    0 of the world says which.

    Each route is timed on every rank, and counts as long as on the slowest. Every rank of the group must call
    it; it is measured once. Between two ranks both routes are the same.
    """
    if (known := _chosen.get(group)) is not None:
        return known
    ranks = dist.get_world_size(group)
    if ranks == 2:
        route, why = ROUTES[0], "the only route between 2 ranks"
    else:
        seconds = torch.tensor(
            [_seconds(route, group, device) for route in ROUTES], dtype=torch.float64, device=device
        )
        all_max_([seconds], group)
        times = [1000 * float(one) for one in seconds]
        route = ROUTES[times.index(min(times))]
        why = f"{ranks} ranks; " + ", ".join(
            f"{name} {one:.3g} ms" for name, one in zip(ROUTES, times, strict=True)
        )
    if dist.get_rank() == 0:
        say(f"overlap: tiles travel by the {route} ({why})")
    _chosen[group] = route
    return route


def _seconds(route: TileRoute, group: dist.ProcessGroup, device: torch.device) -> float:
    """How long it takes to gather a small tile of every rank, the median of a few times."""
    ranks, index = dist.get_world_size(group), dist.get_rank(group)
    order = tuple((index - step) % ranks for step in range(ranks))
    tiles = Tiles((1,) * ranks, order, group, index, route)
    x = torch.zeros(1, 1, PROBE, device=device)
    found = []
    for _ in range(TIMINGS):
        all_max_([x], group)  # begin together
        _settle(device)
        start = time.perf_counter()
        Gathering(x, tiles).tile(ranks - 1)
        _settle(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
