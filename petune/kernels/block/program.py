"""The steps of a fused block, compiled from the sub-layers of its family's table.

Values are named after their sub-layer: h = norm(x), entered = h as a sub-layer that is cut across ranks reads
it, qkv = h W_qkv, a = attention, o = a W_o, u = gate | up, d = m W_down, left = the sum over ranks of o or d,
adapted = the same with what its bottleneck adds, sized = the same times a vector, r = x + o or x + d, t = the
same where vectors of tokens are read, whose part tokens.p is added to it behind a norm, tokens.n; of a
bottleneck behind that sum wide = r in float32, seen = norm(r) and adapted = r with what it adds; raw is q | k
| v before positions and heads' norms, s the low-rank input of a group's update
(petune/kernels/block/linear.py).
"""

from __future__ import annotations

from functools import cache
from typing import Literal, cast

from petune.kernels.block.attention_steps import Attend, NormHeads, NormWidths
from petune.kernels.block.bottleneck_steps import AddWide, Bottleneck
from petune.kernels.block.boundary_steps import Enter, Leave
from petune.kernels.block.called_step import CallCore
from petune.kernels.block.compiled_program import Program as Program
from petune.kernels.block.cores import (
    CoreSizes,
    Drawing,
    called,
    calls_all,
    has_sinks,
    linears_of,
    name_of,
    vectors_in,
)
from petune.kernels.block.exchange_steps import Gather, Trade, TradeBack
from petune.kernels.block.lent_steps import KEYS, TOKENS, Lend, OfTokens
from petune.kernels.block.linear_steps import Activated, Low, Product
from petune.kernels.block.mixture import OF_MIXTURE
from petune.kernels.block.rotary_steps import SIDE_BY_SIDE, turning
from petune.kernels.block.routed_steps import experts
from petune.kernels.block.router_steps import AddShared, Route
from petune.kernels.block.scale_step import ScaleBy
from petune.kernels.block.spread_steps import spread_experts
from petune.kernels.block.steps import Add, DropStep, Normalize, Step
from petune.kernels.configs import Level
from petune.kernels.memory.shape import GroupKind, GroupPlace
from petune.models.boundary import Connection
from petune.models.spec import Attention, LinearGroup, Mlp, Norm, PerToken, Role, RoutedMlp, SubLayer
from petune.models.tuned_parts import TENSORS


@cache
def compiled(sublayers: tuple[SubLayer, ...], sizes: CoreSizes) -> Program:
    """The program of a block of these sub-layers, of which only what the block has is named; the same for
    equal arguments."""
    build = _Build(sublayers, sizes)
    y = build.x
    for sublayer, following in zip(sublayers, (*sublayers[1:], None), strict=True):
        y = build.sublayer(sublayer, y, read=following is not None and not following.parallel)
    return build.program(y)


class _Build:
    """A program in the making."""

    x = "x"

    def __init__(self, sublayers: tuple[SubLayer, ...], sizes: CoreSizes) -> None:
        self.sublayers, self.sizes = sublayers, sizes
        self.steps: list[Step] = []
        self.groups: list[GroupPlace] = []
        self.norms: list[Norm] = []
        self.dropouts: list[str] = []
        self.bottlenecks: list[str] = []
        self.mixtures: list[RoutedMlp] = []
        self.order: list[Drawing] = []
        self.scaled, self.entries = frozenset[Role](), frozenset[Role]()  # of the sub-layer in the making
        self.within: int | None = None  # the sub-layer cut across ranks that is being made
        self.inputs = [self.x]
        self.entered = self.x, self.x  # what the sub-layer in the making begins with, and what its core reads
        self.linears_end = TENSORS * sum(linears_of(sublayer.core) for sublayer in sublayers)
        behind = sum(sublayer.bottleneck > 0 for sublayer in sublayers)
        mixed = sum(isinstance(sublayer.core, RoutedMlp) for sublayer in sublayers)
        self.mixtures_begin = self.linears_end + 4 * behind
        self.sinks_begin = self.mixtures_begin + OF_MIXTURE * mixed
        self.sinks: list[str] = []
        self.called_end = self.sinks_begin + sum(has_sinks(sublayer.core) for sublayer in sublayers)
        self.called: list[Attention] = []
        self.vectors_begin = self.called_end + sum(called(sublayer.core) for sublayer in sublayers)
        self.vectors: list[str] = []
        # the place of the next norm's first tensor
        self.tensors = self.vectors_begin + sum(len(vectors_in(sublayer)) for sublayer in sublayers)

    def program(self, y: str) -> Program:
        """The program that gives y."""
        first = self.sublayers, self.sizes, tuple(self.inputs), tuple(self.steps), y
        parts = tuple(self.groups), tuple(self.norms), tuple(self.dropouts), tuple(self.bottlenecks)
        others = tuple(self.mixtures), tuple(self.order), tuple(self.sinks), tuple(self.called)
        return Program(*first, *parts, *others, tuple(self.vectors), self.tensors)

    def sublayer(self, sublayer: SubLayer, x: str, read: bool) -> str:
        """Its steps; the name of what it gives. read: a norm of the next one reads that."""
        core, out, after = sublayer.core, sublayer.norm_out, sublayer.norm_after_sum
        name, self.scaled, self.entries = name_of(core), sublayer.scaled, sublayer.entries
        if not sublayer.parallel:
            self.entered = x, x if sublayer.norm_in is None else self.norm(f"{name}.h", x, sublayer.norm_in)
        before, h = self.entered
        # a norm behind the product reads it on the way back, and so does a vector that trains
        keep: Level | None = None if out is None and not sublayer.learns else "projections"
        make = self.core if sublayer.connection is None else self.cut
        branch = make(name, h, sublayer, None if sublayer.behind else keep)
        if sublayer.behind:
            branch = self.bottleneck(f"{name}.adapted", branch, sublayer, keep, before)
        if out is not None:
            branch = self.norm(f"{name}.n", branch, out)
        rescales = self.rescales and out is None and sublayer.connection is None
        held = rescales or calls_all(core)
        if sublayer.vector is not None:
            branch, held = self.sized(name, branch, sublayer.vector, sublayer.learns, held), False
        if sublayer.drop is not None:
            self.steps.append(DropStep(branch, f"{name}.dropped", self.drop(sublayer.drop), held))
            branch = f"{name}.dropped"
        normed, scale = read or after is not None, cast("float", sublayer.scale)
        if sublayer.per_token is not None:
            self.steps.append(Add(branch, x, f"{name}.t", sublayer.per_token.learns, scale, held))
            x, scale, held = f"{name}.t", 1.0, False
            branch = self.of_tokens(x, sublayer.per_token)
        factor = None if sublayer.factor is None else len(self.vectors)
        self.vectors += [] if sublayer.factor is None else [sublayer.factor]
        given = branch, x, f"{name}.r", normed, scale, held, factor
        if sublayer.of_sum:
            self.steps.append(AddWide(*given, wide=f"{name}.wide"))
            return self.adapted_sum(name, sublayer, normed)
        self.steps.append(Add(*given))
        return f"{name}.r" if after is None else self.norm(f"{name}.y", f"{name}.r", after)

    def sized(self, name: str, branch: str, path: str, learns: bool, held: bool) -> str:
        """The branch times a vector. learns, held: see ScaleBy."""
        at, y = len(self.vectors), f"{name}.sized"
        self.vectors.append(path)
        self.steps.append(ScaleBy(branch, y, at, self.vectors_begin + at, learns, held))
        return y

    def of_tokens(self, x: str, table: PerToken) -> str:
        """What is made of x and of vectors of tokens, which is added to x."""
        at, first = len(self.vectors), self.vectors_begin + len(self.vectors)
        self.vectors += [f"{path}.weight" for path in (table.enter, table.leave)]
        self.inputs.append(TOKENS)
        given = table.features, self.sizes.act, at, first, table.learns
        self.steps.append(OfTokens(x, "tokens.p", *given))
        return self.norm("tokens.n", "tokens.p", table.norm)

    def adapted_sum(self, name: str, sublayer: SubLayer, normed: bool) -> str:
        """The sum with what the bottleneck behind it adds. normed: a norm reads that, the one behind the sum
        among them, by which the bottleneck reads the sum too."""
        after, r, n = sublayer.norm_after_sum, f"{name}.r", f"{name}.adapted"
        place = None if after is None else self.norm_place(after)
        seen = r if after is None else self.norm(f"{name}.seen", r, after, place)
        self.bottleneck(n, f"{name}.wide", sublayer, "projections" if normed else None, seen, r)
        return n if after is None else self.norm(f"{name}.y", n, after, place)

    @property
    def rescales(self) -> bool:
        """Whether what the core gives is scaled, which reads it on the way back."""
        return not self.scaled.isdisjoint(("o", "down"))

    def core(self, name: str, h: str, sublayer: SubLayer, keep: Level | None) -> str:
        """What its core makes of h."""
        core, behind = sublayer.core, len(self.bottlenecks) if sublayer.behind else None
        keep = "projections" if self.rescales else keep
        if isinstance(core, RoutedMlp):
            return self.routed(name, h, core, keep, behind)
        if isinstance(core, Mlp):
            return self.mlp(name, h, core, keep, behind)
        if core.called:
            return self.call(name, h, core, keep, behind)
        return self.attention(name, h, core, keep, behind)

    def cut(self, name: str, h: str, sublayer: SubLayer, keep: Level | None) -> str:
        """The same, summed over the ranks that share it; what is read on the way back is that sum."""
        connection, entered, left = cast("Connection", sublayer.connection), f"{name}.entered", f"{name}.left"
        self.within = number = self.sublayers.index(sublayer)
        enters = not called(sublayer.core)  # what is called enters by itself
        self.steps += [Enter(h, entered, number, connection)] if enters else []
        branch = self.core(name, entered if enters else h, sublayer, None)
        self.within = None
        self.steps.append(Leave(branch, left, number, connection, keep, self.rescales))
        return left

    def bottleneck(
        self, n: str, y: str, sublayer: SubLayer, keep: Level | None, x: str, total: str | None = None
    ) -> str:
        """n = y + up(act(down(y))), or with x for the y that is read. total: the rounded sum that y is."""
        at = len(self.bottlenecks)
        self.bottlenecks.append(sublayer.bottleneck_at(sublayer.of_sum))
        self.order.append(Drawing("bottleneck", at))
        first, reads = self.linears_end + 4 * at, x if sublayer.beside or sublayer.of_sum else None
        self.steps.append(Bottleneck(y, n, sublayer.bottleneck, at, first, keep, reads, total))
        return n

    def norm(self, h: str, x: str, norm: Norm, place: tuple[int, int] | None = None) -> str:
        """h = norm(x). place: of a norm that has one already."""
        place = place or self.norm_place(norm)
        self.steps.append(Normalize(x, h, norm.kind == "rms", self.sizes.eps, *place))
        return h

    def norm_place(self, norm: Norm) -> tuple[int, int]:
        """Its place among the norms, and that of its first tensor."""
        self.norms.append(norm)
        first = self.tensors
        self.tensors += 1 if norm.kind == "rms" else 2
        return len(self.norms) - 1, first

    def drop(
        self, path: str, over: Literal["features", "heads"] | None = None, head: int | None = None
    ) -> int:
        """The place of a dropout, which is drawn now. over, head: see Drawing."""
        self.dropouts.append(path)
        self.order.append(Drawing("drop", len(self.dropouts) - 1, self.within, over, head))
        return len(self.dropouts) - 1

    def group(self, kind: GroupKind, group: LinearGroup, unscaled: bool = False) -> GroupPlace:
        """The next group. unscaled: what reads it finds the way back through what scales it."""
        first = TENSORS * sum(len(one.roles) for one in self.groups)
        roles = tuple(role for role, _ in group.members)
        paths = tuple(dict.fromkeys(path for _, path in group.members))  # once of a linear that is several
        scaled, enters = not self.scaled.isdisjoint(roles), not self.entries.isdisjoint(roles)
        # a product of two lies on no grid that they were rounded to; GELU's of a large number almost does
        read = scaled and roles == ("gate", "up") and self.sizes.act != "relu"
        here = scaled and not read
        self.groups.append(GroupPlace(kind, roles, paths, first, here, here and unscaled, read, enters))
        over: Literal["features"] | None = "features" if kind in ("out", "down") else None
        self.order.append(Drawing("group", len(self.groups) - 1, self.within, over))
        return self.groups[-1]

    def linears(
        self,
        group: GroupPlace,
        x: str,
        s: str,
        y: str,
        keep: Level | None,
        low: Level,
        behind: int | None = None,
    ) -> str:
        """y = x W^T + bias + s b^T. behind: the bottleneck that reads y."""
        at, norm = self.groups.index(group), self.made_by_norm(x)
        if norm is not None and norm.into is None:
            norm.into = at, group
        filled = norm is not None and norm.into == (at, group)
        self.steps += [Low(x, s, at, group, low), Product(x, s, y, at, group, keep, norm, behind, filled)]
        return y

    def made_by_norm(self, x: str) -> Normalize | None:
        """The norm that gives x, as it is or as it enters a sub-layer."""
        enters = [step for step in self.steps if isinstance(step, Enter) and step.connection == "whole"]
        same = next((step.x for step in enters if step.y == x), x)
        return next((step for step in self.steps if isinstance(step, Normalize) and step.h == same), None)

    def call(self, name: str, h: str, core: Attention, keep: Level | None, behind: int | None) -> str:
        """o = core(h), as the model's own module computes it, or a, behind which there is a product."""
        at, first, whole = len(self.called), self.called_end, calls_all(core)
        self.called.append(core)
        self.called_end += core.called
        self.order.append(Drawing("core", at))
        self.inputs += ["table"] * core.tabled
        roles = tuple(role for role in core.region.sites if whole or role != "o")
        given = at, first, core.called, roles, keep if whole else "all", whole, core.tabled
        self.steps.append(CallCore(h, f"{name}.o" if whole else f"{name}.a", *given))
        return f"{name}.o" if whole else self.left(name, f"{name}.a", core, keep, behind)

    def attention(self, name: str, h: str, core: Attention, keep: Level | None, behind: int | None) -> str:
        """o = attention(h) W_o."""
        return self.left(name, self.attend(name, self.sources(name, h, core), core), core, keep, behind)

    def left(self, name: str, a: str, core: Attention, keep: Level | None, behind: int | None) -> str:
        """o = a W_o."""
        out = self.group("out", LinearGroup((("o", core.out),)))
        return self.linears(out, a, f"{name}.s_o", f"{name}.o", keep, "input", behind)

    def sources(self, name: str, h: str, core: Attention) -> list[str]:
        """Queries, keys and values as the linears give them, normed and turned: in one value, or those of h
        and those of the memory."""
        sizes, sources = self.sizes, []
        # attention reads what is made of them, which is kept in their place
        traded = core.exchange is not None and core.exchange.kind == "ulysses"
        for at, group in enumerate(core.groups):
            roles = "".join(role for role, _ in group.members)
            reads = h if at == 0 else "memory"
            self.inputs += [] if reads in (*self.inputs, h) else [reads]
            s, raw = f"{name}.s" if at == 0 else f"{name}.s_{roles}", f"{name}.{roles}"
            plain, turned = core.q_norm is None, core.rotary or core.q_norm is not None
            place = self.group("in", group, unscaled=bool(core.rotary) and plain)
            gone = plain and (turned or (traded and not place.scaled))
            kept: Level | None = None if gone else "projections"
            y = f"{raw}.raw" if turned else raw
            sources.append(self.linears(place, reads, s, y, kept, "projections"))
        borrows = core.lending is not None and core.lending.borrows
        if core.q_norm is not None and (borrows or core.k_norm is not None):
            own, first = self.norm_place(core.q_norm)
            if core.k_norm is not None:
                self.norm_place(core.k_norm)
            step = NormWidths if core.q_norm.over == "features" else NormHeads
            keyed = core.v_norm is not None and "v" not in dict(core.groups[0].members)
            how = core.v_norm is not None, keyed, core.q_norm.kind == "layer", core.pairs in SIDE_BY_SIDE
            counts = sizes.heads, 0 if borrows else sizes.kv_heads, sizes.eps
            self.steps.append(step(f"{raw}.raw", raw, *counts, own, first, *how))
            sources = [raw, KEYS] if borrows else [raw]
            self.inputs += [KEYS] if borrows else []
        elif core.rotary:
            whole, at = (sizes.heads, sizes.kv_heads, sizes.head_dim), self.groups.index(place)
            self.steps += turning(core, raw, whole, at if place.scaled else None, not traded)
            sources = [raw]
        return sources

    def attend(self, name: str, sources: list[str], core: Attention) -> str:
        """What attention gives, all heads of own tokens."""
        sizes, exchange, a = self.sizes, core.exchange, f"{name}.a"
        assert isinstance(core.scale, float), "the scale of the scores is read off the block before"
        how = sum(isinstance(step, Attend) for step in self.steps)
        own = whole = sizes.heads, sizes.kv_heads, sizes.head_dim
        turned = bool(core.rotary) or core.q_norm is not None
        trades = exchange is not None and exchange.kind == "ulysses"
        if exchange is not None and exchange.kind == "gather":
            self.steps.append(Gather(sources[0], f"{name}.keys", *whole, how, exchange, turned))
            sources, turned = [sources[0], f"{name}.keys"], False
        elif exchange is not None and trades:
            self.steps.append(Trade(sources[0], f"{name}.traded", *whole, how, exchange, turned))
            sources, turned, held = [f"{name}.traded"], False, exchange.kv_heads[exchange.index]
            own = held * (sizes.heads // sizes.kv_heads), held, sizes.head_dim
        if core.lending is not None and core.lending.lends:
            self.steps.append(Lend(sources[0], sizes.heads * sizes.head_dim))
        if core.bias is not None:
            self.inputs.append("bias")
        bias, given = None if core.bias is None else "bias", (core.window, exchange, core.softcap)
        step = Attend(tuple(sources), a, *own, core.causal, core.scale, how, turned, None, bias, *given)
        self.steps.append(step)
        if core.sinks is not None:
            step.read_sinks(len(self.sinks), self.sinks_begin + len(self.sinks))
            self.sinks.append(f"{core.at}.{core.sinks}")
        if core.drop is not None:
            step.drop = self.drop(core.drop, "heads", None if step.traded is None else step.traded.first)
        if exchange is None or not trades:
            return a
        self.steps.append(TradeBack(a, f"{a}.tokens", *whole, how, exchange))
        return f"{a}.tokens"

    def mlp(self, name: str, h: str, core: Mlp, keep: Level | None, behind: int | None) -> str:
        """d = act(h W_up) W_down."""
        up = self.group("up", core.up)
        self.linears(up, h, f"{name}.s", f"{name}.u", "all", "all")
        drop = None if core.drop is None else self.drop(core.drop, "features")
        down = self.group("down", LinearGroup((("down", core.down),)))
        above, at, gated = len(self.groups) - 2, len(self.groups) - 1, up.roles != ("up",)
        names = f"{name}.u", f"{name}.s", f"{name}.s_down", f"{name}.d"
        self.steps.append(Activated(*names, self.sizes.act, gated, above, at, down, drop, keep, behind))
        return f"{name}.d"

    def routed(self, name: str, h: str, core: RoutedMlp, keep: Level | None, behind: int | None) -> str:
        """d = the sum over the chosen experts, and the shared one."""
        at = len(self.mixtures)
        own = h, at, self.mixtures_begin + OF_MIXTURE * at, self.made_by_norm(h)
        self.mixtures.append(core)
        route = Route(*own, name, core.chosen, bool(core.normed), core.rounded, not core.held)
        d, kept = f"{name}.d", keep if core.shared is None else None
        make, act = spread_experts if core.held else experts, core.act or self.sizes.act
        self.steps += [route, *make(name, core, own, route, act, behind, kept)]
        if core.shared is None:
            return d
        e = self.mlp("shared", h, core.shared, "projections", None)
        self.steps.append(AddShared(*own, d, e, f"{name}.gate", f"{name}.all", keep))
        return f"{name}.all"
