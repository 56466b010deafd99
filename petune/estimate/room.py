"""What any rank of any plan needs in memory, without building it: blocks, shares and rows enter linearly.

A search asks for thousands of ranks. So the footprint (petune.estimate.footprint) is taken of the whole model
and, for each way to cut it, of one rank of two; of other shares a rank holds what lies on the line through
both. What a rank of a pipeline holds is what its blocks hold, with all they keep for the passes on their way.
Of blocks that a GPU would run fused it is what the engine keeps (petune.kernels.memory.buffers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from petune.estimate.activations import Saved
from petune.estimate.footprint import MOMENTS, Held, Pass, first_trained, held_by, saved_in
from petune.estimate.forecast import PROCESS, Sketch
from petune.estimate.fused_room import FusedBlocks, fused_blocks_of
from petune.estimate.message_rooms import message_rooms
from petune.kernels.memory.buffers import head_bytes
from petune.kernels.memory.policy import WORKSPACE
from petune.kernels.memory.policy_hook import rounded
from petune.models.spec import Family
from petune.models.stack import Stack
from petune.parallel.fsdp import is_light, weighed
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import ALONE, Cut, ParallelPlan, Sharding, features_of_block


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
        return Bytes(*(mine + its for mine, its in zip(self.all, other.all, strict=True)))

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
class _Slice:
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

    def as_fused(self, blocks: FusedBlocks) -> _Slice:
        """The same with what these keep, of which gradients go through as many."""
        found = []
        for number, one in enumerate(self.blocks):
            row, copies = blocks.of_block(number)
            found.append(replace(one, copies=copies, row=row * (one.row > 0), once=0.0))
        return replace(self, blocks=tuple(found), fused=blocks)


class Room:
    """Bytes that ranks of a sketched recipe need. again: blocks keep their input alone."""

    def __init__(self, drawn: Sketch) -> None:
        self.drawn, self.family = drawn, cast("Family", drawn.family)
        self.first = first_trained(drawn.model, self.family)
        self.slices: dict[object, tuple[_Slice, _Slice, _Slice]] = {}
        self.weighed = weighed(drawn.model)
        self.process = PROCESS[drawn.device]
        self.shape = self.family.shape(drawn.config)
        attention, mlp = features_of_block(self.family, self.shape)
        # what heads, columns and own tokens share out: weights over the width, and numbers of each token
        self.weights = attention, mlp * max(1, self.shape.experts)
        self.features = attention, mlp, 2 * self.shape.width
        self.longest = max(drawn.work.tokens.values())
        head = cast("Any", drawn.model).get_output_embeddings() if drawn.work.vocabulary_head else None
        self.vocabulary = 0 if head is None else len(head.weight)
        # of a block's input, for each row and each block that goes back
        self.input = self.shape.width * drawn.work.itemsize * self.longest

    def bytes(self, cut: Cut | None, index: int, rest: Rest, again: bool) -> float:
        """What rank `index` of a cut needs on its device for one stage, the process itself included."""
        return self.need(cut, index, rest, again).total + self.process

    def need(self, cut: Cut | None, index: int, rest: Rest, again: bool) -> Need:
        """What a stage needs on rank `index` of a cut."""
        if cut is None:
            return self._needed(None, (1.0, 1.0, 1.0, 1.0), rest, again)
        lists = cut.heads, cut.columns, cut.sequence
        held = _mean(index, lists[:2], self.weights)
        tokens = _part(cut.sequence, index) if cut.connection == "sequence" else 1.0
        table = _part(cut.vocabulary, index) if cut.vocabulary else 1.0
        return self._needed(cut, (held, _mean(index, lists, self.features), tokens, table), rest, again)

    def of_experts(self, held: float, copies: float, rest: Rest, again: bool) -> float:
        """What a rank needs that holds such a part of all experts. copies: of tokens that these see, for each
        that its own tokens make."""
        number, whole, (twice, four) = self.shape.experts, self._whole, self.spread
        at = (held * number - 1) / (number - 1), copies * number / 2 - 1
        span = rest.start, rest.end
        own = _mixed(whole.stretch(*span), twice.stretch(*span), four.stretch(*span), *at)
        largest = _mixed(whole.largest, twice.largest, four.largest, *at)
        return self._kept_and_standing(own, largest, rest, again, 1.0, 1.0).total + self.process

    @cached_property
    def spread(self) -> tuple[_Slice, _Slice]:
        """What a rank holds that has one expert of each mixture, where these see the copies of twice and of
        four times as many tokens as are its own."""
        plan = ParallelPlan(dp=2, shares=(1, 1), ep=2, experts=(1, self.shape.experts - 1))
        held = held_by(self.drawn.model, self.family, plan, Coordinate())
        work = replace(self.drawn.work, rows=4)
        return (
            self._sums(held, plan, work),
            self._sums(held, replace(plan, shares=(1, 3)), work),
        )

    def most(self, cut: Cut, rest: Rest, again: bool, memory: float) -> float:
        """The largest share of a cut that so much memory holds, at most 1."""
        by_sequence = cut.connection == "sequence"
        shares = [(share, share, share if by_sequence else 1.0, share) for share in (0.5, 1.0)]
        half, whole = (self._needed(cut, own, rest, again).total for own in shares)
        memory -= self.process
        return (
            min(1.0, 1.0 - (whole - memory) / (2 * (whole - half)))
            if whole > half
            else float(whole <= memory)
        )

    def _needed(self, cut: Cut | None, shares: tuple[float, ...], rest: Rest, again: bool) -> Need:
        """Of a rank with such parts of the tensors, of the work, of tokens between sub-layers, and of the
        vocabulary."""
        held, done, tokens, table = shares
        plain, fused, full = self._slices(cut)
        whole, half = (full, fused) if rest.fused else (self._whole, plain)
        own, largest = (
            _between(one, other, held, done)
            for one, other in (
                (whole.stretch(rest.start, rest.end), half.stretch(rest.start, rest.end)),
                (whole.largest, half.largest),
            )
        )
        busy = 0.0
        if whole.fused is not None and half.fused is not None:
            busy = _on_line(whole.fused.busy(rest.rows, again), half.fused.busy(rest.rows, again), done)
        return self._kept_and_standing(own, largest, rest, again, tokens, table, busy)

    def _kept_and_standing(
        self,
        own: Bytes,
        largest: Bytes,
        rest: Rest,
        again: bool,
        tokens: float,
        table: float,
        busy: float = 0.0,
    ) -> Need:
        """Of a rank with such blocks, tokens between them, and a part of the vocabulary. busy: of
        fused blocks, what one needs while it runs."""
        whole = self._whole
        kept, last = own.row * rest.rows + own.once, rest.end == len(whole.blocks)
        if again:
            kept = min(kept, (rest.end - rest.start) * self.input * tokens * rest.rows)
        kept *= rest.passes
        if busy:
            beside = WORKSPACE + max(busy, self._head(rest.rows, table) if last else 0.0)
        else:
            beside = whole.scores * table * rest.rows if last else 0.0
            beside += (largest.row * rest.rows + largest.once) * again
        return Need(self._standing(own, largest, rest) + kept + own.copies, beside)

    def _head(self, rows: float, table: float) -> float:
        """Bytes alive in a fused head over a part of the vocabulary."""
        tokens, vocabulary = int(rows * self.longest), int(self.vocabulary * table)
        return head_bytes(tokens, self.shape.width, vocabulary, self.drawn.work.itemsize)

    def _standing(self, own: Bytes, largest: Bytes, rest: Rest) -> float:
        """Weights, gradients and states, or a rank's shards of them with what is gathered at once."""
        every = own.frozen + own.tuned + own.trains
        if rest.sharding is None:
            return every
        whole, frozen = self._whole, rest.sharding.frozen
        outside = whole.before + whole.behind
        inside = 2 * largest if rest.sharding.reshard else own - outside
        spread, together = own.frozen * frozen, (inside + outside).frozen * frozen
        if not self._light(rest.sharding, rest.shards):
            spread += own.tuned + own.trains
            together += (inside + outside).tuned + 2 * largest.tuned + outside.tuned  # and gradients
        here = 0.0 if rest.sharding.offload else spread / rest.shards
        return every - spread + here + together

    def _light(self, sharding: Sharding, shards: int) -> bool:
        """Whether what trains stays whole; see `is_light`."""
        replicas = shards * sharding.replicas
        plan = ParallelPlan(dp=replicas, shares=(1,) * replicas, sharding=sharding)
        return is_light(self.weighed, plan)

    def messages(self, plan: ParallelPlan, rows: int) -> int:
        """Bytes in which ranks that are linked write to one another, of replicas of so many rows."""
        hidden = int(self.in_steps(-(-rows // plan.microbatches)) * self.input)
        stacks = len(self.drawn.work.tokens)
        return message_rooms(plan, self.shape, hidden, stacks) if self.fuses(plan) else 0

    def in_steps(self, rows: int) -> float:
        """Rows with as many tokens as the policy of fused blocks reckons with for so many: see its hook."""
        return rounded(rows * self.longest) / self.longest

    def fuses(self, plan: ParallelPlan) -> bool:
        """Whether blocks would be fused under a plan; those whose experts are shared out are counted as if
        they were not."""
        slices = (self._slice(cut, fused=True) for cut in (None, plan.cut))
        return plan.ep == 1 and plan.unfused is None and all(one.fused is not None for one in slices)

    @property
    def _whole(self) -> _Slice:
        return self._slice(None)

    def _slice(self, cut: Cut | None, fused: bool = False) -> _Slice:
        """The model, or what one of two ranks holds that share it evenly. fused: as fused blocks keep it."""
        return self._slices(cut)[fused]

    def _slices(self, cut: Cut | None) -> tuple[_Slice, _Slice, _Slice]:
        """As unfused and as fused blocks keep it; and the model as a rank of the cut would have it, fused,
        that did all of it."""
        kind = () if cut is None else (cut.attention, cut.mlp, cut.connection, cut.exchange, cut.overlap)
        key = (*kind, bool(cut and cut.vocabulary))
        if key not in self.slices:
            plan = ALONE if cut is None else ParallelPlan(tp=2, cut=self._halved(cut))
            held = held_by(self.drawn.model, self.family, plan, Coordinate())
            plain = fused = self._sums(held, plan, self.drawn.work)
            if (blocks := fused_blocks_of(self.drawn, plan, held.modules)) is not None:
                fused = plain.as_fused(blocks)
            full = fused if cut is None else self._slice(None, fused=True)
            if cut is not None and blocks is not None and full.fused is not None:
                full = full.as_fused(blocks.in_full(full.fused))
            self.slices[key] = plain, fused, full
        return self.slices[key]

    def _halved(self, cut: Cut) -> Cut:
        shape = self.shape
        group, keys = (
            shape.heads // shape.kv_heads,
            (shape.kv_heads - shape.kv_heads // 2, shape.kv_heads // 2),
        )
        columns = (shape.columns - shape.columns // 2, shape.columns // 2)
        return replace(
            cut,
            heads=tuple(count * group for count in keys) if cut.heads else (),
            kv_heads=keys if cut.heads else (),
            columns=columns if cut.columns else (),
            sequence=(1, 1) if cut.sequence else (),
            vocabulary=(1, 1) if cut.vocabulary else (),
        )

    def _sums(self, held: Held, plan: ParallelPlan, work: Pass) -> _Slice:
        (model,) = held.modules
        config = self.drawn.config
        blocks: list[Bytes] = []
        inside, ends = set[int](), set[int]()
        for order, stack in enumerate(part for part in model.modules() if isinstance(part, Stack)):
            kept = iter(saved_in(stack, config, self.family, plan, Coordinate(), work, self.first))
            ladder = cast("Any", stack._modules.get("side"))
            ends |= {id(value) for value in ladder.up.parameters()} if ladder and ladder.up else set()
            for index, block in stack.numbered:
                saves = [next(kept)] if self.first is not None and (order, index) >= self.first else []
                beside: list[nn.Module] = []
                if ladder is not None and ladder.has(index):
                    saves.append(next(kept))
                    beside = [ladder.blocks[index], ladder.down[index + 1]]
                tensors = [value for one in (block, *beside) for value in one.parameters()]
                inside |= set(map(id, tensors))
                blocks.append(self._of(tensors, sum(saves, Saved())))
        table = [value for value in cast("Any", model).get_input_embeddings().parameters()]
        others = [value for value in held.tensors() if id(value) not in inside]
        head = cast("Any", model).get_output_embeddings() if work.vocabulary_head else None
        ends |= {id(value) for value in (() if head is None else head.parameters())}
        early = [value for value in others if id(value) not in ends or any(value is one for one in table)]
        late = [value for value in others if id(value) in ends]
        scores = (
            list(work.tokens.values())[-1] * len(head.weight) * (work.itemsize + 8) if head is not None else 0
        )
        return _Slice(
            tuple(blocks),
            self._of(early, Saved()),
            self._of(late, Saved()),
            scores,
        )

    def _of(self, tensors: Iterable[Tensor], saved: Saved) -> Bytes:
        own = list(tensors)
        tuned = [value for value in own if value.requires_grad]
        size = sum(value.nbytes for value in tuned)
        itemsize = self.drawn.work.itemsize
        copies = sum(
            value.numel() * itemsize
            for value in tuned
            if value.dim() == 2 and value.element_size() > itemsize
        )
        return Bytes(
            sum(value.nbytes for value in own) - size,
            size,
            size + MOMENTS * sum(value.numel() for value in tuned),
            copies,
            saved.row,
            saved.once,
        )


def _between(whole: Bytes, half: Bytes, held: float, done: float) -> Bytes:
    """What a rank has that holds and does such parts of the whole, on the line through the whole and a
    half."""
    parts = (held, held, held, held, done, done)
    pairs = zip(whole.all, half.all, parts, strict=True)
    return Bytes(*(_on_line(*three) for three in pairs))


def _on_line(whole: float, half: float, done: float) -> float:
    """A number of a rank that does such a part of the work, on the line through those of all and of half."""
    return max(0.0, half + (whole - half) * (2 * done - 1))


def _mixed(whole: Bytes, twice: Bytes, four: Bytes, held: float, copies: float) -> Bytes:
    """What a rank has of experts: of their tensors on the line through those of one, 0, and of all, 1; of
    what they keep on the line through copies of twice as many tokens, 0, and of four times as many, 1."""
    tensors, kept = twice + (whole - twice) * held, twice + (four - twice) * copies
    return replace(tensors, row=kept.row, once=kept.once)


def _mean(index: int, lists: Sequence[Sequence[int]], weights: Sequence[int]) -> float:
    """A rank's part by several lists that share things out, of which there are so many; a half where there
    are none."""
    parts = [(_part(one, index), weight) for one, weight in zip(lists, weights, strict=True) if one]
    return sum(part * weight for part, weight in parts) / sum(weight for _, weight in parts) if parts else 0.5


def _part(shares: Sequence[int], index: int) -> float:
    return shares[index] / sum(shares)
