"""The steps around experts that are cut over ranks: copies of tokens go to the ranks of their experts and
back.

    way, routes', share' = where the router's routes lead      x' = h[rows] of all ranks, for the experts here
    d' = what these make of x' (routed_steps.py)               d = the sum over a token's copies of d'

As the steps of a boundary they run over all rows at once, and again wherever what they give is made again: so
every rank has to keep the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from petune.kernels.block.mixture import MixturePart
from petune.kernels.block.routed_steps import Combined, Dispatched, copies_of
from petune.kernels.block.router_steps import OfMixture, OwnOf, Route, widened
from petune.kernels.block.steps import Run, Step, Values
from petune.kernels.configs import Level
from petune.kernels.grouped import Routes, combined, routes_of
from petune.kernels.memory.shape import BlockShape
from petune.kernels.reference import Act
from petune.models.experts import Spread, Way
from petune.models.spec import RoutedMlp


@dataclass(eq=False)
class Depart(OfMixture):
    """Who goes where: the way of the copies of own tokens, and of those that come here share [m', 1] and the
    routes to the experts here. Never made again, so that both passes go the same way. part: copies that come,
    for each that own tokens make."""

    routes: str
    share: str
    name: str
    part: float

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.routes, self.share), tuple(f"{self.name}.{one}" for one in _DEPARTED)
        self.way, self.routes_here, self.share_here = self.gives
        self.keeps, self.reads = dict.fromkeys(self.gives, "input"), (self.routes, self.way)

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        spread, routes = spread_in(run, self.at), Routes(*v[self.routes])
        way = spread.way(routes.ends)
        v[self.way] = tuple(way)
        v[self.routes_here] = tuple(routes_of(way.experts[:, None], spread.counts[spread.index]))
        v[self.share_here] = spread.there(routes.sorted(v[self.share]), way)[:, None]

    def backward(self, run: Run, v: Values) -> None:
        """See Step."""
        routes, dshare = Routes(*v[self.routes]), run.grads.pop(self.share_here)
        found = spread_in(run, self.at).back(dshare[:, 0], Way(*v[self.way]))
        run.grads[self.share] = found[routes.inverse].view(-1, routes.chosen)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        places = copies_of(shape, self.part) * 8
        return dict(zip(self.gives, (places, 2 * places, places // 2), strict=True))

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.share: shape.routed.chosen * max(4, shape.itemsize)}


@dataclass(eq=False)
class Send(OfMixture):
    """x' [m', width] = the copies of h that come here. part: see Depart."""

    routes: str
    way: str
    there: str
    part: float

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.h, self.routes, self.way), (self.there,)
        self.keeps, self.reads = {self.there: "all"}, (self.routes, self.way)

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        copies = v[self.h][Routes(*v[self.routes]).tokens]
        v[self.there] = spread_in(run, self.at).there(copies, Way(*v[self.way]))

    def backward(self, run: Run, v: Values) -> None:
        """See Step."""
        dx = spread_in(run, self.at).back(run.grads.pop(self.there), Way(*v[self.way]))
        run.give_own(self.h, combined(dx, Routes(*v[self.routes])))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.there: copies_of(shape, self.part) * shape.width * shape.itemsize}

    def beside(self, shape: BlockShape) -> int:
        """See Step. The message."""
        return _message(shape)

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.h: shape.width * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. The message."""
        return _message(shape)


@dataclass(eq=False)
class Return(OfMixture):
    """d = the sum over a token's copies of what experts on every rank gave, d' here. part: see Depart;
    behind, keep: see Combined."""

    routes: str
    way: str
    given: str
    d: str
    part: float
    behind: int | None = None
    keep: Level | None = None

    def __post_init__(self) -> None:
        self.takes, self.gives = (self.given, self.routes, self.way), (self.d,)
        self.keeps, self.reads = {} if self.keep is None else {self.d: self.keep}, (self.routes, self.way)

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        y = spread_in(run, self.at).back(v[self.given], Way(*v[self.way]))
        v[self.d] = widened(run, self.behind, combined(y, Routes(*v[self.routes])))

    def backward(self, run: Run, v: Values) -> None:
        """See Step."""
        dd: Tensor = run.grads.pop(self.d)
        copies = dd[Routes(*v[self.routes]).tokens]
        run.grads[self.given] = spread_in(run, self.at).there(copies, Way(*v[self.way]))

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.d: shape.width * (shape.itemsize if self.behind is None else max(4, shape.itemsize))}

    def beside(self, shape: BlockShape) -> int:
        """See Step. The message."""
        return _message(shape)

    def grads(self, shape: BlockShape) -> dict[str, int]:
        """See Step."""
        return {self.given: copies_of(shape, self.part) * shape.width * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. The message."""
        return _message(shape)


def _message(shape: BlockShape) -> int:
    """Bytes of the copies of a token, which are sent."""
    return shape.routed.chosen * shape.width * shape.itemsize


def spread_experts(
    name: str,
    core: RoutedMlp,
    own: OwnOf,
    route: Route,
    d: str,
    act: Act,
    behind: int | None,
    keep: Level | None,
) -> list[Step]:
    """d = the sum over the experts of a token, some of which are on other ranks."""
    part = len(core.held) * core.held[core.index] / sum(core.held)  # where ranks have as many tokens
    there, given, u = f"{name}.there", f"{name}.given", f"{name}.u"
    depart = Depart(*own, route.routes, route.share, name, part)
    here, names = (there, *own[1:3], None), (depart.routes_here, depart.share_here)
    return [
        depart,
        Send(*own, route.routes, depart.way, there, part),
        Dispatched(*here, depart.routes_here, f"{name}.s", u, part),
        Combined(*here, *names, u, f"{name}.s_down", given, act, part=part),
        Return(*own, route.routes, depart.way, given, d, part, behind, keep),
    ]


_DEPARTED = ("way", "routes_here", "share_here")


def spread_in(run: Run, at: int) -> Spread:
    """Where the experts of the mixture number `at` of a run are."""
    part: MixturePart = run.mixtures[at]
    assert part.spread is not None, "experts that are cut are given their spread"
    return part.spread
