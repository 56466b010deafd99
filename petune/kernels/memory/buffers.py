"""The bytes of a fused block: what it keeps, what is alive in each phase of its passes, and so its peak of
memory.

A phase is one action of the schedule (petune/kernels/block/schedule.py), so that the values alive in it, and
for how many rows, are those of the engine itself; what each takes is said by its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from petune.kernels.block.boundary_steps import Enter, Leave
from petune.kernels.block.lent_steps import KEYS, LENT, TOKENS
from petune.kernels.block.linear_steps import Activated, Product, of_rows
from petune.kernels.block.program import Program
from petune.kernels.block.schedule import ScheduledPass, Section
from petune.kernels.block.steps import Add, Step
from petune.kernels.configs import Level
from petune.kernels.head.linear_cross_entropy import ALIGNED, chunk_rows
from petune.kernels.memory.shape import BlockShape
from petune.kernels.memory.shaped_program import needs_of, of_shape

# blocks on the device while parameters stream: the one that runs, the one that arrives, the one that leaves
STREAMED_BLOCKS = 3
ADAMW_STATES = 2  # numbers AdamW keeps for each one that trains


@dataclass(frozen=True)
class Phase:
    """A stretch of a pass, and the bytes of each tensor alive in it but for those that the block keeps."""

    name: str
    buffers: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """Of all its buffers."""
        return sum(size for _, size in self.buffers)

    def beside(self, others: dict[str, int]) -> Phase:
        """The same with others alive, without those that take nothing."""
        every = [*others.items(), *self.buffers]
        return Phase(self.name, tuple((name, size) for name, size in every if size))


def kept_sizes(shape: BlockShape, keep: Level) -> dict[str, int]:
    """Bytes per token of each value that a block keeps for its backward pass."""
    program = of_shape(shape)
    # of most of these there is one tensor for all blocks, and keys are counted where they are lent
    rows = {"x": shape.width * shape.itemsize, "memory": 0, "bias": 0, "table": 0, KEYS: 0}
    rows[TOKENS] = shape.of_tokens * shape.itemsize
    for step in program.steps:
        rows |= step.sizes(shape)
        if step.over is not None:
            rows[step.gives[0]] = rows[step.over]
    parts = parts_of(shape, program)
    return {name: int(rows[name] * parts.get(name, 1.0)) for name in program.schedules.kept(keep)}


def parts_of(shape: BlockShape, program: Program) -> dict[str, float]:
    """The part of all tokens that a rank has of a value, where these are its own tokens alone: of those
    between sub-layers that are cut and connected by sequence."""
    crossings = [step for step in program.steps if isinstance(step, Enter | Leave)]
    if not any(step.connection == "sequence" for step in crossings):
        return {}
    found, between = {*program.inputs[:1]}, True
    for step in program.steps:
        if isinstance(step, Enter):
            between = False
            continue
        between |= isinstance(step, Leave)
        if between:
            found |= {*step.gives, *step.sizes(shape)}
    return dict.fromkeys(found, shape.share)


def waiting_bytes(shape: BlockShape) -> int:
    """Bytes per token of what a block's products of weights read, where they wait for a pass of their own:
    the inputs of its linears and the gradients of what these give; nothing where its weights are frozen."""
    if not shape.trained:
        return 0
    numbers = 0.0
    for step in of_shape(shape).steps:
        if isinstance(step, Product | Activated):
            inputs, outputs, _ = shape.linears(step.place)
            numbers += of_rows(shape, step.x if isinstance(step, Product) else "", inputs + outputs)
    if (experts := shape.experts) is not None:
        numbers += 2 * shape.width + 3 * experts.chosen * experts.columns
    return int(numbers * shape.itemsize)


def kept_bytes(shape: BlockShape, keep: Level) -> int:
    """Bytes per token that a block keeps for its backward pass, wherever they rest."""
    return sum(kept_sizes(shape, keep).values())


def offloadable(shape: BlockShape) -> dict[str, int]:
    """Bytes per token that rest in host memory instead, by the level of offloading."""
    sizes, attends = kept_sizes(shape, "attention"), of_shape(shape).attends
    return {"input": sizes["x"], "attention": sizes["x"] + sum(sizes[one.a] for one in attends)}


def phases(shape: BlockShape, keep: Level, tokens: int, tile: int | None = None) -> tuple[Phase, ...]:
    """The phases of a block's forward pass, then of its backward pass; whole where it keeps all."""
    program = of_shape(shape)
    walk = _Walk(shape, program, keep, tokens, tile if _is_tiled(keep, tokens, tile) else None)
    back = program.schedules.backward(keep, needs_of(shape, program), (True,) * len(program.inputs))
    lent = {name: size * tokens for name, size in kept_sizes(shape, "input").items() if name == LENT}
    return *walk.through(program.schedules.forward(keep), {}), *walk.through(back, {program.y: 0} | lent)


class _Walk:
    """A block's passes without tensors. rows: of a tile, None where there is but one."""

    def __init__(
        self, shape: BlockShape, program: Program, keep: Level, tokens: int, rows: int | None
    ) -> None:
        self.shape, self.tokens, self.rows = shape, tokens, rows
        self.kept = set(program.schedules.kept(keep))
        self.parts = parts_of(shape, program)
        self.end = program.y
        self.shared: dict[str, str] = {}  # what is one tensor: by the one that its bytes are counted with

    def through(self, one: ScheduledPass, grads: dict[str, int]) -> Iterator[Phase]:
        """The phases of a pass. grads: those on the way; that of the output is held by the caller."""
        end = int(self.shape.width * self.shape.itemsize * self.tokens * self.parts.get(self.end, 1.0))
        held = {"dy": end} if grads else {}
        alive: dict[str, int] = {}
        for section, gone in zip(one.sections, one.drops, strict=True):
            if not section.tiles or self.rows is None:
                for phase in self._acts(section, alive, grads, self.tokens):
                    yield phase.beside(held)
                continue
            whole = held | self._counted(alive) | _of_gradients(grads)
            inside, back = dict.fromkeys(alive, 0), dict.fromkeys(grads, 0)
            found = list(self._acts(section, inside, back, self.rows))
            left = {name: size for name, size in inside.items() if name in section.leaves}
            tiles = sum((*self._counted(left).values(), *back.values())) // self.rows * self.tokens
            yield from (phase.beside(whole | {"tiles": tiles}) for phase in found)
            # what a sum hands on as it is, rows of what is whole, is copied where tiles are joined
            sums = {one.step.x for one in section.actions if one.back and isinstance(one.step, Add)}
            copied = [name for name in sums if back.get(name) == 0]
            back |= self._scaled(dict.fromkeys(copied, self.shape.width * self.shape.itemsize), self.rows)
            joined = sum((*self._counted(left).values(), *back.values())) // self.rows * self.tokens
            left_over = {name: size for name, size in whole.items() if name not in gone}
            yield Phase("joining", ()).beside(left_over | {"tiles": tiles, "joined": joined})
            alive = {name: size for name, size in alive.items() if name in inside}
            alive |= {name: size // self.rows * self.tokens for name, size in left.items()}
            grads.clear()
            grads |= {name: size // self.rows * self.tokens for name, size in back.items()}

    def _acts(
        self, section: Section, alive: dict[str, int], grads: dict[str, int], rows: int
    ) -> Iterator[Phase]:
        """The phases of a section on so many rows, with what is alive as it goes on."""
        for step, back, _, drops in section.actions:
            if back:
                there = bool(step.soft) and (step.soft[0] in alive or step.soft[0] in self.kept)
                made = self._scaled(step.grads(self.shape), rows)
                both = grads | {name: grads.get(name, 0) + size for name, size in made.items()}
                beside = self._beside(step, step.beside_back(self.shape, there) * rows)
                yield self._phase(f"{step.gives[0]}, backward", alive, both, beside)
                handed = sum(grads.pop(name, 0) for name in step.gives)
                grads |= made or {step.takes[0]: 0, step.takes[-1]: handed}
                if made and step.hands is not None:
                    grads[step.hands] = grads.get(step.hands, 0) + handed
            else:
                alive |= dict.fromkeys(step.gives, 0) | self._scaled(step.sizes(self.shape), rows)
                if step.over is not None and (not step.shares or step.over in drops):
                    alive[step.gives[0]], alive[step.over] = alive.get(step.over, 0), 0
                elif step.over is not None and step.over not in self.kept:
                    self.shared[step.over] = step.gives[0]
                beside = self._beside(step, step.beside(self.shape) * rows)
                yield self._phase(step.gives[0], alive, grads, beside)
            for name in drops:
                size, other = alive.pop(name, 0), self.shared.pop(name, None)
                if other in alive:
                    alive[other] += size

    def _phase(self, name: str, alive: dict[str, int], grads: dict[str, int], beside: int) -> Phase:
        own = self._counted(alive) | _of_gradients(grads) | {"beside": beside}
        return Phase(name, tuple(own.items()))

    def _scaled(self, sizes: dict[str, int], rows: int) -> dict[str, int]:
        return {name: int(size * rows * self.parts.get(name, 1.0)) for name, size in sizes.items()}

    def _beside(self, step: Step, size: int) -> int:
        return int(size * self.parts.get(step.gives[0], 1.0)) + step.made_dense(self.shape)

    def _counted(self, alive: dict[str, int]) -> dict[str, int]:
        return {name: size for name, size in alive.items() if name not in self.kept}


def _of_gradients(grads: dict[str, int]) -> dict[str, int]:
    return {f"d {name}": size for name, size in grads.items()}


def working_set(shape: BlockShape, keep: Level, tokens: int, tile: int | None = None) -> int:
    """Bytes alive at once beside what blocks keep: in the fullest phase of a block, its gradients, which are
    float32 until its end, and its bottlenecks in the dtype of the computation, in which are the factors of
    experts and the gradients of all that is theirs too.

    A weight that trains has its gradient summed over tiles, so that the largest is there twice. A weight in
    eight-bit floats is turned for its backward product, one in another form is made dense for each.
    """
    twice = shape.width * shape.gu if _is_tiled(keep, tokens, tile) else 0
    experts = 0 if shape.experts is None else shape.experts.weights(shape.width)
    called, tuned = (0, 0) if shape.called is None else (shape.called.weights, shape.called.tuned)
    own = experts + called  # whose gradients are in their dtype
    trained = (4 * (shape.parameters - own + twice) + shape.itemsize * own) * shape.trained + 4 * tuned
    rounded = shape.bottlenecks + 2 * shape.expert_factors
    gradients = rounded * shape.itemsize + 4 * (_stacked(shape) + shape.bottlenecks) + trained
    return max(phase.bytes for phase in phases(shape, keep, tokens, tile)) + gradients + _made(shape)


def _made(shape: BlockShape) -> int:
    """Bytes of what is made of the largest group's weights for a product: turned in eight bits, or dense with
    room for its factors."""
    itemsize = shape.itemsize if shape.made else shape.fp8
    groups = (shape.linears(place) for place in of_shape(shape).groups)
    return itemsize * max((inputs + rank * bool(shape.made)) * outputs for inputs, outputs, rank in groups)


def _is_tiled(keep: Level, tokens: int, tile: int | None) -> bool:
    return tile is not None and tile < tokens and keep != "all"


def head_bytes(tokens: int, width: int, vocabulary: int, itemsize: int = 2) -> int:
    """Bytes alive at once between the last block and the loss, and back, for a final norm that is one
    operation.

    The last block's result, the same normed, the gradient of that, a chunk of logits, and a copy of the head
    where its classes are aligned.
    """
    rows = min(tokens, chunk_rows(vocabulary, itemsize))
    copied = width * vocabulary * (vocabulary % ALIGNED > 0)
    return itemsize * (3 * tokens * width + rows * vocabulary + copied)


def standing_bytes(shape: BlockShape) -> int:
    """Bytes that a block holds beside its parameters while a step runs: its factors stacked, in the dtype of
    the computation, and the room for them behind frozen weights that are dense and whose products are not
    scaled."""
    ranks = shape.ranks
    scaled = {place.kind for place in of_shape(shape).groups if place.scaled}
    up = ranks.gu * shape.gu if shape.gated or not shape.defers else 0
    rooms = {"in": ranks.qkv * shape.qkv, "up": up, "down": ranks.down * shape.width}
    none = shape.fp8 or shape.made or shape.roomless
    room = 0 if none else sum(rooms[kind] for kind in rooms.keys() - scaled)
    return (_stacked(shape) + room) * shape.itemsize


def _stacked(shape: BlockShape) -> int:
    """Numbers of the factors as the engine stacks them: those of q, k and v, and of gate and up, on the
    diagonal of one matrix."""
    ranks, width = shape.ranks, shape.width
    of_attention = ranks.qkv * (width + shape.qkv) + ranks.o * (shape.queries + width)
    return of_attention + ranks.gu * (width + shape.gu) + ranks.down * (shape.columns + width)


# ------------------------------------------------------------------ parameters in host memory


def states_bytes(itemsize: int, wide: bool) -> int:
    """Bytes of AdamW's states of a streamed parameter: in the weights' dtype, or `wide`, in float32 with a
    master of a narrower weight."""
    return 4 * (ADAMW_STATES + (itemsize < 4)) if wide else ADAMW_STATES * itemsize


def streamed_host_bytes(shape: BlockShape, wide: bool = False) -> int:
    """Bytes of pinned host memory in which a block's weights and AdamW states rest; `wide` as of
    `states_bytes`."""
    return (shape.itemsize + states_bytes(shape.itemsize, wide)) * shape.parameters


def streamed_device_bytes(shape: BlockShape, wide: bool = False) -> int:
    """Bytes on the device while blocks stream: weights, gradients and states of STREAMED_BLOCKS blocks."""
    return STREAMED_BLOCKS * (2 * shape.itemsize + states_bytes(shape.itemsize, wide)) * shape.parameters
