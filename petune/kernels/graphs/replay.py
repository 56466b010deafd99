"""A fused stack as two CUDA graphs, forward and backward, inside one autograd node: what launching its
kernels costs is paid once.

A block of a small model on a few thousand tokens keeps the device busy for less time than the host needs to
launch its kernels. So the launches of all blocks are recorded, for a `Bucket` of batches of about the same
size, and replayed for every batch that fits:

        hidden [m, w] -> inlet -> | forward graph |  -> outlet -> y          dy -> outlet -> | backward graph
                                                     | -> inlet -> dx, gradients

Segments need not be as many or as long as those of the recording: tokens that a batch lacks are rows of zeros
in segments of their own, whose outputs nobody reads and whose gradients are zero. A decoder that attends to
an encoder has a second inlet for the encoder's states, in as many segments; a bias by distance has a third.
Addresses are part of a recording, values are not: weights may be trained, and LoRA's factors are made from
them inside. Dropout by index is a function of numbers that are values too: where the tokens lie in the batch,
and a word for each draw. Tensors that are moved or replaced make all recordings void.
What blocks call (called.py) is recorded with the graph of autograd's that it is, in both passes.

Of blocks that ranks share what they say is recorded too, so all of them replay the same, and each decision
here is the same on all. Where tokens are cut across ranks they are laid in the bucket's before (`room_for`).

Of a ladder all levels are recorded, each behind its gate. What the gates mix in is one more inlet, [levels,
m, w], and the gates themselves are another. The blocks beside it have a recording of their own (beneath.py).

What a forward graph leaves for its backward graph lies in a pool of memory that all graphs of a stack share,
so no other forward may be replayed in between: a `GraphPass` says whether one is on its way, and a second
forward pass runs block by block, or takes another lane (see ways.py).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.kernels.block.call import Spec
from petune.kernels.block.layout import BIAS
from petune.kernels.block.lent_steps import KEYS, TOKENS, lenders
from petune.kernels.block.module import FusedBlock
from petune.kernels.block.watchers import block_by_block
from petune.kernels.configs import Rung
from petune.kernels.graphs.bucket import Bucket, Size
from petune.kernels.graphs.graph import Arrival, Graph, Meeting, drawn, handed_on
from petune.kernels.graphs.node import GraphNode, GraphPass
from petune.kernels.graphs.passes import Gate, RecordedBlock
from petune.kernels.graphs.recorder import CudaRecorder, NotRecorded
from petune.kernels.graphs.weights import Learned, Weights
from petune.kernels.memory import block_cost
from petune.kernels.memory.policy_hook import shape_of
from petune.log import say
from petune.models.stack import Arguments, Stack
from petune.rng.context import Running, bound_to, running

# replays that a batch without a recording loses (BERT-large on an H200: 28,000 tokens/s to 171,000)
ONE_BY_ONE = 5
RECORDING = 7  # replays that making one takes: a bucket gets its own when its batches have lost more without
LIMIT = 16  # recordings of a stack
STAGED = 2  # times as long a block may take on a stage of a pipeline and be recorded
HALVED = 4  # and one whose rows go in halves: those of 8B took a slow host 9 ms to launch
SPARE = 2**30  # bytes of gradients up to which it may: recordings hold them a second time
PATIENCE = 256  # calls of the stack for which a recording is not dropped in favour of another


class Graphs:
    """A way through a fused stack (stack_protocols.Whole) by recordings, each made once the batches of
    its bucket have lost more time without it than it takes. Segments that no recording holds get one at once:
    what is smaller and of their kind will use it too.

    Only where launches are what a block costs (`block_cost.LAUNCH_BOUND`), or both halves of its rows that go
    in turns; only in training with gradients, without a mask, hooks on blocks, and with all activations kept
    on the device. All else goes block by block; a reason that is worth knowing is said once.

    beside: whether its blocks are those of the ladder beside the stack, each behind a gate. staged: whether
    other stages wait for what it gives, so that the first launches of a pass are hidden behind nothing.
    """

    kind = Graph  # of its recordings

    def __init__(
        self,
        make: Callable[[torch.device], CudaRecorder] = CudaRecorder,
        beside: bool = False,
        staged: bool = False,
    ) -> None:
        self.make, self.beside, self.staged = make, beside, staged
        self.said: set[str] = set()
        self.worth: dict[tuple[Size, torch.dtype, bool], bool] = {}  # whether a recording of such rows helps
        self.failed: set[Bucket] = set()
        self.declined: set[Size] = set()  # that ran block by block when last seen
        self.long: set[tuple[torch.Size, torch.dtype]] = set()  # of hidden states whose recording would not
        self.turn: Callable[[], GraphPass | None] = lambda: None
        self.calls = 0
        self.other: Graphs | None = None  # of the same blocks: its weights, and its room for gradients
        self._begin(None)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what comes back from a file, has no recordings: they are of these very tensors."""
        return type(self), (self.make, self.beside, self.staged)

    def _begin(self, weights: Weights | None, learned: Learned | None = None) -> None:
        """Forget all recordings, and begin with these weights."""
        self.weights = weights
        self.learned = learned or Learned(weights.trained if weights else ())
        self.recorder: CudaRecorder | None = None
        self.graphs: dict[Bucket, Graph] = {}
        # replays, for want of a recording of just this size
        self.lost: dict[Bucket, float] = defaultdict(float)
        self.rooms: dict[tuple[str, int, torch.dtype], Tensor] = {}

    @property
    def idle(self) -> bool:
        """Whether no forward pass of a recording waits for its backward pass."""
        turn = self.turn()
        return turn is None or turn.spent

    def takes(self, stack: Stack, call: Arguments) -> bool:
        """See stack_protocols.Whole: a call that is whole, unmasked, for training."""
        hidden = call["hidden_states"]
        return (
            torch.is_grad_enabled()
            and self._is_for(stack)
            and cast("nn.Module", stack.ladder or stack).training
            and type(hidden) is Tensor
            and hidden.numel() > 0
            and call.get("attention_mask") is None
            and call.get("encoder_attention_mask") is None
            and all(edges.replays for edges in stack.edges)
            and all(isinstance(block, FusedBlock) for _, block in self._numbered(stack))
            and not block_by_block()
            and not torch._C._len_torch_dispatch_stack()  # whoever watches operations would see none
            and not getattr(stack, "_is_replica", False)  # nn.DataParallel runs its replicas in threads
            and not self._is_long(hidden)
            and not (stack.shortened and any(block.spec.program.meets for _, block in self._numbered(stack)))
        )

    def forget(self) -> None:
        """Let go of all recordings, and of the memory that they hold."""
        self._begin(None)

    def _is_for(self, stack: Stack) -> bool:
        """Whether a pass of `stack` as it is now may be these blocks' alone."""
        return self.beside == (stack.ladder is not None)

    def _is_long(self, hidden: Tensor) -> bool:
        """Whether rows like these were found to keep the device busy: their first block need not wait until
        the calls of all are known."""
        return running().segments is None and (hidden.shape, hidden.dtype) in self.long

    def _numbered(self, stack: Stack) -> list[tuple[int, FusedBlock]]:
        """The blocks that run as a whole."""
        whole = stack.ladder if self.beside and stack.ladder is not None else stack
        return cast("list[tuple[int, FusedBlock]]", whole.numbered)

    def _name(self, stack: Stack) -> str:
        """What they are called, and their sites begin with."""
        return f"{stack.name}.side" if self.beside else stack.name

    def __call__(
        self, stack: Stack, calls: Sequence[Arguments], here: Running, below: Tensor | None = None
    ) -> Arguments | None:
        """See stack_protocols.Whole; the first call is one that `takes` took."""
        blocks = [block for _, block in self._numbered(stack)]
        meeting = None if below is None or stack.ladder is None else (below, *stack.ladder.gate())
        placed = self._placed(stack, calls, here, meeting)
        if placed is None:
            return None
        graph, arrival = placed
        assert self.weights is not None
        turn = GraphPass(graph, self.weights)
        self.turn = weakref.ref(turn)
        inputs = [*graph.inputs_of(arrival, blocks[0]), *(() if meeting is None else meeting[:2])]
        out = GraphNode.apply(turn, len(inputs), *inputs, *self.weights.trained)  # type: ignore[no-untyped-call]  # torch's
        # the next stage has no table to make one of
        handed = (
            None if stack.wire is None or stack.wire.ends else blocks[0].bias(arrival.bias, arrival.longest)
        )
        return {"hidden_states": out, BIAS: handed}

    def _placed(
        self, stack: Stack, calls: Sequence[Arguments], here: Running, meeting: Meeting | None = None
    ) -> tuple[Graph, Arrival] | None:
        """The recording to replay and what enters it, which lies where the recording reads it but for the
        inputs; None where blocks have to run one by one."""
        numbered, name = self._numbered(stack), self._name(stack)
        blocks = [block for _, block in numbered]
        calls, given = handed_on(calls, blocks)
        hidden, rows = calls[0]["hidden_states"], len(calls[0]["hidden_states"])
        with bound_to(here):
            if any(block.declines(hidden, call) for block, call in zip(blocks, given, strict=True)):
                return None  # a block that declines says so itself
            halved = meeting is None and all(block.spec.goes_in_halves(rows, calls[0]) for block in blocks)
        arrival = Arrival(calls, blocks, here, meeting, halved)
        if not self._worthwhile(arrival.bucket.own, blocks, arrival.hidden.device, halved):
            if arrival.segments is None and not here.sizes:  # own tokens do not say how many there are
                self.long.add((arrival.hidden.shape, arrival.hidden.dtype))
            return None
        weights = self._current(blocks)
        self.recorder = self.recorder or self.make(arrival.hidden.device)
        reason = self._reason(blocks, arrival, weights) or self.recorder.refusal()
        if reason is not None:
            self._say(f"{name} runs block by block, not as CUDA graphs: {reason}")
        if reason is not None or arrival.bucket in self.failed:
            self.declined.add(arrival.bucket.own)
            return None
        self.declined.discard(arrival.bucket.own)
        if here.sizes and arrival.segments is not None and not here.laid:
            return None  # the tokens of a recording would lie on other ranks
        arrival.draws = drawn(name, numbered, weights, arrival, here) if weights.drops else weights.undrawn
        graph = self._graph(name, blocks, arrival)
        if graph is None:
            return None
        graph.place(arrival)
        return graph, arrival

    def _say(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            say(f"kernels: {line}")

    def room_for(self, stack: Stack, hidden: Tensor, here: Running) -> int | None:
        """See stack_protocols.Whole: tokens in segments are laid in those of their bucket."""
        blocks = [block for _, block in self._numbered(stack)]
        if (
            self.beside
            or here.segments is None
            or not (torch.is_grad_enabled() and stack.training and blocks)
        ):
            return None
        if any(one is not None and one.kind == "gather" for one in blocks[0].spec.exchanges):
            return None  # which keys a rank sees follows from the segments
        size = Bucket.of(hidden.shape, here.segments, memory=here.memory).own
        worth = size not in self.declined and self._worthwhile(size, blocks, hidden.device)
        return size.tokens if worth else None

    def _worthwhile(
        self, size: Size, blocks: Sequence[FusedBlock], device: torch.device, halved: bool = False
    ) -> bool:
        """Whether launches bound such blocks on rows of this size; on all ranks that share them."""
        spec, dtype = blocks[0].spec, blocks[0].spec.computes_in(device.type)
        if (key := (size, dtype, halved)) not in self.worth:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            rates = block_cost.rates_of(name)
            work = block_cost.forward(shape_of(spec, dtype, size.longest), *size)
            learned = (one.nbytes for block in blocks for one in block.parameters() if one.requires_grad)
            times = HALVED if halved and sum(learned) <= SPARE else STAGED if self.staged else 1
            bound = block_cost.LAUNCH_BOUND * times
            self.worth[key] = _agreed(spec, rates.seconds(work, size.longest) < bound, device)
        return self.worth[key]

    def _reason(self, blocks: Sequence[FusedBlock], arrival: Arrival, weights: Weights) -> str | None:
        """Why these blocks have to run one by one, though launches bound them; or None."""
        if not weights.trained and not any(arrival.trains):
            return "nothing of it trains"
        if (reason := arrival.refusal(blocks)) is not None:
            return reason
        if any(block.spec.rung != Rung() for block in blocks):
            return "its blocks do not keep all that their backward passes need on the device"
        return None if weights.alike else "the attention of its blocks drops out unequally"

    def _current(self, blocks: Sequence[FusedBlock]) -> Weights:
        """The weights; recordings of others are forgotten."""
        if self.weights is None or not self.weights.current(blocks):
            other = self.other
            if other is not None and other.weights is not None and other.weights.current(blocks):
                self._begin(other.weights, other.learned)
            else:  # which may have moved some into their banks
                self._begin(Weights(blocks, [block.parts() for block in blocks]))
        assert self.weights is not None
        return self.weights

    def _graph(self, name: str, blocks: Sequence[FusedBlock], arrival: Arrival) -> Graph | None:
        """The recording to replay, made if it is due; None where one by one is the way this time."""
        self.calls += 1
        bucket = arrival.bucket
        if not self.idle:
            return None
        graph = self._fitting(arrival)
        self.lost[bucket] += ONE_BY_ONE if graph is None else graph.bucket.tokens / bucket.tokens - 1
        if self._due(bucket, graph) and self._has_room():
            graph = self._recorded(name, blocks, arrival) or graph
        if graph is not None:
            graph.used = self.calls
        return graph

    def _fitting(self, arrival: Arrival) -> Graph | None:
        """The recording of this bucket, or the smallest that holds the batch: even twice the work takes less
        time than the launches."""
        bucket, segments = arrival.bucket, arrival.segments
        if bucket in self.graphs or segments is None:
            return self.graphs.get(bucket)
        kindred = [one for size, one in self.graphs.items() if size.segmented and size.kind == bucket.kind]
        larger = [graph for graph in kindred if graph.bucket.holds(segments, arrival.across)]
        return min(larger, key=lambda graph: graph.bucket.tokens, default=None)

    def _due(self, bucket: Bucket, graph: Graph | None) -> bool:
        """Whether a bucket that `graph` serves, or none, should have its own."""
        at_once = graph is None and bucket.segmented
        new = bucket not in self.graphs and bucket not in self.failed
        return new and (at_once or self.lost[bucket] > RECORDING)

    def _has_room(self) -> bool:
        """Whether there may be one recording more, now that one long unused may have gone."""
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
        bucket, spec = arrival.bucket, blocks[0].spec
        graph = self.kind(arrival, blocks[0], self._rooms(arrival), self.learned)
        graph.place(arrival)  # kernels are tried on lengths that occur
        problem: str | None = None
        try:
            graph.record(self.recorder, self._pieces(graph, blocks))
        except RuntimeError as error:
            if spec.peers is not None and not isinstance(error, NotRecorded):
                raise  # of the trial: what other ranks say then has no answer
            problem = str(error).partition("\n")[0]
        if not _agreed(spec, problem is None, arrival.hidden.device):
            self.failed.add(bucket)
            self._say(
                f"{name} runs block by block on {bucket.tokens} tokens: they could not be recorded as CUDA"
                f" graphs: {problem or 'see the message of another rank'}"
            )
            return None
        self._say(
            f"{name} runs as CUDA graphs, recorded"
            f" {'as larger batches come' if bucket.segmented else 'for each size of batch'}"
        )
        self.graphs[bucket] = graph
        return graph

    def _rooms(self, arrival: Arrival) -> list[Tensor]:
        """Inlet, outlet and, where there is one, the inlet of the memory; recordings of about the same size
        share them, as they share the rest of their memory."""
        bucket, hidden, memory = arrival.bucket, arrival.hidden, arrival.memory
        rooms = [self._room("inlet", hidden, arrival.inlet), self._outlet(arrival)]
        if arrival.meeting is not None:
            below = arrival.meeting[0]
            rooms.append(self._room("levels", below, arrival.inlet, len(below)))
        if arrival.vectors:
            rooms.append(self._room("vectors", arrival.vectors[0], arrival.inlet, len(arrival.vectors)))
        if memory is not None and bucket.memory is not None:
            rooms.append(self._room("memory", memory, bucket.memory.tokens))
        return rooms

    def _outlet(self, arrival: Arrival) -> Tensor:
        return self._room("outlet", arrival.hidden, arrival.inlet)

    def _room(self, name: str, like: Tensor, tokens: int, *levels: int) -> Tensor:
        most = 1 << (tokens - 1).bit_length()
        key = name, most, like.dtype
        if key not in self.rooms:
            self.rooms[key] = like.detach().new_zeros(*levels, most, like.shape[-1])
        return self.rooms[key][..., :tokens, :]

    def _pieces(self, graph: Graph, blocks: Sequence[FusedBlock]) -> list[RecordedBlock]:
        """The blocks with their weights, as they are recorded."""
        assert self.weights is not None
        pieces, rooms, flows = list[RecordedBlock](), iter(self.learned.rooms), list[bool]()
        trains = dict(zip(("x", "memory", "bias", "table", TOKENS), graph.bucket.kind[2], strict=True))
        read = lenders([block.spec for block in blocks])
        gates: Sequence[Gate | None] = graph.gates or [None] * len(blocks)
        vectors: Sequence[Tensor | None] = [*graph.vectors[0]] if graph.vectors else [None] * len(blocks)
        for at, (block, parts, tensors, gate, lender) in enumerate(
            zip(blocks, self.weights.parts, self.weights.tensors, gates, read or (), strict=True)
        ):
            trains["x"] = trains["x"] or gate is not None
            trains[KEYS] = lender is not None and flows[lender]
            needs = [value is not None and value.requires_grad for value in tensors]
            own = [next(rooms) for need in needs if need]
            given = [trains[name] for name in block.spec.program.inputs]
            made = graph.calls(at, block, parts), tensors, needs, own, given, gate, vectors[at], lender
            pieces.append(RecordedBlock(*made))
            trains["x"] = any(given) or bool(own)
            flows.append(trains["x"])
        return pieces


def _agreed(spec: Spec, found: bool, device: torch.device) -> bool:
    """Whether all ranks that share such a block have found so: they must say the same inside of it."""
    return found if spec.peers is None else bool(spec.peers.least([int(found)], device)[0])


def ungraph(model: nn.Module) -> None:
    """Let the stacks of `model` run block by block, and free what their graphs hold."""
    for module in model.modules():
        if isinstance(module, Stack):
            module.whole = module.beneath = None
