"""Memory in which linked GPUs write to one another, of a plan that need not be here: within blocks that they
share (petune.parallel.copy_engines), and between stages (petune.parallel.pipeline.linked_stage)."""

from __future__ import annotations

from petune.models.spec import Shape
from petune.parallel.copy_engines import ForetoldEngines
from petune.parallel.pipeline.linked_stage import rooms_of
from petune.parallel.plan import Cut, ParallelPlan
from petune.parallel.tensor.hooks import BOUNDARIES, EXCHANGES


def message_rooms(plan: ParallelPlan, shape: Shape, hidden: int, stacks: int = 1) -> int:
    """Bytes on a rank for hidden states of `hidden` bytes, of all tokens of a micro-batch in each of so many
    stacks."""
    between = rooms_of(len(plan.stages), plan.pp, stacks * hidden) if plan.pp > 1 else 0
    return between + (_within(plan.cut, shape, plan.tp, hidden) if plan.cut is not None else 0)


def _within(cut: Cut, shape: Shape, ranks: int, hidden: int) -> int:
    engines, feature, found = ForetoldEngines(ranks), hidden // shape.width, [(0, 0)]
    if "heads" in (cut.attention, cut.mlp):
        largest = max(cut.sequence) / sum(cut.sequence) if cut.sequence else 1.0
        boundary = BOUNDARIES[cut.connection](None, 0, cut.overlap, 1.0, largest, engines)
        found.append(boundary.room_bytes(hidden))
    if cut.attention == "sequence":
        exchange = EXCHANGES[cut.exchange](None, 0, cut.sequence, overlapped=cut.overlap, engines=engines)
        for one in shape.kinds or (shape,):
            queries, keys = (feature * heads * one.head_dim for heads in (one.heads, one.kv_heads))
            found.append(exchange.room_bytes(queries, keys))
    return max(map(sum, found))
