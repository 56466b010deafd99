"""A pre-norm block (Llama and its kin), forward and backward by hand.

        h = norm1(x)      q | k | v = turn(h W_qkv)      a = attention(q, k, v)      r = x + a W_o
        h = norm2(r)      u = gate | up = h W_gu         m = act(gate) * up          y = r + m W_down

What of this is kept for the backward pass is a `Rung`; the rest is computed again, the MLP tile by tile if asked, and the product with
W_down never, as nothing before it depends on it. Tensors are [m, width], m all the tokens of the call; the code has the names above, and s
of a group is the low-rank input of its update (petune/kernels/block/linear.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor

from petune.kernels.block import attention as attending
from petune.kernels.block.config import Frame, Kept, joined
from petune.kernels.block.mlp import WithMlp
from petune.kernels.block.packed_linear import Group, Rows, Sink


class Projected(NamedTuple):
    """The first half of a block up to attention: q | k | v, s of the group, 1 / rms(x)."""

    qkv: Tensor
    s: Tensor | None
    rstd: Tensor


class PreNorm(WithMlp):
    """One call of a block, or its backward pass: groups and norms as they are at this moment.

    groups: q|k|v, o, gate|up (or up alone), down. norms: weights of norm1 and norm2, and of the norms of query and key heads or None.
    angles: cos, sin [p, head_dim] of the rotary positions, p dividing m.
    """

    def __init__(self, frame: Frame, groups: Sequence[Group], norms: Sequence[Tensor | None], angles: tuple[Tensor, Tensor]) -> None:
        assert norms[0] is not None and norms[1] is not None
        self.frame, self.ops = frame, frame.ops
        self.qkv, self.o, self.up, self.down = groups
        self.norm1, self.norm2, self.head_norms = norms[0], norms[1], (norms[2], norms[3])
        self.norms_at = groups[-1].first + 4  # where the norms' tensors begin among the block's
        self.angles = angles

    # ------------------------------------------------------------ forward

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        """(y, what the rung keeps, x among it)."""
        keep = self.frame.rung.keep
        kept: Kept = {"x": x}
        first = self._project(x)
        out, lse = attending.forward(*self.frame.heads_of(self._turned(first.qkv)), self.frame.how)
        a = out.flatten(1)
        if keep in ("all", "projections"):
            kept |= {"qkv": first.qkv, "s": first.s, "rstd": first.rstd}
        if keep != "input":
            kept |= {"a": a, "lse": lse}
        del first, out
        return self._second_half(x, a, kept), kept

    def _project(self, x: Tensor) -> Projected:
        h, inlet = self.qkv.inlet(x)
        rstd = self.ops.rms_norm(x, self.norm1, self.frame.eps, out=h)[1]
        qkv, s = self.qkv(h, inlet)
        return Projected(qkv if self._turns_later else self._turn_(qkv), s, rstd)

    def _turn_(self, qkv: Tensor) -> Tensor:
        """q and k turned by their positions, in place."""
        turned: Tensor = self.ops.rope_(qkv, *self.angles, self.frame.heads + self.frame.kv_heads)
        return turned

    @property
    def _turns_later(self) -> bool:
        """Whether heads are normed before they are turned, so that q | k | v is kept as it was before."""
        return self.head_norms[0] is not None

    def _turned(self, qkv: Tensor) -> Tensor:
        """q | k | v as attention reads it."""
        if not self._turns_later:
            return qkv
        frame, out = self.frame, qkv.clone()
        for weight, columns in zip(self.head_norms, self._head_columns(), strict=True):
            assert weight is not None
            normed, _, _ = self.ops.rms_norm(qkv[:, columns].reshape(-1, frame.head_dim), weight, frame.eps)
            out[:, columns] = normed.view(len(qkv), columns.stop - columns.start)
        return self._turn_(out)

    def _head_columns(self) -> tuple[slice, slice]:
        """The columns of q and of k."""
        q = self.frame.heads * self.frame.head_dim
        return slice(0, q), slice(q, q + self.frame.kv_heads * self.frame.head_dim)

    def _second_half(self, x: Tensor, a: Tensor, kept: Kept) -> Tensor:
        """y; adds to `kept` what the rung keeps of r, u and the low-rank inputs, which cost next to nothing."""
        keep, found = self.frame.rung.keep, []
        for rows in self._tiles(len(x)):
            o, s_o = self.o(a[rows])
            h, rstd, r, inlet = self._connected(o, x[rows])
            del o
            u, s_up = self.up(h, inlet)
            del h, inlet
            d, s_down = self._activated(u, s_up)
            tile: Kept = {"s_o": s_o, "s_down": s_down}
            if keep in ("all", "projections"):
                tile |= {"r": r, "rstd2": rstd}
            if keep == "all":
                tile |= {"u": u, "s_up": s_up}
            del u
            found.append(tile | {"y": d.add_(r)})
            del r, d
        kept |= {name: joined([tile[name] for tile in found]) for name in found[0]}
        y: Tensor = kept.pop("y")
        return y

    def _connected(self, o: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(h, 1 / rms(r), r, the inlet that h lies in), r = x + o, or x itself."""
        h, inlet = self.up.inlet(x)
        read, residual = (x, None) if o is None else (o, x)
        _, rstd, r = self.ops.rms_norm(read, self.norm2, self.frame.eps, residual=residual, out=h)
        return h, rstd, r, inlet

    # ------------------------------------------------------------ backward

    def backward(self, dy: Tensor, kept: Kept, needs_x: bool, sink: Sink) -> Tensor | None:
        """dx, or None where nobody needs it; gradients of what trains go into `sink`."""
        x: Tensor = kept["x"]
        first, a, lse = _first_of(kept), kept.get("a"), kept.get("lse")
        if a is None:
            first = self._project(x)
            out, lse = attending.forward(*self.frame.heads_of(self._turned(first.qkv)), self.frame.how)
            a = out.flatten(1)
            del out
        dr = self._mlp_backward(dy, x, a, kept, sink)
        first = first or self._project(x)
        dqkv = self._through_attention(dr, a, lse, first.qkv, kept.pop("s_o"), sink)
        s, rstd = first.s, first.rstd
        kept.clear()  # what came back from the host or was made again is in the way from here on
        del a, lse, first
        return self._through_projection(dqkv, dr, x, s, rstd, needs_x, sink)

    def _mlp_backward(self, dy: Tensor, x: Tensor, a: Tensor, kept: Kept, sink: Sink) -> Tensor:
        """The gradient of r, tile by tile."""
        found: list[Tensor | None] = []
        for rows in self._tiles(len(dy)):
            part = {name: None if value is None else value[rows] for name, value in kept.items() if name in _OF_ROWS}
            r, rstd, u, s_up, h = self._middle(x[rows], a[rows], part)
            du, db = self._down_backward(dy[rows], u, s_up, part["s_down"], sink)
            del u
            dh, ds = self.up.dproducts(du)
            entered = Rows.rms(r, self.norm2, rstd, partial(self._normed, r)) if h is None else Rows.of(h)
            self.up.learn(sink, du, entered, s_up, ds, db=db)
            dh = self.up.dupdated(dh, ds)
            del du, h, entered
            dr, dweight = self.ops.rms_norm_backward(dh, r, self.norm2, rstd, dy[rows], sink.needs[self.norms_at + 1])
            sink.add(self.norms_at + 1, dweight)
            found.append(dr)
        return cast("Tensor", joined(found))

    def _normed(self, r: Tensor) -> Tensor:
        h: Tensor = self.ops.rms_norm(r, self.norm2, self.frame.eps)[0]
        return h

    def _middle(self, x: Tensor, a: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """r, 1 / rms(r), u, s of gate | up, and h where it had to be made again."""
        r, rstd, u = kept.get("r"), kept.get("rstd2"), kept.get("u")
        if r is not None and rstd is not None and u is not None:
            return r, rstd, u, kept["s_up"], None
        o = self.o.product(a, kept["s_o"]) if r is None else None
        h, rstd, r, inlet = self._connected(o, x if r is None else r)
        del o
        u, s_up = self.up(h, inlet)
        return r, rstd, u, s_up, h

    def _through_attention(self, dr: Tensor, a: Tensor, lse: Any, qkv: Tensor, s: Tensor | None, sink: Sink) -> Tensor:
        """The gradient of q | k | v as the projection gave it."""
        frame = self.frame
        da, ds = self.o.dproducts(dr)
        self.o.learn(sink, dr, Rows.of(a), s, ds)
        da = self.o.dupdated(da, ds)
        out = a.view(len(a), frame.heads, frame.head_dim)
        grads = attending.backward(da.reshape(out.shape), *frame.heads_of(self._turned(qkv)), out, lse, frame.how)
        del da
        dqkv: Tensor = self.ops.rope_backward(*grads, *self.angles)
        if self._turns_later:
            self._heads_backward(dqkv, qkv, sink)
        return dqkv

    def _through_projection(
        self, dqkv: Tensor, dr: Tensor, x: Tensor, s: Tensor | None, rstd: Tensor, needs_x: bool, sink: Sink
    ) -> Tensor | None:
        """dx: through the projection and the norm, and past them."""
        needs_h = needs_x or sink.needs[self.norms_at]  # not in the first block of a model whose embeddings are frozen
        dh, ds = self.qkv.dproducts(dqkv) if needs_h else (None, self.qkv.dlow(dqkv))
        entered = Rows.rms(x, self.norm1, rstd, lambda: self.ops.rms_norm(x, self.norm1, self.frame.eps)[0])
        self.qkv.learn(sink, dqkv, entered, s, ds)
        if dh is None:
            return None
        dh = self.qkv.dupdated(dh, ds)
        del dqkv
        dx: Tensor
        dx, dweight = self.ops.rms_norm_backward(dh, x, self.norm1, rstd, dr, sink.needs[self.norms_at])
        sink.add(self.norms_at, dweight)
        return dx

    def _heads_backward(self, dqkv: Tensor, qkv: Tensor, sink: Sink) -> None:
        """Through the norms of query and key heads, in place of `dqkv`."""
        width = self.frame.head_dim
        for at, (weight, columns) in enumerate(zip(self.head_norms, self._head_columns(), strict=True)):
            assert weight is not None
            heads = qkv[:, columns].reshape(-1, width)
            _, rstd, _ = self.ops.rms_norm(heads, weight, self.frame.eps)
            grad = dqkv[:, columns].reshape(-1, width)
            dheads, dweight = self.ops.rms_norm_backward(grad, heads, weight, rstd, None, sink.needs[self.norms_at + 2 + at])
            dqkv[:, columns] = dheads.view(len(qkv), columns.stop - columns.start)
            sink.add(self.norms_at + 2 + at, dweight)


_OF_ROWS = ("r", "rstd2", "u", "s_up", "s_o", "s_down")


def _first_of(kept: Kept) -> Projected | None:
    qkv, rstd = kept.get("qkv"), kept.get("rstd")
    return None if qkv is None or rstd is None else Projected(qkv, kept["s"], rstd)
