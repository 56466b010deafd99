"""The steps around experts that are cut over ranks: tokens go to the ranks of their experts and back.

    way, routes', share' = where the router's choice leads     x' = rows of all ranks' h for experts here
    d' = what these make of x' (routed_steps.py)               d = the sum over a token's ranks of d'

As the steps of a boundary they run over all rows at once, and again wherever what they give is made again: so
every rank has to keep the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor

from petune.kernels.block.mixture import MixturePart
from petune.kernels.block.product_cost import item_before
from petune.kernels.block.routed_steps import Combined, Dispatched, copies_of
from petune.kernels.block.router_steps import OfMixture, OwnOf, Route, widened
from petune.kernels.block.steps import BlockRun, Step, Values
from petune.kernels.configs import Level
from petune.kernels.memory.shape import BlockShape
from petune.kernels.reference import Act
from petune.models.experts import Spread, Way, reached
from petune.models.routes import Routes
from petune.models.spec import RoutedMlp


@dataclass(frozen=True)
class ExpertTraffic:
    """What is sent where ranks have as many tokens and experts are chosen as often. copies: that experts here
    compute on, for each that own tokens make; received: rows that come for each own token; sent: that each
    own token sends, to so many ranks."""

    copies: float
    received: float
    sent: float
    ranks: int

    @classmethod
    def of(cls, core: RoutedMlp) -> ExpertTraffic:
        """Of a mixture whose experts are cut."""
        parts, ranks = reached(core.held, core.chosen), len(core.held)
        copies = ranks * core.held[core.index] / sum(core.held)
        return cls(copies, ranks * parts[core.index], sum(parts), ranks)


@dataclass(eq=False)
class Depart(OfMixture):
    """Who goes where: the way of own tokens, the routes of the rows that come to the experts here, and the
    shares [m', chosen] of these. Never made again, so that both passes go the same way."""

    index: str
    share: str
    name: str
    traffic: ExpertTraffic

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.index, self.share), tuple(f"{self.name}.{one}" for one in _DEPARTED)
        self.way, self.routes_here, self.share_here = self.gives
        self.keeps, self.reads = dict.fromkeys(self.gives, "input"), (self.way,)

    def forward(self, run: BlockRun, v: Values) -> None:
        spread = spread_in(run, self.at)
        way, here = spread.way(v[self.index])
        v[self.way], v[self.routes_here] = (*way[:3], *way.routes), tuple(here)
        v[self.share_here] = spread.there(v[self.share], way)

    def backward(self, run: BlockRun, v: Values) -> None:
        dshare = run.grads.pop(self.share_here)
        run.grads[self.share] = spread_in(run, self.at).back(dshare, _way(v[self.way]))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step. Numbers of 8 bytes, and shares of 4."""
        chosen, traffic = shape.routed.chosen, self.traffic
        rows = ceil(traffic.received * chosen)
        here = copies_of(shape, traffic.copies) + rows
        return {
            self.way: 8 * ceil(2 * traffic.sent + traffic.ranks),
            self.routes_here: 8 * here,
            self.share_here: 4 * rows,
        }

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.share: shape.routed.chosen * max(4, shape.itemsize)}


class _Message:
    """What a step that sends rows takes of memory, either way."""

    traffic: ExpertTraffic

    def beside(self, shape: BlockShape) -> int:
        return _rows(shape, self.traffic.sent)

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        return _rows(shape, self.traffic.sent)


@dataclass(eq=False)
class Send(_Message, OfMixture):
    """x' [m', width] = the rows of h that come here."""

    way: str
    there: str
    traffic: ExpertTraffic

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.h, self.way), (self.there,)
        self.keeps, self.reads = {self.there: "all"}, (self.way,)

    def forward(self, run: BlockRun, v: Values) -> None:
        v[self.there] = spread_in(run, self.at).there(v[self.h], _way(v[self.way]))

    def backward(self, run: BlockRun, v: Values) -> None:
        dx = run.grads.pop(self.there)
        run.give_own(self.h, spread_in(run, self.at).back(dx, _way(v[self.way])))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.there: _rows(shape, self.traffic.received)}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.h: shape.width * shape.itemsize}


@dataclass(eq=False)
class Return(_Message, OfMixture):
    """d = the sum over a token's ranks of what experts there gave, d' here. behind, keep: see Combined."""

    way: str
    given: str
    d: str
    traffic: ExpertTraffic
    behind: int | None = None
    keep: Level | None = None

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.given, self.way), (self.d,)
        self.keeps, self.reads = {} if self.keep is None else {self.d: self.keep}, (self.way,)

    def forward(self, run: BlockRun, v: Values) -> None:
        found = spread_in(run, self.at).back(v[self.given], _way(v[self.way]))
        v[self.d] = widened(run, self.behind, found)

    def backward(self, run: BlockRun, v: Values) -> None:
        dd: Tensor = run.grads.pop(self.d)
        run.grads[self.given] = spread_in(run, self.at).there(dd, _way(v[self.way]))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.d: shape.width * item_before(shape, self.behind)}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.given: _rows(shape, self.traffic.received)}


def _rows(shape: BlockShape, rows: float) -> int:
    """Bytes of so many rows for each own token."""
    return ceil(rows * shape.width) * shape.itemsize


def _way(kept: tuple[Any, ...]) -> Way:
    """A way out of what is kept of it."""
    return Way(kept[0], kept[1], kept[2], Routes(*kept[3:]))


def spread_experts(
    name: str, core: RoutedMlp, own: OwnOf, route: Route, act: Act, behind: int | None, keep: Level | None
) -> list[Step]:
    """d = the sum over the experts of a token, some of which are on other ranks."""
    traffic = ExpertTraffic.of(core)
    there, given, u = f"{name}.there", f"{name}.given", f"{name}.u"
    depart = Depart(*own, route.index, route.share, name, traffic)
    here, names = (there, *own[1:3], None), (depart.routes_here, depart.share_here)
    part, come = traffic.copies, traffic.received
    return [
        depart,
        Send(*own, depart.way, there, traffic),
        Dispatched(*here, depart.routes_here, f"{name}.s", u, part, come),
        Combined(*here, *names, u, f"{name}.s_down", given, act, part=part, come=come),
        Return(*own, depart.way, given, f"{name}.d", traffic, behind, keep),
    ]


_DEPARTED = ("way", "routes_here", "share_here")


def spread_in(run: BlockRun, at: int) -> Spread:
    """Where the experts of the mixture number `at` of a run are."""
    part: MixturePart = run.mixtures[at]
    assert part.spread is not None, "experts that are cut are given their spread"
    return part.spread
