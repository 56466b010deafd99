"""`overlap`: what a region cut by heads says to its neighbours, hidden behind the matmul beside it, tile by
tile.

The plain form stands still while hidden states are gathered, and again while partial sums are scattered. Here
tokens go in tiles, one per rank, and while one tile travels another is computed:

    connection   entry, forward         entry, backward          exit, forward            exit, backward
    sequence     gather | first site    first site | scatter     way out | scatter        gather | way out
    whole        -                      first site | all-reduce  way out | all-reduce     -

where `a | b` says which runs beside which: at the entry the own tile is computed first, while the next one
comes in, and at the exit last, when the sums of the others are on their way. The backward passes are the same
in reverse, as autograd runs nodes in reverse order of their making: the exit gathers gradients beside the way
out's own backward matmuls, and the entry sends off the gradient of each tile as soon as the first site has
made it. Only the first site of an entry is computed in tiles (q, or gate), the others then take the whole.
Sums over ranks are made in another order than by the collectives of the plain form, and equal them up to
rounding.

How tiles travel is told in `petune.parallel.tensor.tiles`. Sites are called with tiles and must treat tokens
one by one, as linears do; dropout by index is told where a tile lies. Until a site asks for hidden states, a
stand-in goes through the model's own code: nothing but its shape, dtype and device may be read, and as its
numbers are NaN, nothing else goes unnoticed. Every rank makes the same calls of a site, for a tile without
tokens too, so that all save as many tensors: recomputing stops once it has as many, on all ranks at the same
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from threading import local
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from petune.models.boundary import BoundaryHook, SharedByCopies
from petune.models.transition import applied
from petune.models.tuned_linear import TunedLinear
from petune.parallel.collectives import SEQ
from petune.parallel.plan import Cut, apportion
from petune.parallel.tensor.tiles import (
    Incoming,
    Outgoing,
    Slicing,
    TileRoute,
    Tiles,
    choose,
    receiving,
    sending,
)
from petune.rng.context import running

# of a region whose tokens are whole on every rank: three quarters of a sum are hidden, and matmuls stay large
TILES = 4


# ---------------------------------------------------------------- autograd


class TileExchange:
    """What the autograd nodes of one entry or one exit in one call share: their tiles, in the order of the
    backward pass.

    It holds tensors only while a backward pass is in it: a graph whose activations are recomputed keeps this
    object.
    """

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles.back()
        self.outgoing: Outgoing | None = None
        self.incoming: Incoming | None = None

    def put(self, grad: Tensor) -> None:
        """Send off the gradient of a tile."""
        if self.outgoing is None:
            self.outgoing = sending(self.tiles)
        self.outgoing.put(grad)

    def finish(self, grad: Tensor) -> Tensor:
        """The sum of gradients, `grad` being that of the last tile."""
        outgoing = self.outgoing or sending(self.tiles)
        self.outgoing = None
        return outgoing.finish(grad)

    def begin(self, grad: Tensor) -> Tensor:
        """Fetch gradients; that of the first tile."""
        incoming = receiving(grad, self.tiles)
        self.incoming = incoming if self.tiles.steps > 1 else None
        return incoming.tile(0)

    def get(self, step: int) -> Tensor:
        """The gradient of the tile that the forward pass had at `step`."""
        assert self.incoming is not None
        grad = self.incoming.tile(self.tiles.steps - 1 - step)
        if step == 0:
            self.incoming = None
        return grad


class _Begin(Function):
    """Hidden states -> the first tile, and a token on which the other tiles hang, so that backward comes here
    after it has been there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, link: TileExchange, source: Incoming) -> tuple[Tensor, Tensor]:
        ctx.link = link
        first = source.tile(0)
        return first.view_as(first), hidden.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.link.finish(grad), None, None


class _Come(Function):
    """token, a tile that has come -> the tile."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, tile: Tensor, link: TileExchange) -> Tensor:
        ctx.link = link
        return tile.view_as(tile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.link.put(grad)
        return None, None, None


class _Go(Function):
    """A tile of partial sums -> a token on which the sum hangs; the tile is sent off."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, link: TileExchange, outgoing: Outgoing, step: int) -> Tensor:
        ctx.link, ctx.step = link, step
        outgoing.put(part)
        return part.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.link.get(ctx.step), None, None, None


class _End(Function):
    """The last tile of partial sums, the tokens of the others -> the sum, own tokens or whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, link: TileExchange, outgoing: Outgoing, *tokens: Tensor) -> Tensor:
        ctx.link, ctx.tokens = link, len(tokens)
        return outgoing.finish(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.link.begin(grad), None, None, *[None] * ctx.tokens


# ---------------------------------------------------------------- one call of a region


def _at(token: int, drawn: int) -> None:
    """Tell dropout that the tile which begins at `token` is next, and that for all tiles of a site it is the
    same draw."""
    now = running()
    now.token, now.drawn = token, drawn


class Arriving:
    """Hidden states on their way into a region. They hang on the stand-in that is handed to it, for as long
    as the call lasts."""

    def __init__(self, hidden: Tensor, tiles: Tiles) -> None:
        self.tiles, self.link = tiles, TileExchange(tiles)
        self.source: Incoming | None = receiving(hidden.detach(), tiles)
        begin: Any = _Begin
        first, self.token = begin.apply(hidden, self.link, self.source)
        self.parts: list[Tensor] = [first]
        self.joined: Tensor | None = None
        self.drawn = 0

    def stand_in(self) -> Tensor:
        """NaN in the shape of the whole, in the memory of one number."""
        part = self.parts[0]
        found = part.new_full((), math.nan).expand(
            *part.shape[:SEQ], sum(self.tiles.sizes), *part.shape[SEQ + 1 :]
        )
        cast("Any", found).arriving = self
        return found

    def begin(self) -> Tensor | None:
        """The first tile, to whoever asks first."""
        if self.source is None:
            return None
        self.drawn = running().drawn
        _at(self.tiles.first_token(0), self.drawn)
        return self.parts[0]

    def through(self, site: nn.Module, first: Tensor) -> Tensor:
        """The output of `site` for all tokens, `first` being that for the first tile."""
        assert self.source is not None
        outputs = [first]
        for step in range(1, self.tiles.steps):
            self.parts.append(applied(_Come, self.token, self.source.tile(step), self.link))
            _at(self.tiles.first_token(step), self.drawn)
            outputs.append(site.forward(self.parts[step]))
        running().token, self.source = 0, None
        return self.tiles.joined(outputs)

    def whole(self) -> Tensor:
        """Hidden states of all tokens, once they are here. Made for whoever asks, as many regions have one
        site only."""
        if self.joined is None:
            self.joined, self.parts = self.tiles.joined(self.parts), []
        return self.joined


class Departing:
    """What the way out of a region takes, in tiles."""

    def __init__(self, x: Tensor, tiles: Tiles) -> None:
        self.parts = Slicing(x, tiles).parts
        self.tiles, self.drawn = tiles, running().drawn

    def begin(self) -> Tensor:
        """The first tile."""
        _at(self.tiles.first_token(0), self.drawn)
        return self.parts[0]

    def through(self, linear: Callable[[Tensor], Tensor], first: Tensor) -> Tensor:
        """The sum over ranks of what `linear` makes of all tiles, `first` being that of the first."""
        link, outgoing, part = TileExchange(self.tiles), sending(self.tiles), first
        tokens: list[Tensor] = []
        try:
            for step in range(1, self.tiles.steps):
                tokens.append(applied(_Go, part, link, outgoing, step - 1))
                _at(self.tiles.first_token(step), self.drawn)
                part = linear(self.parts[step])
            return applied(_End, part, link, outgoing, *tokens)
        finally:
            outgoing.drain()


# ---------------------------------------------------------------- hooks


class _Open(local):
    """What the hook before a module has left for the hook after it."""

    arriving: Arriving | None = None
    departing: Departing | None = None


_open = _Open()


@dataclass(frozen=True)
class Overlap(SharedByCopies):
    """Overlap as one rank of a group does it. route: None where the connection is whole."""

    group: dist.ProcessGroup
    index: int
    route: TileRoute | None

    def tiles(self, x: Tensor, leaving: bool) -> Tiles:
        """Tiles of a region as it is entered, with own tokens or the whole in `x`, or left."""
        if self.route is None:
            sizes = apportion(x.shape[SEQ], (1,) * max(1, min(TILES, x.shape[SEQ])))
            return Tiles(sizes, tuple(range(len(sizes))), self.group, self.index, None)
        sizes = running().sizes
        order = tuple((self.index - step - leaving) % len(sizes) for step in range(len(sizes)))
        return Tiles(sizes, order, self.group, self.index, self.route)

    def enter(self, hidden: Tensor) -> Tensor:
        """Hidden states that enter a region -> what stands in for all tokens until a site takes them."""
        if self.route is None and not (torch.is_grad_enabled() and hidden.requires_grad):
            return hidden  # nothing will come back either
        return Arriving(hidden, self.tiles(hidden, leaving=False)).stand_in()

    def column(self, site: nn.Module) -> None:
        """Hook a site that hidden states enter by."""
        hook = Column()
        site.register_forward_pre_hook(hook.before)
        site.register_forward_hook(hook.after)

    def row(self, site: nn.Module) -> TiledLeave:
        """Hook the site a region is left by."""
        hook = TiledLeave(self, site)
        site.register_forward_pre_hook(hook.before)
        return hook


class Column(BoundaryHook):
    """Hooks on a site that hidden states enter by."""

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        """Hook before it: the first tile instead of a stand-in that nobody has taken, else the whole."""
        _open.arriving = None
        arriving: Arriving | None = getattr(args[0], "arriving", None) if args else None
        if arriving is None:
            return None  # not what enters the region: a cross-attention's keys and values
        first = arriving.begin()
        if first is None:
            return (arriving.whole(),)
        _open.arriving = arriving
        return (first,)

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Hook after it: the output for the other tiles too, if it was given the first."""
        arriving, _open.arriving = _open.arriving, None
        return output if arriving is None else arriving.through(module, output)


@dataclass(frozen=True)
class TiledLeave(BoundaryHook):
    """Tiles through the site a region is left by: the site is called with the first, and `summed` makes the
    rest from its way out.

    Where the way out is not the site itself, it passes on what the base layer makes, and `plain` is the base
    layer.
    """

    overlap: Overlap
    site: nn.Module

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        """Hook before the site."""
        _open.departing = Departing(args[0], self.overlap.tiles(args[0], leaving=True))
        return (_open.departing.begin(),)

    def summed(self, out: nn.Module, first: Tensor) -> Tensor:
        """The sum over ranks, whole or own tokens, of what leaves `out`, which has made its first tile."""
        departing, _open.departing = _open.departing, None
        if departing is None:
            raise RuntimeError(
                f"the way out of {type(self.site).__name__} was called without the layer itself"
            )
        linear = self.site if out is self.site else cast("TunedLinear", self.site).plain()
        return departing.through(linear.forward, first)


def make_overlap(plan: Cut, group: dist.ProcessGroup, index: int, device: torch.device) -> Overlap | None:
    """Overlap as the plan wants it, or None. Every rank of the group must call it."""
    if not plan.overlap or "heads" not in (plan.attention, plan.mlp):
        return None
    return Overlap(group, index, choose(group, device) if plan.connection == "sequence" else None)
