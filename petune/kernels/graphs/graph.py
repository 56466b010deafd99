"""A recording for one bucket: the buffers it reads and writes, and what a batch puts into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.block.attention import Backend
from petune.kernels.block.call import BlockLayers, Call, Draws
from petune.kernels.block.drawing import Places, Side, sides
from petune.kernels.block.halves import calls_of_halves
from petune.kernels.block.layout import BIAS, MEMORY, Layout, angles_of, memory_in_autocast
from petune.kernels.block.lent_steps import OF_ONE, TOKENS, to_come, vectors_of
from petune.kernels.block.module import FusedBlock
from petune.kernels.block.varlen import Segments, each_row
from petune.kernels.block.watchers import hooked
from petune.kernels.graphs.bucket import Bucket, Size, Slots
from petune.kernels.graphs.passes import Gate, HalvedPasses, Passes, RecordedBlock
from petune.kernels.graphs.recorder import CudaRecorder, Replay
from petune.kernels.graphs.weights import Learned, Weights
from petune.models.stack import Arguments
from petune.rng.context import Running, bound, bound_to

Meeting = tuple[Tensor, Tensor, float]
_NO_KERNEL = "attention within segments has no kernel here, and reads their lengths on the host"


def handed_on(
    calls: Sequence[Arguments], blocks: Sequence[FusedBlock]
) -> tuple[list[Arguments], list[Arguments]]:
    """(the calls of blocks with the memory as autocast has it; the same with what blocks before them will
    hand on, the bias of the first and keys)."""
    once = {id(call): memory_in_autocast(call) for call in calls}  # most blocks share theirs
    calls = [once[id(call)] for call in calls]
    bias = calls[0].get(BIAS) if blocks[0].distances is None else blocks[0].distances
    lent = to_come([block.spec for block in blocks], calls[0]["hidden_states"])
    later = {id(call): call | {BIAS: bias} | lent for call in once.values()}
    return calls, [calls[0], *(later[id(call)] for call in calls[1:])]


class Arrival:
    """What enters a stack: hidden states [b, t, w], an encoder's [c, s, w], cos and sin [p, d] of rotary
    positions for each kind of block, and the kind of each, none where blocks read none; the segments of both;
    the form of each attention of each block; what drops out in each block; a bias by distance [heads, 2
    longest - 1] that an earlier stage has handed on; a table of positions that attention scores, and what
    says how far tokens are from one another, by distance. trains: whether hidden states, the encoder's, the
    bias, the table and the vectors of tokens need gradients. vectors: of the tokens of each block, [b, t, f];
    meeting: on a ladder, what its gates mix in, [levels, b, t, w], the
    gates [levels] and their temperature. laid: where the tokens are cut across ranks, those that each has in
    the recording; inlet: rows of hidden states there, [m, w]; halved: whether both halves of the rows go
    through in turns; turned_apart: whether each row has rotary positions of its own."""

    def __init__(
        self,
        calls: Sequence[Arguments],
        blocks: Sequence[FusedBlock],
        here: Running,
        meeting: Meeting | None = None,
        halved: bool = False,
    ) -> None:
        self.halved, call, block = halved, calls[0], blocks[0]
        self.hidden = hidden = cast("Tensor", call["hidden_states"])
        self.memory = memory = cast("Tensor | None", call.get(MEMORY))
        program, turned = block.spec.program, any(one.spec.program.rotary for one in blocks)
        both = zip(calls, blocks, strict=True) if turned else ()
        turns = ((one["position_embeddings"], own.spec.program.sizes.head_dim) for one, own in both)
        given = {id(angles[0]): (angles, width) for angles, width in turns}
        self.angles = [angles_of(*one, program.pairs) for one in given.values()]
        self.kinds = tuple([*given].index(id(one["position_embeddings"][0])) for one in calls if turned)
        self.turned_apart = turned and len(call["position_embeddings"][0]) > 1
        self.segments, self.across = segments, across = _sides(hidden, memory, here)
        tokens = sum(here.sizes) or hidden.shape[1]
        longest = tokens if segments is None else segments.longest
        layout = Layout(len(hidden), longest, segments, None if across is None else across.longest, across)
        with bound_to(here):
            self.backends, self.longest = _forms(blocks, hidden, layout), layout.row
        self.bias = cast("Tensor | None", call.get(BIAS))
        self.draws: Sequence[Draws] = ()
        self.meeting = meeting
        scored = (core.table.positions for core in block.spec.called)
        named = {one.distances: call.get(one.distances) for one in scored if one is not None}
        self.apart = {name: value for name, value in named.items() if value is not None}
        self.table = block.table(call)
        distances = block.distances if self.bias is None else self.bias
        inputs = hidden, memory, distances, self.table
        handed = zip(blocks, calls, strict=True) if TOKENS in program.inputs else ()
        self.vectors = [cast("Tensor", vectors_of(own.spec, one)).to(hidden.dtype) for own, one in handed]
        learned = any(one.requires_grad for one in self.vectors)
        self.trains = (*(one is not None and one.requires_grad for one in inputs), learned)
        # who asks for the keys that blocks share finds none of a recording
        self.asked = bool(call.get("return_shared_kv_states"))
        angles = [(cos.dtype, 0 if segments is not None else len(cos)) for cos, _ in self.angles]
        self.laid, self.folded = here.laid or here.sizes, here.folded
        angled = (*angles, *self.kinds)
        kind = self.backends, hidden.dtype, self.trains, angled, self.folded, self.laid, halved
        on = hidden.device.type  # what blocks call computes as autocast says
        rounding = (torch.is_autocast_enabled(on), torch.get_autocast_dtype(on)) if block.spec.called else ()
        self.bucket = Bucket.of((len(hidden), tokens), segments, (*kind, *rounding), across)
        self.inlet = len(hidden) * self.laid[here.rank] if self.laid else self.bucket.tokens

    def refusal(self, blocks: Sequence[FusedBlock]) -> str | None:
        """Why no pass of these blocks can be recorded, or None."""
        if self.bias is not None and self.bias.dim() == 4:
            return "it is handed a bias of relative positions"
        if self.asked:
            return "the keys that its blocks share are asked for (return_shared_kv_states)"
        if self.segments is not None and "sdpa" in chain(*self.backends) and self.hidden.is_cuda:
            return _NO_KERNEL
        if blocks[0].spec.called:
            if self.segments is None:
                return "what its blocks call reads a mask"
            if self.hidden.is_cuda and not all(block.scores(self.hidden) for block in blocks):
                return _NO_KERNEL
        return "there are hooks on its blocks" if hooked(blocks) else None

    def distances(self, block: FusedBlock, longest: int) -> Tensor | None:
        """The bias by distance up to `longest`, made of the table of the first block, or what was handed on
        with zeros where no two tokens are so far apart; None where blocks have none."""
        room = longest - self.longest
        return block.bias(None, longest) if self.bias is None else F.pad(self.bias, (room, room))


def _forms(blocks: Sequence[FusedBlock], hidden: Tensor, layout: Layout) -> tuple[tuple[Backend, ...], ...]:
    """The form of each attention of each block; blocks of one program drop out alike, and are asked once."""
    found: dict[int, tuple[Backend, ...]] = {}
    for block in blocks:
        if id(block.spec.program) not in found:
            found[id(block.spec.program)] = block.forms(hidden, layout)
    return tuple(found[id(block.spec.program)] for block in blocks)


def _sides(hidden: Tensor, memory: Tensor | None, here: Running) -> tuple[Segments | None, Segments | None]:
    """The segments of a stack's tokens and of its memory. With a memory both have some, rows of equal length
    too: so batches of any lengths share recordings."""
    if memory is None:
        return here.segments, None
    both = (here.segments, hidden), (here.memory, memory)
    own, across = (given or each_row(x) for given, x in both)
    return own, across


def drawn(
    name: str, numbered: Sequence[tuple[int, FusedBlock]], weights: Weights, arrival: Arrival, here: Running
) -> list[Draws]:
    """What drops out in each block, as if each ran by itself at its site."""
    with bound_to(here):
        layout = Layout.of(arrival.hidden, arrival.memory, cut=bool(arrival.laid))
    found, places = [], Places(layout, arrival.hidden, arrival.memory)
    for (number, block), parts in zip(numbered, weights.parts, strict=True):
        with bound_to(replace(here, site=f"{name}.{number}", drawn=0)):
            found.append(block.draws(parts, places))
    return found


class Graph:
    """A recording of both passes for one bucket, and the buffers it reads and writes. used: the call of the
    stack that used it last."""

    used = 0

    def __init__(
        self, arrival: Arrival, block: FusedBlock, rooms: Sequence[Tensor], learned: Learned
    ) -> None:
        self.bucket, self.backends, self.learned = arrival.bucket, arrival.backends, learned
        self.laid, self.halved, self.turned_apart = arrival.laid, arrival.halved, arrival.turned_apart
        self.folded = arrival.folded
        inlet, self.outlet, *rooms = rooms
        self.gates, self.meeting, self.vectors = list[Gate](), list[Tensor](), list[Tensor]()
        if arrival.meeting is not None:
            below, *rooms = rooms
            self._meet(below, arrival.meeting)
        if arrival.vectors:
            vectors, *rooms = rooms
            self.vectors = [vectors]
        memory = rooms
        device, own = inlet.device, arrival.bucket.own
        self.slots = self._slots(own, device) if arrival.bucket.segmented else None
        self.across = self._slots(arrival.bucket.memory, device)
        distances = arrival.distances(block, own.longest)
        bias = None if distances is None else torch.zeros_like(distances)
        table = None if arrival.table is None else torch.zeros_like(arrival.table)
        inlets = {"x": inlet, "memory": memory[0] if memory else None, "bias": bias, "table": table}
        self.apart = {name: value.new_zeros(2 * own.longest - 1) for name, value in arrival.apart.items()}
        self.inlets = [
            cast("Tensor", inlets[name]) for name in block.spec.program.inputs if name not in OF_ONE
        ]
        # attention on own tokens reads the positions of those
        turned = len(inlet) if any(block.spec.exchanges) else own.tokens
        self.kinds = arrival.kinds
        self.angles = [
            (cos.new_zeros(rows, cos.shape[1]), sin.new_zeros(rows, sin.shape[1]))
            for cos, sin in arrival.angles
            for rows in [turned if arrival.bucket.segmented else len(cos)]
        ]
        self._draw(arrival, block, (len(inlet), own.tokens, *map(len, memory)))
        self._forward: Replay
        self._backward: Replay

    def _draw(self, arrival: Arrival, block: FusedBlock, counts: Sequence[int]) -> None:
        """Make room for what is drawn. counts: tokens of each `Side`."""
        device = self.outlet.device
        self.places = {
            side: torch.zeros(count, dtype=torch.int64, device=device)
            for side, count in zip(get_args(Side), counts, strict=False)
        }
        self.bases = torch.zeros(sum(len(one.all) for one in arrival.draws), dtype=torch.int64, device=device)
        bases = iter(self.bases.split(1))
        every = [sides(block.spec.program, one) for one in arrival.draws]
        self.draws = [
            one.replaced(
                draw._replace(numbers=self.places[side], base=next(bases))
                for draw, side in zip(one.all, of_one, strict=True)
            )
            for one, of_one in zip(arrival.draws, every, strict=True)
        ]
        # which of all draws says where the tokens of a side are: those of a side say the same
        self.telling = {side: at for at, side in enumerate(chain.from_iterable(every))}

    def _meet(self, below: Tensor, meeting: Meeting) -> None:
        """Make the gates of a ladder, beside `below` [levels, m, w]."""
        _, given, temperature = meeting
        self.meeting = [below, torch.zeros_like(given)]
        self.dgates = torch.zeros_like(given)
        self.gates = [
            Gate(level, gate, dgate, temperature)
            for level, gate, dgate in zip(*self.meeting, self.dgates, strict=True)
        ]

    def _slots(self, size: Size | None, device: torch.device) -> Slots | None:
        if size is None:
            return None
        starts = torch.zeros(self.bucket.rows + 1, dtype=torch.int32, device=device)
        return Slots(starts, (size.longest,), None, (1, size.tokens))

    def calls(self, at: int, block: FusedBlock, parts: BlockLayers) -> tuple[Call, ...]:
        """The call of block number `at` of these as it is recorded, or those of both halves."""
        memory, angles = self.bucket.memory, self.angles[self.kinds[at]] if self.kinds else None
        memory_longest = None if memory is None else memory.longest
        batch = 1 if self.bucket.segmented else self.bucket.rows
        layout = Layout(batch, self.bucket.own.longest, self.slots, memory_longest, self.across)

        def call(layout: Layout, draws: Draws, angles: tuple[Tensor, Tensor] | None) -> Call:
            made = block.call(parts, block.hows(layout, self.backends[at], draws), draws, angles)
            if not block.spec.called:
                return made
            with bound(rows=None, segments=self.slots, host=()):
                return replace(made, called=block.core_calls(self.apart, draws, self.outlet[None]))

        def half(rows: slice) -> Call:
            own = self._of(rows, self.draws[at], angles)
            return call(layout._replace(batch=rows.stop - rows.start), *own)

        with bound(sizes=self.laid, folded=self.folded):
            if self.halved:
                return calls_of_halves(self.bucket.rows, self.turned_apart, half)
            return (call(layout, self.draws[at], angles),)

    def _of(
        self, rows: slice, draws: Draws, angles: tuple[Tensor, Tensor] | None
    ) -> tuple[Draws, tuple[Tensor, Tensor] | None]:
        """What drops out of some rows, and their rotary positions."""

        def part(x: Tensor) -> Tensor:
            each = len(x) // self.bucket.rows
            return x[rows.start * each : rows.stop * each]

        own = draws.replaced(draw._replace(numbers=part(draw.numbers)) for draw in draws.all)
        if angles is None or not self.turned_apart:
            return own, angles
        cos, sin = angles
        return own, (part(cos), part(sin))

    def record(self, recorder: CudaRecorder, pieces: Sequence[RecordedBlock]) -> None:
        """Record both passes. What they keep for one another is let go, so that other recordings may lie in
        the same memory."""
        passes = (
            HalvedPasses(pieces, self.inlets, self.outlet, self.bucket.rows)
            if self.halved
            else Passes(pieces, self.inlets, self.outlet)
        )
        with torch.no_grad(), torch.autocast(self.outlet.device.type, enabled=False):
            self._forward, self._backward = recorder.record(passes.forward, passes.backward)

    def place(self, arrival: Arrival) -> None:
        """Take in where the tokens of the next batch are, and what is drawn for it."""
        for room, value in zip(chain(*self.angles), chain(*arrival.angles), strict=True):
            room[: len(value)].copy_(value)
        for slots, size, segments in (
            (self.slots, self.bucket.own, arrival.segments),
            (self.across, self.bucket.memory, arrival.across),
        ):
            if slots is not None and size is not None and segments is not None:
                _send(size.starts(segments, self.bucket.rows - len(segments.lengths)), slots.starts)
        for name, room in self.apart.items():
            _centred(arrival.apart[name], room)
        drawn = [draw for one in arrival.draws for draw in one.all]
        if drawn:
            for side, at in self.telling.items():
                numbers = drawn[at].numbers
                self.places[side][: len(numbers)].copy_(numbers)
            if self.across is not None and arrival.across is not None:
                self.across.tokens[: arrival.across.total].copy_(arrival.across.tokens)
            _send([cast("int", draw.base) for draw in drawn], self.bases)

    def inputs_of(self, arrival: Arrival, block: FusedBlock) -> list[Tensor]:
        """What the first block is given: hidden states [b, t, w], an encoder's states, a bias up to the
        bucket's longest, a table of positions; then vectors of the tokens of all blocks [blocks, b, t, f]."""
        bias = arrival.distances(block, self.bucket.own.longest)
        own = block.inputs(arrival.hidden, arrival.memory, bias, arrival.table)
        return [*own, torch.stack(arrival.vectors)] if arrival.vectors else own

    def forward(self, *inputs: Tensor) -> Tensor:
        """The stack's output for `inputs_of`, then those of a meeting."""
        own, others = inputs[: len(self.inlets)], inputs[len(self.inlets) :]
        for room, value in zip(self.inlets, own, strict=True):
            fill(room, value)
        for room, value in zip((*self.vectors, *self.meeting), others, strict=True):
            _fill_levels(room, value)
        self._forward()
        return taken(self.outlet, inputs[0].shape)

    def backward(
        self, dy: Tensor, shapes: Sequence[torch.Size], needed: Sequence[bool]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """(the gradients of the inputs in their shapes, None where not `needed`; those of what trains)."""
        fill(self.outlet, dy)
        self._backward()
        found = [
            taken(room, shape) if need else None
            for room, shape, need in zip(self.inlets, shapes, needed, strict=False)
        ]
        for room, shape, need in zip(self.vectors, shapes[len(found) :], needed[len(found) :], strict=False):
            found.append(taken(room, shape) if need else None)
        if self.meeting:
            *_, below, _ = shapes
            found += [taken(self.meeting[0], below), self.dgates.clone()]
        return found, self.learned.taken()


def _send(numbers: Sequence[int], room: Tensor) -> None:
    """`numbers` to where they are read, without waiting."""
    room.copy_(torch.tensor(numbers, dtype=room.dtype, pin_memory=room.is_cuda), non_blocking=True)


def _centred(values: Tensor, room: Tensor) -> None:
    """`values` [2 n - 1] for each distance up to `room`'s; beyond the farthest known that of it, which leaves
    them in order."""
    middle, own = len(room) // 2, len(values) // 2
    near = min(middle, own)
    first, end = middle - near, middle + near + 1
    room[first:end].copy_(values[own - near : own + near + 1])
    room[:first].copy_(room[first])
    room[end:].copy_(room[end - 1])


def fill(room: Tensor, x: Tensor) -> None:
    """`x` [..., w] into the first rows, zeros into the others: what lies there may be of a larger batch."""
    rows = x.numel() // x.shape[-1]
    room[:rows].view(x.shape).copy_(x)
    if rows < len(room):
        room[rows:].zero_()


def _fill_levels(room: Tensor, x: Tensor) -> None:
    """`fill` for each of several levels, [levels, b, t, w] into [levels, m, w]; or a number for each."""
    if x.dim() == 1:
        room.copy_(x)
        return
    rows = x.flatten(1, -2)
    room[:, : rows.shape[1]].copy_(rows)
    if rows.shape[1] < room.shape[1]:
        room[:, rows.shape[1] :].zero_()


def taken(room: Tensor, shape: torch.Size) -> Tensor:
    """A copy of the first rows in a shape, or of those of each of several levels."""
    rows = shape[room.dim() - 2 : -1].numel()
    return room[..., :rows, :].clone(memory_format=torch.contiguous_format).view(shape)
