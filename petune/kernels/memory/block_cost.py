"""The seconds of a transformer block on a device: its passes as lists of operations, and the rates that a
device sustains.

An operation is as slow as its arithmetic, its traffic or its hashes (Williams et al. 2009, the roofline), and
takes its launch besides: while one kernel drains and the next begins, a device does none of them. The
operations of a pass are those of the steps of its schedule; stages have the names of the values that they
make (petune/kernels/block/program.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, log

from petune.kernels.block.program import Program
from petune.kernels.block.schedule import Action, Section
from petune.kernels.configs import Level
from petune.kernels.head.linear_cross_entropy import ALIGNED, chunk_rows
from petune.kernels.memory import op_cost
from petune.kernels.memory.op_cost import Cost, KernelCost, Work, costing
from petune.kernels.memory.shape import BlockShape
from petune.kernels.memory.shaped_program import needs_of, of_shape

SpeedCurve = tuple[tuple[int, float], ...]  # (sequence length, FLOP/s), by rising length
NARROW = 0.75  # the share of the memory's rate that a product with few ranks reaches
# The share of the matmuls' rate that grouped products reach. Those of 128 experts, about 512 rows each, reach
# 0.68 of it (benchmarks/grouped.py), though the last tile of each is but half full.
GROUPED = 0.68 * (1 + 64 / 512)
# Seconds of a block's forward pass, below which the host launches it no faster than the device computes it:
# both passes of one of 8B take 6.1 ms to launch, and a forward pass is 0.46 of both.
LAUNCH_BOUND = 2.5e-3

# ------------------------------------------------------------------ devices


@dataclass(frozen=True)
class Rates:
    """What a device sustains. FLOP/s of matmuls and, by sequence length, of attention; bytes/s of its memory
    and, each way, of the link to pinned host memory; elements a second of which it is computed whether they
    drop out; seconds that a kernel takes to begin and to end. processors: each of which computes a tile of a
    product at a time. begins: seconds for which an idle device waits for the host at the beginning of a
    step, until its first block is launched. measured: on such a device, not assumed."""

    name: str
    matmul: float
    matmul_fp8: float
    attention: SpeedCurve
    attention_backward: SpeedCurve
    memory: float
    link: float
    hashes: float = 1e12
    launch: float = 2.5e-6
    processors: int = 1
    begins: float = 0.0
    measured: bool = False

    def seconds(self, work: Iterable[KernelCost], sequence: float) -> float:
        """Seconds of `work` on sequences of so many tokens, one kernel after the other."""
        rate = {
            "matmul": self.matmul,
            "matmul_fp8": self.matmul_fp8,
            "grouped": self.matmul * GROUPED,
            "attention": _interpolated(self.attention, sequence),
            "attention_backward": _interpolated(self.attention_backward, sequence),
        }
        return sum(one.times * self._alone(one, rate.get(one.kind, inf)) for one in work)

    def _alone(self, one: KernelCost, rate: float) -> float:
        """Seconds of one launch, whose arithmetic runs at `rate`."""
        cost, memory = one.cost, self.memory * (NARROW if one.kind == "narrow" else 1)
        busy = (cost.flop + cost.beside) * cost.idle(self.processors)
        return self.launch + max(busy / rate, cost.bytes / memory, cost.hashes / self.hashes)


def _interpolated(curve: SpeedCurve, length: float) -> float:
    """The curve at `length`, linear in its logarithm and level beyond both ends."""
    (low, rate), *rest = curve
    for high, faster in rest:
        if length < high:
            return rate + (faster - rate) * max(0.0, log(length / low) / log(high / low))
        low, rate = high, faster
    return rate


# Sustained for seconds at the card's power limit, in bf16 (benchmarks/rates.py): causal attention by cuDNN,
# 32 query and 8 key heads of 128.
H200 = Rates(
    name="H200",
    matmul=684e12,
    matmul_fp8=1289e12,
    attention=((2048, 487e12), (8192, 567e12), (32768, 596e12)),
    attention_backward=((2048, 374e12), (8192, 481e12), (32768, 529e12)),
    memory=4.25e12,
    link=55.4e9,
    hashes=2e12,
    processors=132,
    begins=4e-3,
    measured=True,
)
H100 = Rates(
    name="H100",
    matmul=687e12,
    matmul_fp8=1118e12,
    attention=((2048, 471e12), (8192, 548e12), (32768, 595e12)),
    attention_backward=((2048, 343e12), (8192, 468e12), (32768, 523e12)),
    memory=2.99e12,
    link=53.7e9,
    hashes=2e12,  # those of an H200, whose processors it has
    processors=132,
    begins=4e-3,
    measured=True,
)
# Assumed, on the low side of what the vendors promise.
A100 = Rates(
    "A100", 230e12, 230e12, ((2048, 150e12), (32768, 180e12)), ((2048, 120e12), (32768, 150e12)), 1.3e12, 20e9
)
CUDA = Rates("CUDA device", 60e12, 60e12, ((2048, 40e12),), ((2048, 30e12),), 0.6e12, 10e9)
CPU = Rates("CPU", 0.2e12, 0.2e12, ((2048, 0.05e12),), ((2048, 0.05e12),), 30e9, 30e9)


def rates_of(device: str) -> Rates:
    """The preset of a device by the name its driver gives it ("NVIDIA H200", "cpu"); the slowest card's for
    one that is not known."""
    return next((rates for rates in (H200, H100, A100, CPU) if rates.name.lower() in device.lower()), CUDA)


# ------------------------------------------------------------------ the work of a block


def forward(shape: BlockShape, tokens: int, sequence: int, tile: int | None = None) -> Work:
    """A block's forward pass over `tokens` in sequences of `sequence`, the MLP in tiles of `tile` tokens."""
    actions = _actions(of_shape(shape).schedules.forward("input").sections, tokens, tile)
    charged = ((one.step, times, one.step.ahead(shape, rows, sequence)) for one, rows, times in actions)
    return costing(*(KernelCost(one.gives[0], *own, n) for one, n, each in charged for own in each))


def backward(shape: BlockShape, tokens: int, sequence: int, tile: int | None = None) -> Work:
    """A block's backward pass, from dy to dx, without what is `recomputed` and the optimizer."""
    program = of_shape(shape)
    found, operations = {program.y}, []
    for one, rows, times in _returned(shape, program, "all", tokens, tile):
        if one.back:
            has = not found.isdisjoint(one.step.grads(shape))
            charges = one.step.back(shape, rows, sequence, has)
            operations += [KernelCost(f"d {one.step.takes[0]}", kind, cost, times) for kind, cost in charges]
            found.update(one.step.takes)
    return costing(*operations)


def recomputed(shape: BlockShape, keep: Level, tokens: int, sequence: int, tile: int | None = None) -> Work:
    """What the backward pass of a rung runs again: never the down projection of a pre-norm block, as nothing
    before it depends on it."""
    operations, there = [], set(of_shape(shape).schedules.kept(keep))
    for (step, back, _, drops), rows, times in _returned(shape, of_shape(shape), keep, tokens, tile):
        if back:
            again = step.again(shape, rows, not there.isdisjoint(step.soft))
        else:
            again = step.ahead(shape, rows, sequence)
        operations += [KernelCost(step.gives[0], kind, cost, times) for kind, cost in again]
        there.update(() if back else step.gives)
        there.difference_update(drops)
    return costing(*operations)


def _returned(
    shape: BlockShape, program: Program, keep: Level, tokens: int, tile: int | None
) -> Iterator[tuple[Action, float, int]]:
    """The actions of a rung's backward pass, each with its rows and how often it is taken."""
    given = (True,) * len(program.inputs)
    return _actions(program.schedules.backward(keep, needs_of(shape, program), given).sections, tokens, tile)


def _actions(
    sections: Sequence[Section], tokens: int, tile: int | None
) -> Iterator[tuple[Action, float, int]]:
    """All actions, each with its rows and how often it is taken."""
    times, rows = _tiles(tokens, tile)
    for section in sections:
        for action in section.actions:
            yield (action, rows, times) if section.tiles else (action, tokens, 1)


def linear_cross_entropy(
    tokens: int, width: int, vocabulary: int, trained: int = 0, itemsize: int = 2
) -> Work:
    """The loss head in chunks, its gradients made in the forward pass: two matmuls, three where the head
    trains. trained: bytes of a weight of the head that does, else 0. Its gradient is a sum over chunks in
    float32, which is scaled by what comes back, and rounded where the weight is narrower."""
    times, rows = _tiles(tokens, chunk_rows(vocabulary, itemsize))
    product, numbers = op_cost.matmul(rows, width, vocabulary, itemsize), width * vocabulary * (trained > 0)
    summed = op_cost.matmul(vocabulary, rows, width, itemsize) + Cost(0, (8 - itemsize) * numbers)
    copied = 2 * itemsize * width * vocabulary * (vocabulary % ALIGNED > 0)
    return costing(
        KernelCost("logits", "memory", op_cost.cast(numbers, trained, itemsize) + Cost(0, copied)),
        KernelCost("logits", "matmul", product, times),
        KernelCost("loss", "memory", op_cost.cross_entropy_(rows, vocabulary, itemsize), times),
        KernelCost("dhidden", "matmul", product, times),
        KernelCost("dweight", "matmul", summed if trained else Cost(), times),
        KernelCost("dweight", "memory", Cost(0, (4 + 8) * numbers)),
        KernelCost("dweight", "memory", op_cost.cast(numbers, 4, trained)),
    )


def update(shape: BlockShape, recorded: bool = False) -> Work:
    """AdamW on what trains in a block, in the dtype of that: its weights, low-rank factors in float32.
    recorded: gradients are those of a CUDA graph, which gives a copy away."""
    weights, found = shape.parameters * shape.trained, shape.weight_bytes
    copies = Cost(0, 2 * (found * weights + 4 * shape.adapters) * recorded)
    of_weights = op_cost.adamw(weights, found) if weights else Cost()
    kept = KernelCost("gradients", "memory", copies)
    return costing(kept, KernelCost("update", "memory", of_weights + op_cost.adamw(shape.adapters)))


def launch_bound(shape: BlockShape, tokens: int, sequence: int, rates: Rates) -> bool:
    """Whether launches are what such a block costs, so that blocks are recorded as CUDA graphs."""
    return rates.seconds(forward(shape, tokens, sequence), sequence) < LAUNCH_BOUND


def _tiles(tokens: int, tile: int | None) -> tuple[int, float]:
    """(tiles, rows of each on average)."""
    times = max(1, ceil(tokens / tile)) if tile else 1
    return times, tokens / times
