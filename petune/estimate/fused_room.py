"""What the blocks of a rank need in memory once they are fused, by rows: what the engine keeps, and what is
alive while a block runs (petune.kernels.memory.buffers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from petune.estimate.forecast import Sketch
from petune.estimate.fused_forecast import block_shapes
from petune.kernels.configs import Level
from petune.kernels.memory.buffers import kept_bytes, standing_bytes, working_set
from petune.kernels.memory.shape import BlockShape
from petune.models.spec import SubLayer
from petune.parallel.plan import ParallelPlan


@dataclass(frozen=True)
class FusedBlocks:
    """Blocks in order, of which a row has `tokens`."""

    shapes: tuple[BlockShape, ...]
    tokens: int

    def of_block(self, number: int) -> tuple[float, float]:
        """Bytes a row that one keeps which keeps all, and bytes that it holds beside its tensors."""
        shape = self.shapes[number]
        return kept_bytes(shape, "all") * shape.own(self.tokens), standing_bytes(shape)

    def busy(self, rows: float, again: bool) -> float:
        """Bytes alive while one runs, beside what blocks keep: the most of any. again: it keeps its input."""
        return max(one + (two - one) * (rows - 1) for one, two in self._working[again])

    @cached_property
    def _working(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Of each kind of block, of one row and of two: where it keeps all, and where its input."""
        kinds = set(self.shapes)
        return [_working(one, "all", self.tokens) for one in kinds], [
            _working(one, "input", self.tokens) for one in kinds
        ]

    def in_full(self, whole: FusedBlocks) -> FusedBlocks:
        """These with sizes of the `whole` ones, where ranks have own tokens between sub-layers or around
        attention, else the whole ones. What is gathered is kept beside own tokens and grows with nobody's
        share, so whole blocks, which gather nothing, are not what a larger share comes to."""
        pairs = zip(self.shapes, whole.shapes, strict=True)
        return replace(self, shapes=tuple(_enlarged(own, all_) for own, all_ in pairs))


def fused_blocks_of(drawn: Sketch, plan: ParallelPlan, held: Sequence[nn.Module]) -> FusedBlocks | None:
    """Those of the first rank of `plan` on GPUs, whose modules are `held` and changed; None where not all
    would be fused."""
    shapes = block_shapes(drawn, plan, held)
    return FusedBlocks(tuple(shapes), max(drawn.work.tokens.values())) if shapes else None


def _enlarged(own: BlockShape, whole: BlockShape) -> BlockShape:
    gathers = any(_gathers(one) for one in own.sublayers)
    if own.share == 1 and not gathers:
        return whole
    heads, kv_heads, columns = whole.heads, whole.kv_heads, whole.columns
    sublayers = tuple(_of_all(one) if gathers else one for one in own.sublayers)
    return replace(
        own,
        heads=heads,
        kv_heads=kv_heads,
        columns=columns,
        experts=whole.experts,
        share=1.0,
        sublayers=sublayers,
    )


def _gathers(sublayer: SubLayer) -> bool:
    """Whether attention has the keys and values of all tokens beside its own."""
    exchange = getattr(sublayer.core, "exchange", None)
    return exchange is not None and exchange.kind == "gather"


def _of_all(sublayer: SubLayer) -> SubLayer:
    """The sub-layer of a rank that has all tokens."""
    if not _gathers(sublayer):
        return sublayer
    core: Any = sublayer.core
    return replace(sublayer, core=replace(core, exchange=replace(core.exchange, shares=(1,), index=0)))


def _working(shape: BlockShape, keep: Level, tokens: int) -> tuple[int, int]:
    own = shape.own(tokens)
    return working_set(shape, keep, own), working_set(shape, keep, 2 * own)
