"""What pre-norm and post-norm blocks share: the tiles behind attention, the activation and the way back through the down projection."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from petune.kernels.block.config import Frame
from petune.kernels.block.packed_linear import Group, Rows, Sink
from petune.kernels.dispatch import Ops


class WithMlp:
    """A block with the groups o, up (gate | up where gated) and down behind its attention."""

    frame: Frame
    ops: Ops
    o: Group
    up: Group
    down: Group
    rows: slice | None = None  # of the tile in work

    def _tiles(self, m: int) -> Iterator[slice]:
        """The rows of each tile, which the groups and connections behind attention are told."""
        for rows in self.frame.tiles(m):
            self.rows = self.o.rows = self.up.rows = self.down.rows = rows
            yield rows
        self.rows = self.o.rows = self.up.rows = self.down.rows = None

    def _activated(self, u: Tensor, s: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(d, s of the down projection): the MLP from its activation on."""
        m, inlet = self.down.inlet(u)
        a = self.down.a if self.down.folds_input else None
        s_down = self.ops.activate(u, self.frame.act, self.frame.gated, self.up.deferred(s), a, self.up.paired, m)[1]
        if s_down is None:
            s_down = self.down.low(m)
        return self.down.product(m, s_down, inlet), s_down

    def _down_backward(self, dy: Tensor, u: Tensor, s_up: Tensor | None, s: Tensor | None, sink: Sink) -> tuple[Tensor, Tensor | None]:
        """du, and the gradient of up's stacked B where the kernel makes it."""
        frame, down = self.frame, self.down
        dm, ds = down.dproducts(dy)
        below = (ds, down.a) if ds is not None and down.folds_input else None
        if below is None:
            down.dupdated(dm, ds)
        entered = Rows.again(lambda: self.ops.activate(u, frame.act, frame.gated, self.up.deferred(s_up), None, self.up.paired)[0])
        du, db, da = self.ops.activate_backward(dm, u, frame.act, frame.gated, self.up.read(s_up), below, self.up.paired)
        down.learn(sink, dy, entered, s, ds, da=da)
        return du, db
