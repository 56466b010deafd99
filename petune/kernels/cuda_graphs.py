"""A fused stack as two CUDA graphs, forward and backward, inside one autograd node: what launching its kernels costs is paid once.

A block of a small model on a few thousand tokens keeps the device busy for less time than the host needs to launch its kernels. So the
launches of all blocks are recorded, for a `Bucket` of batches of about the same size, and replayed for every batch that fits:

        hidden [m, w] -> inlet -> | forward graph |  -> outlet -> y          dy -> outlet -> | backward graph | -> inlet -> dx, gradients

Segments need not be as many or as long as those of the recording: tokens that a batch lacks are rows of zeros in segments of their own,
whose outputs nobody reads and whose gradients are zero. A decoder that attends to an encoder has a second inlet for the encoder's states,
in as many segments; a bias by distance has a third. Addresses are part of a recording, values are not: weights may be trained, and LoRA's
factors are made from them inside. Dropout by index is a function of numbers that are values too: where the tokens lie in the batch,
and a word for each draw. Tensors that are moved or replaced make all recordings void.

What a forward graph leaves for its backward graph lies in a pool of memory that all graphs of a stack share,
so no other forward may be replayed in between: a `Turn` says whether one is on its way, and a second forward
pass runs block by block.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook

from petune.errors import UsageError
from petune.kernels.block.call import Call, Draws, Parts, Spec
from petune.kernels.block.guards import Guards
from petune.kernels.block.layout import Layout
from petune.kernels.block.module import BIAS, MEMORY, FusedBlock, angles_of, memory_in_autocast, places_in
from petune.kernels.block.steps import Values
from petune.kernels.block.unpad import Unpadded
from petune.kernels.block.varlen import Segments, of_rows
from petune.kernels.configs import Rung
from petune.kernels.memory import block_cost
from petune.kernels.memory.policy_hook import rounded, shape_of
from petune.log import say
from petune.models.stack import Call as Arguments
from petune.models.stack import Stack
from petune.rng.context import Running, bound_to

LAUNCH_BOUND = 1e-3  # predicted seconds of a block's forward pass, below which its launches take about as long
QUANTUM = 256  # tokens of a batch with segments are rounded up to a multiple of this, or of an eighth of the power of two below them
SLOTS = 8  # and so are its segments, with at least one slot for tokens it lacks
SHORTEST = 64  # the longest segment is rounded up to a power of two of at least this: it sizes a grid whose spare programs end at once
ONE_BY_ONE = 5  # replays that a batch without a recording loses (BERT-large on an H200: 28,000 tokens/s to 171,000)
RECORDING = 7  # replays that making one takes: a bucket gets its own when its batches have lost more without
LIMIT = 16  # recordings of a stack
PATIENCE = 256  # calls of the stack for which a recording is not dropped in favour of another

Run = Callable[[], None]


# ------------------------------------------------------------------ recordings


class Recorder(Protocol):
    """What turns the two passes of a stack into something that does the same again."""

    def refusal(self) -> str | None:
        """Why nothing can be recorded or replayed at this moment, or None."""
        ...

    def record(self, forward: Run, backward: Run) -> tuple[Run, Run]:
        """Both passes again, over the memory they are recorded on. Raises RuntimeError where one cannot be recorded."""
        ...


class CudaRecorder:
    """CUDA graphs of one device, which share a pool of memory and so must not be replayed between each other's two passes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def refusal(self) -> str | None:
        """See Recorder."""
        if torch.cuda.is_current_stream_capturing():
            return "the call is part of another CUDA graph"
        if torch.cuda.current_stream(self.device) != torch.cuda.default_stream(self.device):
            return "the call is not on the default stream"
        return None

    def record(self, forward: Run, backward: Run) -> tuple[Run, Run]:
        """See Recorder. Both run once before: kernels are compiled and plans made then, which a capture cannot."""
        with torch.cuda.device(self.device):
            forward()
            backward()
            return self._captured(forward), self._captured(backward)

    def _captured(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


# ------------------------------------------------------------------ sizes


class Size(NamedTuple):
    """Tokens of one side of a recording, and the most that one of its rows or slots takes."""

    tokens: int
    longest: int

    def starts(self, segments: Segments, spare: int) -> list[int]:
        """Where segments begin, then where the tokens they lack do, in `spare` slots of about one size; the total last."""
        lacking = self.tokens - segments.total
        return [*accumulate(segments.lengths, initial=0), *(segments.total + lacking * (slot + 1) // spare for slot in range(spare))]

    def holds(self, segments: Segments, spare: int) -> bool:
        """Whether segments fit, and the tokens they lack into `spare` slots: at least one each, at most `longest`."""
        lacking = self.tokens - segments.total
        return segments.longest <= self.longest and 0 < spare <= lacking <= spare * self.longest


@dataclass(frozen=True)
class Bucket:
    """The sizes of a recording.

    own: of the tokens that it computes on; memory: of an encoder's, None without one. rows: of equal length, or slots for segments of
    either side. kind: what else has to be the same.
    """

    own: Size
    rows: int
    segmented: bool
    kind: tuple[Any, ...]
    memory: Size | None = None

    @classmethod
    def of(cls, shape: Sequence[int], segments: Segments | None, kind: tuple[Any, ...] = (), memory: Segments | None = None) -> Bucket:
        """The bucket of hidden states of a `shape` [rows, tokens, ...], or [1, total, ...] in `segments`, and of as many of a memory."""
        if segments is None:
            return cls(Size(shape[0] * shape[1], shape[1]), shape[0], False, kind)
        rows, (own, *others) = _rounded([segments] if memory is None else [segments, memory])
        return cls(own, rows, True, kind, others[0] if others else None)

    @property
    def tokens(self) -> int:
        """That it computes on."""
        return self.own.tokens

    def holds(self, segments: Segments, memory: Segments | None = None) -> bool:
        """Whether the segments of both sides fit."""
        spare = self.rows - len(segments.lengths)
        return self.own.holds(segments, spare) and (memory is None or (self.memory is not None and self.memory.holds(memory, spare)))


def _rounded(sides: Sequence[Segments]) -> tuple[int, list[Size]]:
    """(slots, the size of each side), with room for the tokens that segments lack in slots of their own."""
    number = len(sides[0].lengths)
    longest = [1 << (max(SHORTEST, side.longest) - 1).bit_length() for side in sides]
    least = [side.total + SLOTS for side in sides]
    while True:
        tokens = [rounded(size, max(QUANTUM, (1 << size.bit_length() - 1) // 8)) for size in least]
        # at least, so that none of the slots is longer than the others
        spare = max(-(-(size - side.total) // most) for size, side, most in zip(tokens, sides, longest, strict=True))
        rows = rounded(number + spare, SLOTS)
        wanted = [max(size, side.total + rows - number) for size, side in zip(least, sides, strict=True)]  # a token for each slot
        if wanted == least:
            return rows, list(map(Size, tokens, longest))
        least = wanted


class Arrival:
    """What enters a stack: hidden states [b, t, w], an encoder's [c, s, w], cos and sin [p, d] of rotary positions, None where blocks read
    none; the segments of both; the form of each attention; what drops out in each block."""

    def __init__(self, call: Arguments, block: FusedBlock, here: Running) -> None:
        self.hidden = hidden = cast("Tensor", call["hidden_states"])
        self.memory = memory = cast("Tensor | None", call.get(MEMORY))
        self.angles = angles_of(call["position_embeddings"]) if block.spec.program.rotary else None
        self.segments, self.across = segments, across = _sides(hidden, memory, here)
        longest = hidden.shape[1] if segments is None else segments.longest
        layout = Layout(len(hidden), longest, segments, None if across is None else across.longest, across)
        self.backends = block.forms(hidden, layout)
        self.draws: Sequence[Draws] = ()
        trains = tuple(one is not None and one.requires_grad for one in (hidden, memory, block.distances))
        angles = None if self.angles is None else (self.angles[0].dtype, 0 if segments is not None else len(self.angles[0]))
        self.bucket = Bucket.of(hidden.shape, segments, (self.backends, hidden.dtype, trains, angles), across)


def _sides(hidden: Tensor, memory: Tensor | None, here: Running) -> tuple[Segments | None, Segments | None]:
    """The segments of a stack's tokens and of its memory. With a memory both have some, rows of equal length too: so batches of any
    lengths share recordings."""
    if memory is None:
        return here.segments, None
    both = (here.segments, hidden), (here.memory, memory)
    own, across = (given or of_rows(len(x), x.shape[0] * x.shape[1], x.device) for given, x in both)
    return own, across


class Slots(Segments):
    """Room for segments: only `starts` [rows + 1] says where they are, and it changes from replay to replay. `lengths` is the longest."""

    @property
    def spans(self) -> tuple[int, ...]:
        """See Segments; the host waits for it."""
        return tuple(self.starts.diff().tolist())

    @property
    def by_length(self) -> tuple[Tensor, ...]:
        """See Segments; the host waits for it."""
        return Segments(self.starts, self.spans, None, self.shape).by_length

    @cached_property
    def tokens(self) -> Tensor:
        """See Segments: room for them."""
        return torch.zeros(self.shape[1], dtype=torch.int64, device=self.starts.device)


# ------------------------------------------------------------------ the weights


class Learned:
    """Room for the gradients of what trains, one flat tensor for each dtype: graphs fill it, each backward pass gives away a copy."""

    def __init__(self, trained: Sequence[Tensor]) -> None:
        self.trained = trained
        sizes: dict[torch.dtype, list[int]] = defaultdict(list)
        for value in trained:
            sizes[value.dtype].append(value.numel())
        self.sizes, device = sizes, trained[0].device if trained else None
        self.flat = {dtype: torch.zeros(sum(own), dtype=dtype, device=device) for dtype, own in sizes.items()}
        self.rooms = self._views(self.flat)

    def taken(self) -> list[Tensor]:
        """A copy, one view for each tensor: whoever is given one may keep it."""
        return self._views({dtype: value.clone() for dtype, value in self.flat.items()})

    def _views(self, flat: dict[torch.dtype, Tensor]) -> list[Tensor]:
        pieces = {dtype: iter(value.split(self.sizes[dtype])) for dtype, value in flat.items()}
        return [next(pieces[value.dtype]).view(value.shape) for value in self.trained]


class Weights:
    """The tensors of a stack's blocks as they are at this moment, and what of them is part of a recording."""

    def __init__(self, blocks: Sequence[FusedBlock], parts: Sequence[Parts]) -> None:
        self.parts, self.programs = parts, [block.spec.program for block in blocks]
        self.tensors = [block.tensors(own) for block, own in zip(blocks, parts, strict=True)]
        places = [value for own in self.tensors for value in own]
        self.all = [value for value in places if value is not None]
        self.lay = self.addresses()
        self.scaled: list[tuple[object, float]] = [(part.scale, part.dropout) for own in parts for group in own.groups for part in group]
        self.scaled += [(part.activation, part.dropout) for own in parts for part in own.bottlenecks]
        self.modes = [(block.training, *block.spec.probabilities) for block in blocks]
        self.recorded = (
            [id(value) for value in places],  # of None too: an update may be passed by
            self.lay,
            [value.requires_grad for value in self.all],
            self.scaled,
            self.modes,
        )
        self.recordable = all(bank is None or bank.base.recordable for block in blocks for bank in block.spec.banks)
        self.alike = len({block.training and block.spec.attention_dropouts for block in blocks}) == 1
        self.guards: Guards | None = None  # see `current`

    def current(self, blocks: Sequence[FusedBlock]) -> bool:
        """Whether these are still the tensors of `blocks`, and what is part of a recording is as it was."""
        guards = self.guards
        if guards is None or not guards.hold(blocks):
            guards = Guards(blocks)
            if self.recorded != Weights(blocks, [block.linears() for block in blocks]).recorded:
                return False
            self.guards = guards
        return self.addresses() == self.lay and [value.requires_grad for value in self.all] == self.recorded[2]

    def addresses(self) -> list[int]:
        """Where the tensors lie now."""
        return [value.data_ptr() for value in self.all]

    @cached_property
    def trained(self) -> list[Tensor]:
        """Those that train."""
        return [value for value in self.all if value.requires_grad]

    @cached_property
    def drops(self) -> bool:
        """Whether anything drops out."""
        return any(dropout for _, dropout in self.scaled) or any(training and any(others) for training, *others in self.modes)

    @cached_property
    def undrawn(self) -> Sequence[Draws]:
        """What is drawn where nothing drops out."""
        return [Draws.nothing(parts, program) for parts, program in zip(self.parts, self.programs, strict=True)]


# ------------------------------------------------------------------ both passes


@dataclass(frozen=True)
class Piece:
    """One block of the two passes. needs: which of its tensors train; rooms: where their gradients go; given: which of its inputs need a
    gradient, the first of them because something below it trains."""

    call: Call
    tensors: Sequence[Tensor | None]
    needs: Sequence[bool]
    rooms: Sequence[Tensor]
    given: Sequence[bool]


class Passes:
    """The blocks one after the other, from inlets to outlet and, with a gradient in the place of each, back.

    inlets: hidden states [m, w], then what all blocks read beside them; outlet: [m, w].
    """

    def __init__(self, pieces: Sequence[Piece], inlets: Sequence[Tensor], outlet: Tensor) -> None:
        self.pieces, self.inlets, self.outlet = pieces, inlets, outlet
        self.kept: list[tuple[Piece, list[Tensor | None], Values]] = []  # factors stacked by the forward pass, and what it keeps

    def forward(self) -> None:
        """What the backward pass needs of this rests here until it has run."""
        self.kept.clear()
        x, *others = self.inlets
        for piece in self.pieces:
            x, kept, factors = piece.call.forward([x, *others], piece.tensors)
            self.kept.append((piece, factors, kept))
        self.outlet.copy_(x)

    def backward(self) -> None:
        """Gradients of what trains go into their rooms, those of the inputs into the inlets."""
        dx: Tensor | None = self.outlet
        sums: list[Tensor | None] = [None for _ in self.inlets[1:]]
        while self.kept:
            piece, factors, kept = self.kept.pop()
            if dx is None:
                continue
            (dx, *others), grads = piece.call.backward(dx, kept, factors, piece.tensors, piece.needs, piece.given)
            sums = [_added(*one) for one in zip(sums, others, self.inlets[1:], strict=True)]
            found = [grad for grad in grads if grad is not None]
            if found:
                assert len(found) == len(piece.rooms), "all that trains has a gradient"
                torch._foreach_copy_(list(piece.rooms), found)
            if not piece.given[0]:
                dx = None
        for inlet, grad in zip(self.inlets, (dx, *sums), strict=True):
            if grad is not None:
                inlet.copy_(grad)


def _added(found: Tensor | None, grad: Tensor | None, like: Tensor) -> Tensor | None:
    """The sum of what blocks find for an input that all of them read: in its dtype, as autograd adds it up."""
    if grad is None:
        return found
    grad = grad.view(like.shape).to(like.dtype)
    return grad if found is None else found.add_(grad)


class Graph:
    """A recording of both passes for one bucket, and the buffers it reads and writes. used: the call of the stack that used it last."""

    used = 0

    def __init__(self, arrival: Arrival, block: FusedBlock, rooms: Sequence[Tensor], learned: Learned) -> None:
        self.bucket, self.backends, self.learned = arrival.bucket, arrival.backends, learned
        inlet, self.outlet, *memory = rooms
        device, table = inlet.device, block.distances
        own = arrival.bucket.own
        self.slots, self.across = self._slots(own, device) if arrival.bucket.segmented else None, self._slots(arrival.bucket.memory, device)
        bias = None if table is None else table.new_zeros(table.shape[1], 2 * own.longest - 1)
        inlets = {"x": inlet, "memory": memory[0] if memory else None, "bias": bias}
        self.inlets = [cast("Tensor", inlets[name]) for name in block.spec.program.inputs]
        self.angles: tuple[Tensor, Tensor] | None = None
        if arrival.angles is not None:
            cos, sin = arrival.angles
            rows = own.tokens if arrival.bucket.segmented else len(cos)
            self.angles = cos.new_zeros(rows, cos.shape[1]), sin.new_zeros(rows, sin.shape[1])
        self.places = [torch.zeros(len(room), dtype=torch.int64, device=device) for room in (inlet, *memory)]
        self.bases = torch.zeros(sum(len(one.all) for one in arrival.draws), dtype=torch.int64, device=device)
        bases = iter(self.bases.split(1))
        self.reads = block.spec.program.across
        self.draws = [
            one.replaced(
                draw._replace(numbers=self.places[of], base=next(bases)) for draw, of in zip(one.all, one.sides(self.reads), strict=True)
            )
            for one in arrival.draws
        ]
        self._forward: Run
        self._backward: Run

    def _slots(self, size: Size | None, device: torch.device) -> Slots | None:
        if size is None:
            return None
        starts = torch.zeros(self.bucket.rows + 1, dtype=torch.int32, device=device)
        return Slots(starts, (size.longest,), None, (1, size.tokens))

    def call(self, block: FusedBlock, parts: Parts, draws: Draws) -> Call:
        """A block's call as it is recorded."""
        memory = self.bucket.memory
        layout = Layout(self.bucket.rows, self.bucket.own.longest, self.slots, None if memory is None else memory.longest, self.across)
        return block.call(parts, block.hows(layout, self.backends, draws), draws, self.angles)

    def record(self, recorder: Recorder, pieces: Sequence[Piece]) -> None:
        """Record both passes. What they keep for one another is let go, so that other recordings may lie in the same memory."""
        passes = Passes(pieces, self.inlets, self.outlet)
        with torch.no_grad(), torch.autocast(self.outlet.device.type, enabled=False):
            self._forward, self._backward = recorder.record(passes.forward, passes.backward)

    def place(self, arrival: Arrival) -> None:
        """Take in where the tokens of the next batch are, and what is drawn for it."""
        for room, value in zip(self.angles or (), arrival.angles or (), strict=True):
            room[: len(value)].copy_(value)
        sides = (self.slots, self.bucket.own, arrival.segments), (self.across, self.bucket.memory, arrival.across)
        for slots, size, segments in sides:
            if slots is not None and size is not None and segments is not None:
                _send(size.starts(segments, self.bucket.rows - len(segments.lengths)), slots.starts)
        drawn = [draw for one in arrival.draws for draw in one.all]
        if drawn:
            of = [side for one in arrival.draws for side in one.sides(self.reads)]
            for side, numbers in {side: draw.numbers for side, draw in zip(of, drawn, strict=True)}.items():
                self.places[side][: len(numbers)].copy_(numbers)
            if self.across is not None and arrival.across is not None:
                self.across.tokens[: arrival.across.total].copy_(arrival.across.tokens)
            _send([cast("int", draw.base) for draw in drawn], self.bases)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The stack's output for its inputs: hidden states [b, t, w], an encoder's states, a bias up to the bucket's longest."""
        for room, value in zip(self.inlets, inputs, strict=True):
            _fill(room, value)
        self._forward()
        return _taken(self.outlet, inputs[0].shape)

    def backward(self, dy: Tensor, shapes: Sequence[torch.Size], needed: Sequence[bool]) -> tuple[list[Tensor | None], list[Tensor]]:
        """(the gradients of the inputs in their shapes, None where not `needed`; those of what trains)."""
        _fill(self.outlet, dy)
        self._backward()
        found = [_taken(room, shape) if need else None for room, shape, need in zip(self.inlets, shapes, needed, strict=False)]
        return found, self.learned.taken()


def _send(numbers: Sequence[int], room: Tensor) -> None:
    """`numbers` to where they are read, without waiting."""
    room.copy_(torch.tensor(numbers, dtype=room.dtype, pin_memory=room.is_cuda), non_blocking=True)


def _fill(room: Tensor, x: Tensor) -> None:
    """`x` [..., w] into the first rows, zeros into the others: what lies there may be of a larger batch."""
    rows = x.numel() // x.shape[-1]
    room[:rows].view(x.shape).copy_(x)
    if rows < len(room):
        room[rows:].zero_()


def _taken(room: Tensor, shape: torch.Size) -> Tensor:
    """A copy of the first rows in a shape."""
    return room[: shape.numel() // shape[-1]].clone().view(shape)


# ------------------------------------------------------------------ autograd


class Turn:
    """One forward pass of a graph, on its way until its backward pass has run or nobody can ask for it any more."""

    def __init__(self, graph: Graph, weights: Weights) -> None:
        self.graph, self.weights = graph, weights
        self.spent = False

    def spend(self) -> None:
        """Begin the backward pass. Raises UsageError where what it needs is gone."""
        if self.spent:
            raise UsageError(
                "a second backward pass through blocks that run as CUDA graphs: what the first one needed is gone",
                remedy="call backward once, on the sum of the losses, or petune.kernels.cuda_graphs.ungraph(model) before training",
            )
        self.spent = True
        if self.weights.addresses() != self.weights.lay:
            raise UsageError(
                "weights were moved between the forward and the backward pass of blocks that run as CUDA graphs",
                remedy="move them between steps, or petune.kernels.cuda_graphs.ungraph(model) before training",
            )


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, turn: Turn, inputs: int, *values: Tensor) -> Tensor:
        ctx.turn, ctx.shapes = turn, [value.shape for value in values[:inputs]]
        ctx.save_for_backward(*turn.weights.all)  # the graph reads them itself; autograd complains of those that have changed since
        return turn.graph.forward(*values[:inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        turn: Turn = ctx.turn
        assert ctx.saved_tensors
        turn.spend()
        found, grads = turn.graph.backward(dy, ctx.shapes, ctx.needs_input_grad[2:])
        return None, None, *found, *grads


# ------------------------------------------------------------------ when


class Graphs:
    """A way through a fused stack (petune.models.stack.Whole) by recordings, each made once the batches of its bucket have lost more time
    without it than it takes. Segments that no recording holds get one at once: what is smaller and of their kind will use it too.

    Only where launches are what a block costs (`LAUNCH_BOUND`); only in training with gradients, without a mask, hooks on blocks,
    and with all activations kept on the device. Everything else goes block by block; a reason that is worth knowing is said once.
    """

    def __init__(self, make: Callable[[torch.device], Recorder] = CudaRecorder) -> None:
        self.make = make
        self.said: set[str] = set()
        self.worth: dict[Bucket, bool] = {}  # whether a recording of it helps
        self.turn: Callable[[], Turn | None] = lambda: None
        self.calls = 0
        self._begin(None)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what comes back from a file, has no recordings: they are of these very tensors."""
        return Graphs, (self.make,)

    def _begin(self, weights: Weights | None) -> None:
        """Forget all recordings, and begin with these weights."""
        self.weights, self.learned = weights, Learned(weights.trained if weights else ())
        self.recorder: Recorder | None = None
        self.graphs: dict[Bucket, Graph] = {}
        self.lost: dict[Bucket, float] = defaultdict(float)  # replays, for want of a recording of just this size
        self.rooms: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def takes(self, stack: Stack, call: Arguments) -> bool:
        """See petune.models.stack.Whole: a call that is whole, unmasked, for training."""
        hidden = call["hidden_states"]
        return (
            torch.is_grad_enabled()
            and stack.training
            and type(hidden) is Tensor
            and hidden.numel() > 0
            and call.get("attention_mask") is None
            and call.get("encoder_attention_mask") is None
            and stack.wire is None
            and all(type(edges) is Unpadded for edges in stack.edges)
            and all(isinstance(block, FusedBlock) for block in stack.blocks)
            and not torch.compiler.is_compiling()
            and not torch._C._len_torch_dispatch_stack()  # whoever watches operations would see none
            and not getattr(stack, "_is_replica", False)  # nn.DataParallel runs its replicas in threads
        )

    def __call__(self, stack: Stack, call: Arguments, here: Running) -> Arguments | None:
        """See petune.models.stack.Whole; `call` is one that `takes` took."""
        blocks = cast("list[FusedBlock]", stack.blocks)
        call = memory_in_autocast(call)
        later = call | {BIAS: call.get(BIAS) if blocks[0].distances is None else blocks[0].distances}  # which the first one hands on
        if any(block.declines(call["hidden_states"], later if at else call) for at, block in enumerate(blocks)):
            return None  # a block that declines says so itself
        arrival = Arrival(call, blocks[0], here)
        if not self._worthwhile(arrival, blocks[0].spec):
            return None
        weights = self._current(blocks)
        self.recorder = self.recorder or self.make(arrival.hidden.device)
        reason = _reason(blocks, call, arrival, weights) or self.recorder.refusal()
        if reason is not None:
            self._say(f"{stack.name} runs block by block, not as CUDA graphs: {reason}")
            return None
        arrival.draws = _drawn(stack, weights, arrival, here) if weights.drops else weights.undrawn
        graph = self._graph(stack.name, blocks, arrival)
        if graph is None:
            return None
        graph.place(arrival)
        turn = Turn(graph, weights)
        self.turn = weakref.ref(turn)
        inputs = blocks[0].inputs(arrival.hidden, arrival.memory, blocks[0].bias(None, graph.bucket.own.longest))
        out = _Node.apply(turn, len(inputs), *inputs, *weights.trained)  # type: ignore[no-untyped-call]
        return {"hidden_states": out}

    def _say(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            say(f"kernels: {line}")

    def _worthwhile(self, arrival: Arrival, spec: Spec) -> bool:
        """Whether launches bound such a block on such a batch, and a recording has not failed."""
        bucket, device = arrival.bucket, arrival.hidden.device
        if bucket not in self.worth:
            rates = block_cost.rates_of(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
            work = block_cost.forward(shape_of(spec, arrival.hidden.dtype), *bucket.own)
            self.worth[bucket] = rates.seconds(work, bucket.own.longest) < LAUNCH_BOUND
        return self.worth[bucket]

    def _current(self, blocks: Sequence[FusedBlock]) -> Weights:
        """The weights; recordings of others are forgotten."""
        if self.weights is None or not self.weights.current(blocks):
            self._begin(Weights(blocks, [block.parts() for block in blocks]))  # which may have moved some into their banks
        assert self.weights is not None
        return self.weights

    def _graph(self, name: str, blocks: Sequence[FusedBlock], arrival: Arrival) -> Graph | None:
        """The recording to replay, made if it is due; None where one by one is the way this time."""
        self.calls += 1
        turn, bucket = self.turn(), arrival.bucket
        if turn is not None and not turn.spent:
            return None
        graph = self._fitting(arrival)
        self.lost[bucket] += ONE_BY_ONE if graph is None else graph.bucket.tokens / bucket.tokens - 1
        if self._due(bucket, graph) and self._has_room():
            graph = self._recorded(name, blocks, arrival) or graph
        if graph is not None:
            graph.used = self.calls
        return graph

    def _fitting(self, arrival: Arrival) -> Graph | None:
        """The recording of this bucket, or the smallest that holds the batch: even twice the work takes less time than the launches."""
        bucket, segments = arrival.bucket, arrival.segments
        if bucket in self.graphs or segments is None:
            return self.graphs.get(bucket)
        kindred = [graph for size, graph in self.graphs.items() if size.segmented and size.kind == bucket.kind]
        larger = [graph for graph in kindred if graph.bucket.holds(segments, arrival.across)]
        return min(larger, key=lambda graph: graph.bucket.tokens, default=None)

    def _due(self, bucket: Bucket, graph: Graph | None) -> bool:
        """Whether a bucket that `graph` serves, or none, should have its own."""
        at_once = graph is None and bucket.segmented
        return bucket not in self.graphs and (at_once or self.lost[bucket] > RECORDING)

    def _has_room(self) -> bool:
        """Whether there may be one recording more, now that one which has not been used for long may have gone."""
        if len(self.graphs) < LIMIT:
            return True
        oldest = min(self.graphs.values(), key=lambda graph: graph.used)
        if self.calls - oldest.used < PATIENCE:
            return False
        del self.graphs[oldest.bucket], self.lost[oldest.bucket]
        return True

    def _recorded(self, name: str, blocks: Sequence[FusedBlock], arrival: Arrival) -> Graph | None:
        """A new recording; None, and never another try for this bucket, where it fails."""
        assert self.recorder is not None
        bucket = arrival.bucket
        graph = Graph(arrival, blocks[0], self._rooms(arrival), self.learned)
        graph.place(arrival)  # kernels are tried on lengths that occur
        try:
            graph.record(self.recorder, self._pieces(graph, blocks))
        except RuntimeError as error:
            self.worth[bucket] = False
            first = str(error).partition("\n")[0]
            self._say(f"{name} runs block by block on {bucket.tokens} tokens: they could not be recorded as CUDA graphs: {first}")
            return None
        self._say(f"{name} runs as CUDA graphs, recorded {'as larger batches come' if bucket.segmented else 'for each size of batch'}")
        self.graphs[bucket] = graph
        return graph

    def _rooms(self, arrival: Arrival) -> list[Tensor]:
        """Inlet, outlet and, where there is one, the inlet of the memory; recordings of about the same size share them, as they share the
        rest of their memory."""
        bucket, hidden, memory = arrival.bucket, arrival.hidden, arrival.memory
        rooms = [self._room(name, hidden, bucket.own) for name in ("inlet", "outlet")]
        return rooms if memory is None or bucket.memory is None else [*rooms, self._room("memory", memory, bucket.memory)]

    def _room(self, name: str, like: Tensor, size: Size) -> Tensor:
        most = 1 << (size.tokens - 1).bit_length()
        key = name, most, like.dtype
        if key not in self.rooms:
            self.rooms[key] = like.detach().new_zeros(most, like.shape[-1])
        return self.rooms[key][: size.tokens]

    def _pieces(self, graph: Graph, blocks: Sequence[FusedBlock]) -> list[Piece]:
        """The blocks with their weights, as they are recorded."""
        assert self.weights is not None
        pieces, rooms, inputs = [], iter(self.learned.rooms), blocks[0].spec.program.inputs
        trains = dict(zip(("x", "memory", "bias"), graph.bucket.kind[2], strict=True))
        needs_x, *others = (trains[name] for name in inputs)
        for block, parts, tensors, draws in zip(blocks, self.weights.parts, self.weights.tensors, graph.draws, strict=True):
            needs = [value is not None and value.requires_grad for value in tensors]
            own = [next(rooms) for need in needs if need]
            pieces.append(Piece(graph.call(block, parts, draws), tensors, needs, own, [needs_x, *others]))
            needs_x = needs_x or bool(own) or any(others)
        return pieces


def _reason(blocks: Sequence[FusedBlock], call: Arguments, arrival: Arrival, weights: Weights) -> str | None:
    """Why these blocks have to run one by one, though launches bound them; or None."""
    inputs = arrival.hidden, arrival.memory, blocks[0].distances
    if not weights.trained and not any(one is not None and one.requires_grad for one in inputs):
        return "nothing of it trains"
    if call.get(BIAS) is not None:
        return "it is handed a bias of relative positions"
    if arrival.segments is not None and "sdpa" in arrival.backends and arrival.hidden.is_cuda:
        return "attention within segments has no kernel here, and reads their lengths on the host"
    if not weights.recordable:
        return "weights in eight bits are made again when they have changed"
    if _has_any_global_hook() or any(map(_hooked, blocks)):
        return "there are hooks on its blocks"
    whole = Rung()
    if any(block.spec.rung != whole for block in blocks):
        return "its blocks do not keep all that their backward passes need on the device"
    if not weights.alike:
        return "the attention of its blocks drops out unequally"
    return None


def _drawn(stack: Stack, weights: Weights, arrival: Arrival, here: Running) -> list[Draws]:
    """What drops out in each block, as if each ran by itself."""
    layout = Layout.of(arrival.hidden, arrival.memory)
    found, places = [], places_in(layout, arrival.hidden, arrival.memory)
    for (number, block), parts in zip(stack.numbered, weights.parts, strict=True):
        with bound_to(stack.at(number, here)):
            found.append(cast("FusedBlock", block).draws(parts, *places))
    return found


def _hooked(block: nn.Module) -> bool:
    """Whether somebody waits for this block to be called."""
    return bool(block._forward_hooks or block._forward_pre_hooks or block._backward_hooks or block._backward_pre_hooks)


def ungraph(model: nn.Module) -> None:
    """Let the stacks of `model` run block by block, and free what their graphs hold."""
    for module in model.modules():
        if isinstance(module, Stack):
            module.whole = None
