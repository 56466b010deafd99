"""What any rank of any plan needs in memory, without building it: blocks, shares and rows enter linearly.

A search asks for thousands of ranks. So the footprint (petune.estimate.footprint) is taken of the whole model
and, for each way to cut it, of one rank of two; of other shares a rank holds what lies on the line through
both. What a rank of a pipeline holds is what its blocks hold, with all they keep for the passes on their way.
Of blocks that a GPU would run fused it is what the engine keeps (petune.kernels.memory.buffers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from torch import Tensor, nn

from petune.estimate.activations import Saved
from petune.estimate.footprint import MOMENTS, ForwardPass, Held, cast_bytes, first_trained, held_by, saved_in
from petune.estimate.forecast import PROCESS, Sketch
from petune.estimate.fused_room import fused_blocks_of
from petune.estimate.message_rooms import message_rooms
from petune.estimate.rank_shares import fraction
from petune.estimate.slices import Bytes, Need, RankPart, Rest, between, mixed, on_line
from petune.kernels.block.cores import calls_cores
from petune.kernels.memory.block_step import WORKSPACE
from petune.kernels.memory.buffers import head_bytes
from petune.kernels.memory.policy_hook import rounded
from petune.models.spec import Family
from petune.models.stack import Stack
from petune.parallel.fsdp import is_light, weighed
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import ALONE, Cut, ParallelPlan, Sharding, features_of_block


class RankBytes:
    """Bytes that ranks of a sketched recipe need. again: blocks keep their input alone."""

    def __init__(self, drawn: Sketch) -> None:
        self.drawn, self.family = drawn, cast("Family", drawn.family)
        self.first = first_trained(drawn.model, self.family)
        self.slices: dict[object, tuple[RankPart, RankPart, RankPart]] = {}
        self.known: dict[object, tuple[Bytes, Bytes]] = {}
        self.ends: tuple[Bytes, Bytes] | None = None
        self.calls = calls_cores(self.family)
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
        tokens = fraction(cut.sequence, index) if cut.connection == "sequence" else 1.0
        shares = held, _mean(index, lists, self.features), tokens, fraction(cut.vocabulary, index)
        return self._needed(cut, shares, rest, again)

    def of_experts(self, held: float, copies: float, rest: Rest, again: bool) -> float:
        """What a rank needs that holds such a part of all experts. copies: of tokens that these see, for each
        that its own tokens make."""
        number, whole, (twice, four) = self.shape.experts, self._whole, self.spread
        at = (held * number - 1) / (number - 1), copies * number / 2 - 1
        span = rest.start, rest.end
        own = mixed(whole.stretch(*span), twice.stretch(*span), four.stretch(*span), *at)
        largest = mixed(whole.largest, twice.largest, four.largest, *at)
        return self._kept_and_standing(own, largest, rest, again, 1.0, 1.0).total + self.process

    @cached_property
    def spread(self) -> tuple[RankPart, RankPart]:
        """What a rank holds that has one expert of each mixture, where these see the copies of twice and of
        four times as many tokens as are its own."""
        plan = ParallelPlan(dp=2, shares=(1, 1), ep=2, experts=(1, self.shape.experts - 1))
        held = held_by(self.drawn.model, self.family, plan, Coordinate())
        work = replace(self.drawn.work, rows=4)
        return self._sums(held, plan, work), self._sums(held, replace(plan, shares=(1, 3)), work)

    def most(self, cut: Cut, rest: Rest, again: bool, memory: float) -> float:
        """The largest share of a cut that so much memory holds, at most 1."""
        by_sequence = cut.connection == "sequence"
        shares = [(share, share, share if by_sequence else 1.0, share) for share in (0.5, 1.0)]
        half, whole = (self._needed(cut, own, rest, again).total for own in shares)
        memory -= self.process
        if whole <= half:
            return float(whole <= memory)
        return min(1.0, 1.0 - (whole - memory) / (2 * (whole - half)))

    def _needed(self, cut: Cut | None, shares: tuple[float, ...], rest: Rest, again: bool) -> Need:
        """Of a rank with such parts of the tensors, of the work, of tokens between sub-layers, and of the
        vocabulary."""
        held, done, tokens, table = shares
        plain, fused, full = self._slices(cut)
        whole, half = (full, fused) if rest.fused else (self._whole, plain)
        span = rest.start, rest.end
        key = (self._kind(cut), rest.fused, span, held, done)  # passes, rows and shards are others each time
        if key not in self.known:
            pairs = (whole.stretch(*span), half.stretch(*span)), (whole.largest, half.largest)
            own, largest = (between(*pair, held, done) for pair in pairs)
            self.known[key] = own, largest
        own, largest = self.known[key]
        busy = 0.0
        if whole.fused is not None and half.fused is not None:
            busy = on_line(whole.fused.busy(rest.rows, again), half.fused.busy(rest.rows, again), done)
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
        if plan.ep > 1:
            return False
        return all(self._slices(cut)[1].fused is not None for cut in (None, plan.cut))

    @cached_property
    def _whole(self) -> RankPart:
        return self._slices(None)[0]

    def _slices(self, cut: Cut | None) -> tuple[RankPart, RankPart, RankPart]:
        """What one of two ranks holds that share the model evenly, or all of it, as unfused and as fused
        blocks keep it; and the model as a rank of the cut would have it, fused, that did all of it."""
        key = self._kind(cut)
        if key not in self.slices and cut is not None and cut.vocabulary:
            plain, fused, full = self._slices(replace(cut, vocabulary=()))
            before, behind = self._ends(cut)
            plain, fused = (replace(one, before=before, behind=behind) for one in (plain, fused))
            self.slices[key] = plain, fused, full
        elif key not in self.slices:
            plan = ALONE if cut is None else ParallelPlan(tp=2, cut=self._halved(cut))
            held = held_by(self.drawn.model, self.family, plan, Coordinate())
            plain = fused = self._sums(held, plan, self.drawn.work)
            if (blocks := fused_blocks_of(self.drawn, plan, held.modules)) is not None:
                fused = plain.as_fused(blocks)
            full = fused if cut is None else self._slices(None)[1]
            if cut is not None and blocks is not None and full.fused is not None:
                full = full.as_fused(blocks.in_full(full.fused))
            self.slices[key] = plain, fused, full
        return self.slices[key]

    def _ends(self, cut: Cut) -> tuple[Bytes, Bytes]:
        """What one of two ranks holds before and behind the blocks that share the vocabulary evenly: the same
        of all cuts."""
        if self.ends is None:
            plan = ParallelPlan(tp=2, cut=self._halved(cut))
            held = held_by(self.drawn.model, self.family, plan, Coordinate())
            one = self._sums(held, plan, self.drawn.work)
            self.ends = one.before, one.behind
        return self.ends

    def _kind(self, cut: Cut | None) -> object:
        """What cuts have in common of which slices are the same. Blocks are so whether or not ranks hide what
        they say, but not fused if they call a core as it is."""
        if cut is None:
            return None
        apart = cut.overlap and self.calls
        return cut.attention, cut.mlp, cut.connection, cut.exchange, bool(cut.vocabulary), apart

    def _halved(self, cut: Cut) -> Cut:
        shape = self.shape
        group = shape.heads // shape.kv_heads
        keys = (shape.kv_heads - shape.kv_heads // 2, shape.kv_heads // 2)
        columns = (shape.columns - shape.columns // 2, shape.columns // 2)
        return replace(
            cut,
            heads=tuple(count * group for count in keys) if cut.heads else (),
            kv_heads=keys if cut.heads else (),
            columns=columns if cut.columns else (),
            sequence=(1, 1) if cut.sequence else (),
            vocabulary=(1, 1) if cut.vocabulary else (),
        )

    def _sums(self, held: Held, plan: ParallelPlan, work: ForwardPass) -> RankPart:
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
        table = {id(value) for value in cast("Any", model).get_input_embeddings().parameters()}
        others = [value for value in held.tensors() if id(value) not in inside]
        head = cast("Any", model).get_output_embeddings() if work.vocabulary_head else None
        ends |= {id(value) for value in (() if head is None else head.parameters())}
        early = [value for value in others if id(value) not in ends or id(value) in table]
        late = [value for value in others if id(value) in ends]
        entries = 0 if head is None else len(head.weight)
        scores = list(work.tokens.values())[-1] * entries * (work.itemsize + 8)
        return RankPart(tuple(blocks), self._of(early, Saved()), self._of(late, Saved()), scores)

    def _of(self, tensors: Iterable[Tensor], saved: Saved) -> Bytes:
        own = list(tensors)
        tuned = [value for value in own if value.requires_grad]
        size = sum(value.nbytes for value in tuned)
        return Bytes(
            frozen=sum(value.nbytes for value in own) - size,
            tuned=size,
            trains=size + MOMENTS * sum(value.numel() for value in tuned),
            copies=cast_bytes(tuned, self.drawn.work.itemsize),
            row=saved.row,
            once=saved.once,
        )


def _mean(index: int, lists: Sequence[Sequence[int]], weights: Sequence[int]) -> float:
    """A rank's part by several lists that share things out, of which there are so many; a half where there
    are none."""
    parts = [(fraction(one, index), weight) for one, weight in zip(lists, weights, strict=True) if one]
    return sum(part * weight for part, weight in parts) / sum(weight for _, weight in parts) if parts else 0.5
