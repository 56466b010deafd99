"""What ranks hold of a model: bytes of stretches of its blocks, by those of all blocks and of a half."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from petune.estimate.fused_room import FusedBlocks
from petune.parallel.plan import Sharding


@dataclass(frozen=True)
class Bytes:
    """Of a stretch of blocks, or of what lies beside them: frozen and tuned weights; all that an optimizer
    adds to these; copies that autocast makes; what is kept for each row, and once."""

    frozen: float = 0.0
    tuned: float = 0.0
    trains: float = 0.0
    copies: float = 0.0
    row: float = 0.0
    once: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(  # written out, as a search adds tens of thousands
            self.frozen + other.frozen,
            self.tuned + other.tuned,
            self.trains + other.trains,
            self.copies + other.copies,
            self.row + other.row,
            self.once + other.once,
        )

    def __sub__(self, other: Bytes) -> Bytes:
        return self + other * -1

    def __mul__(self, times: float) -> Bytes:
        return Bytes(*(one * times for one in self.all))

    __rmul__ = __mul__

    @property
    def all(self) -> tuple[float, ...]:
        """Every number."""
        return self.frozen, self.tuned, self.trains, self.copies, self.row, self.once


@dataclass(frozen=True)
class Rest:
    """Where a rank stands: the stretch of blocks it holds, rows of a micro-batch, passes on their way, how
    weights are sharded over how many replicas; whether blocks may be fused under its plan."""

    start: int
    end: int
    rows: float
    passes: float = 1.0
    sharding: Sharding | None = None
    shards: int = 1
    fused: bool = True


class Need(NamedTuple):
    """Bytes that a stage of a rank holds and keeps, and those that are alive beside while it computes."""

    stays: float
    beside: float

    @property
    def total(self) -> float:
        """Both."""
        return self.stays + self.beside


@dataclass(frozen=True)
class RankPart:
    """A rank's part of the model: its blocks and the two ends. scores: bytes of whole logits of a row, which
    fused blocks do not make."""

    blocks: tuple[Bytes, ...]
    before: Bytes
    behind: Bytes
    scores: float
    fused: FusedBlocks | None = None

    @cached_property
    def sums(self) -> tuple[Bytes, ...]:
        """Of the blocks before each, and of all."""
        return tuple(accumulate(self.blocks, initial=Bytes()))

    @cached_property
    def largest(self) -> Bytes:
        """Of the block that has most."""
        return max(self.blocks, key=lambda one: sum(one.all))

    def stretch(self, start: int, end: int) -> Bytes:
        """Of blocks [start, end) and the ends that are with them."""
        found = self.sums[end] - self.sums[start]
        found = found + self.before if start == 0 else found
        return found + self.behind if end == len(self.blocks) else found

    def as_fused(self, blocks: FusedBlocks) -> RankPart:
        """The same with what these keep, of which gradients go through as many."""
        found = []
        for number, one in enumerate(self.blocks):
            row, copies = blocks.of_block(number)
            found.append(replace(one, copies=copies, row=row * (one.row > 0), once=0.0))
        return replace(self, blocks=tuple(found), fused=blocks)


def between(whole: Bytes, half: Bytes, held: float, done: float) -> Bytes:
    """What a rank has that holds and does such parts of the whole, on the line through the whole and a
    half."""
    parts = (held, held, held, held, done, done)
    pairs = zip(whole.all, half.all, parts, strict=True)
    return Bytes(*(on_line(*three) for three in pairs))


def on_line(whole: float, half: float, done: float) -> float:
    """A number of a rank that does such a part of the work, on the line through those of all and of half."""
    return max(0.0, half + (whole - half) * (2 * done - 1))


def mixed(whole: Bytes, twice: Bytes, four: Bytes, held: float, copies: float) -> Bytes:
    """What a rank has of experts: of their tensors on the line through those of one, 0, and of all, 1; of
    what they keep on the line through copies of twice as many tokens, 0, and of four times as many, 1."""
    tensors, kept = twice + (whole - twice) * held, twice + (four - twice) * copies
    return replace(tensors, row=kept.row, once=kept.once)
