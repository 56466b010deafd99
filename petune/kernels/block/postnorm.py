"""A post-norm encoder block (BERT, BART's encoder), forward and backward by hand.

        q | k | v = x W_qkv      a = attention(q, k, v)      t = x + drop(a W_o)      h = norm1(t)
        u = h W_up               m = act(u)                  z = h + drop(m W_down)   y = norm2(z)

The names are those of the code; s of a group is the low-rank input of its update (petune/kernels/block/linear.py). Tensors are [m, width].
Rungs keep what they keep in petune/kernels/block/prenorm.py: `all` everything but h and m, `projections` all but u, `attention` x and a.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from petune.kernels.block import attention as attending
from petune.kernels.block.config import Frame, Kept, joined
from petune.kernels.block.mlp import WithMlp
from petune.kernels.block.packed_linear import Dropping, Group, Rows, Sink


class Normed(NamedTuple):
    """What a norm read and found: total, mean, 1 / std."""

    total: Tensor
    mean: Tensor
    rstd: Tensor


class PostNorm(WithMlp):
    """One call of a block, or its backward pass. groups: q|k|v, o, up, down. norms: weight and bias of norm1, then of norm2.

    drops: the dropouts of the two connections, None where there is none.
    """

    def __init__(
        self, frame: Frame, groups: Sequence[Group], norms: Sequence[Tensor | None], drops: tuple[Dropping | None, Dropping | None]
    ) -> None:
        self.frame, self.ops = frame, frame.ops
        self.qkv, self.o, self.up, self.down = groups
        self.norms, self.drops = cast("Sequence[Tensor]", norms), drops
        self.norms_at = groups[-1].first + 4

    # ------------------------------------------------------------ forward

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        """(y, what the rung keeps, x among it)."""
        keep = self.frame.rung.keep
        kept: Kept = {"x": x}
        qkv, s = self.qkv(x)
        out, lse = attending.forward(*self.frame.heads_of(qkv), self.frame.how)
        a = out.flatten(1)
        if keep in ("all", "projections"):
            kept |= {"qkv": qkv, "s": s}
        if keep != "input":
            kept |= {"a": a, "lse": lse}
        del qkv, out
        found = []
        for rows in self._tiles(len(x)):
            o, s_o = self.o(a[rows])
            h, inlet = self.up.inlet(o)
            first = self._norm(0, o, x[rows], h)[1]
            u, s_up = self.up(h, inlet)
            d, s_down = self._activated(u, s_up)
            y, last = self._norm(1, d, h)
            tile: Kept = {"s_o": s_o, "s_down": s_down, "y": y}
            if keep in ("all", "projections"):
                tile |= {"t": first.total, "t_mean": first.mean, "t_rstd": first.rstd}
                tile |= {"z": last.total, "z_mean": last.mean, "z_rstd": last.rstd}
            if keep == "all":
                tile |= {"u": u, "s_up": s_up}
            found.append(tile)
            del o, h, inlet, u, d, y, first, last, tile
        kept |= {name: joined([tile[name] for tile in found]) for name in found[0]}
        return kept.pop("y"), kept

    def _norm(self, at: int, x: Tensor, residual: Tensor, out: Tensor | None = None) -> tuple[Tensor, Normed]:
        drop = self.drops[at]
        weight, bias = self.norms[2 * at : 2 * at + 2]
        dropped = x if drop is None else drop(x, self.rows)
        y, mean, rstd, total = self.ops.layer_norm(dropped, weight, bias, self.frame.eps, residual=residual, out=out)
        return y, Normed(total, mean, rstd)

    # ------------------------------------------------------------ backward

    def backward(self, dy: Tensor, kept: Kept, needs_x: bool, sink: Sink) -> Tensor | None:
        """dx, or None where nobody needs it; gradients of what trains go into `sink`."""
        x: Tensor = kept["x"]
        qkv, s, a, lse = (kept.get(name) for name in ("qkv", "s", "a", "lse"))
        if a is None:
            qkv, s = self.qkv(x)
            out, lse = attending.forward(*self.frame.heads_of(qkv), self.frame.how)
            a = out.flatten(1)
        found: list[tuple[Tensor, Tensor]] = []
        for rows in self._tiles(len(dy)):
            part = {name: None if value is None else value[rows] for name, value in kept.items() if name in _OF_ROWS}
            found.append(self._half_backward(dy[rows], x[rows], a[rows], part, sink))
        da, dt = (cast("Tensor", joined([piece[at] for piece in found])) for at in (0, 1))
        del found, dy
        if qkv is None:
            qkv, s = self.qkv(x)
        return self._attention_backward(da, dt, x, (qkv, s), a, lse, needs_x, sink)

    def _half_backward(self, dy: Tensor, x: Tensor, a: Tensor, kept: Kept, sink: Sink) -> tuple[Tensor, Tensor]:
        """The gradients of a, and of x by way of the connection, for some rows."""
        first, last, h, u, s_up = self._middle(x, a, kept)
        dz, dd = self._norm_backward(1, dy, last, sink)
        du, db = self._down_backward(dd, u, s_up, kept["s_down"], sink)
        dh, ds = self.up.dproducts(du)
        self.up.learn(sink, du, Rows.of(h), s_up, ds, db=db)
        dt, do = self._norm_backward(0, self.up.dupdated(dh, ds).add_(dz), first, sink)
        da, ds = self.o.dproducts(do)
        self.o.learn(sink, do, Rows.of(a), kept["s_o"], ds)
        return self.o.dupdated(da, ds), dt

    def _middle(self, x: Tensor, a: Tensor, kept: Kept) -> tuple[Normed, Normed, Tensor, Tensor, Tensor | None]:
        """What both norms read, h, u and s of the up projection, from what is kept."""
        weight, bias = self.norms[:2]
        if kept.get("t") is not None:
            first, last = (Normed(kept[name], kept[f"{name}_mean"], kept[f"{name}_rstd"]) for name in ("t", "z"))
            h, inlet = self.up.inlet(x)
            self.ops.layer_norm(first.total, weight, bias, self.frame.eps, out=h)
            u, s_up = (kept["u"], kept["s_up"]) if kept.get("u") is not None else self.up(h, inlet)
            return first, last, h, u, s_up
        h, inlet = self.up.inlet(x)
        first = self._norm(0, self.o.product(a, kept["s_o"]), x, h)[1]
        u, s_up = self.up(h, inlet)
        d = self._activated(u, s_up)[0]
        return first, self._norm(1, d, h)[1], h, u, s_up

    def _norm_backward(self, at: int, dy: Tensor, read: Normed, sink: Sink) -> tuple[Tensor, Tensor]:
        """The gradient of the residual, and that of what was added to it."""
        own = self.norms_at + 2 * at
        trains = sink.needs[own] or sink.needs[own + 1]
        total, dweight, dbias = self.ops.layer_norm_backward(dy, read.total, self.norms[2 * at], read.mean, read.rstd, None, trains)
        sink.add(own, dweight)
        sink.add(own + 1, dbias)
        drop = self.drops[at]
        return total, total if drop is None else drop(total, self.rows)

    def _attention_backward(
        self, da: Tensor, dt: Tensor, x: Tensor, first: tuple[Tensor, Tensor | None], a: Tensor, lse: Any, needs_x: bool, sink: Sink
    ) -> Tensor | None:
        """dx: through attention and the q | k | v projection, plus `dt`, past them."""
        frame, (qkv, s) = self.frame, first
        out = a.view(len(a), frame.heads, frame.head_dim)
        grads = attending.backward(da.view_as(out), *frame.heads_of(qkv), out, lse, frame.how)
        dqkv = torch.cat(grads, 1).flatten(1)
        dx, ds = self.qkv.dproducts(dqkv)
        self.qkv.learn(sink, dqkv, Rows.of(x), s, ds)
        return self.qkv.dupdated(dx, ds).add_(dt) if needs_x else None


_OF_ROWS = ("t", "t_mean", "t_rstd", "z", "z_mean", "z_rstd", "u", "s_up", "s_o", "s_down")
