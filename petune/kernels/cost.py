"""What the operations of petune.kernels cost: floating-point operations, bytes moved, seconds on a device, and bytes alive at once.

Three layers, each made of the one before: the cost of an operation; a block's passes as lists of operations, which `Rates` turn into
seconds; and tables of the tensors alive in each phase, from which the peak of memory follows. A multiply-add is two FLOP. An operation is
as slow as its arithmetic, its traffic or its launch (Williams et al. 2009, the roofline). The file is over 300 lines long because work
and memory describe one engine, petune/kernels/prenorm.py and postnorm.py, and have to be read beside each other.

Tensors have the engine's names, with the two norms told apart. Pre-norm: x -> h1 -> qkv -> a, lse -> o -> r = x + o -> h2 -> u -> m -> d ->
y = r + d. Post-norm: no h1; t = x + o -> h2 -> u -> m -> d -> z = h2 + d -> y. s, s_o, s_up and s_down are low-rank inputs; a d before
a name is its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil, log
from typing import Literal

Keep = Literal["all", "projections", "attention", "input"]
Kind = Literal["matmul", "matmul_fp8", "attention", "attention_backward", "memory"]  # of operation: which rate bounds it

HEAD_ROWS, HEAD_BYTES = (1024, 4096), 2**30  # tokens whose logits exist at once, and the bytes aimed at between the two
FOLDED = 64  # the largest rank that element-wise kernels add and differentiate on their way
STREAMED_BLOCKS = 3  # blocks on the device while parameters stream: the one that runs, the one that arrives, the one that leaves
ADAMW_STATES = 2  # numbers AdamW keeps for each one that trains


@dataclass(frozen=True)
class Cost:
    """Floating-point operations, and bytes read from and written to device memory."""

    flop: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flop + other.flop, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.flop * times, self.bytes * times)

    __rmul__ = __mul__


# ------------------------------------------------------------------ operations
# Named after petune.kernels.reference. Matrices are [rows, columns]; itemsize is bytes per element; ranks may be 0: no low-rank part.


def matmul(rows: float, inner: float, columns: float, itemsize: int = 2) -> Cost:
    """[rows, inner] times [inner, columns]."""
    return Cost(2 * rows * inner * columns, itemsize * (rows * inner + inner * columns + rows * columns))


def low_rank(rows: float, columns: float, rank: float, itemsize: int = 2) -> Cost:
    """A product that reads a matrix once and gives rank-sized results: s = x a^T, ds = dy b, db = dy^T s. Nothing for rank 0."""
    return Cost(2 * rows * columns * rank, itemsize * (rows * columns + (rows + columns) * rank)) if rank else Cost()


def low_rank_update(rows: float, columns: float, rank: float, itemsize: int = 2) -> Cost:
    """y += s b^T, y read and written. Nothing for rank 0."""
    return Cost(2 * rows * columns * rank, itemsize * (2 * rows * columns + (rows + columns) * rank)) if rank else Cost()


def rms_norm(rows: float, columns: float, itemsize: int = 2, residual: bool = False) -> Cost:
    """x read, its norm written; with a residual that is read and the total written too."""
    return Cost((4 + residual) * rows * columns, (2 + 2 * residual) * itemsize * rows * columns + 4 * rows)


def rms_norm_backward(rows: float, columns: float, itemsize: int = 2, dresidual: bool = False) -> Cost:
    """dy and the total read, the total's gradient written; dresidual read too."""
    return Cost((8 + dresidual) * rows * columns, (3 + dresidual) * itemsize * rows * columns + 4 * rows)


def layer_norm(rows: float, columns: float, itemsize: int = 2, residual: bool = False) -> Cost:
    """As `rms_norm`, with a mean and a bias."""
    return rms_norm(rows, columns, itemsize, residual) + Cost(3 * rows * columns, 4 * rows)


def layer_norm_backward(rows: float, columns: float, itemsize: int = 2, dresidual: bool = False) -> Cost:
    """As `rms_norm_backward`, with a mean."""
    return rms_norm_backward(rows, columns, itemsize, dresidual) + Cost(3 * rows * columns, 4 * rows)


def rope_(rows: float, columns: float, itemsize: int = 2, rank: float = 0) -> Cost:
    """qkv read and written in place, its low-rank part added on the way."""
    return Cost((3 + 2 * rank) * rows * columns, itemsize * (2 * rows * columns + (rows + columns) * rank))


def rope_backward(rows: float, columns: float, itemsize: int = 2) -> Cost:
    """dq, dk and dv read, dqkv written."""
    return Cost(3 * rows * columns, 2 * itemsize * rows * columns)


def activate(rows: float, columns: float, gated: bool, itemsize: int = 2, rank: float = 0, below: float = 0) -> Cost:
    """u read, h written. columns: of h; rank: of u's low-rank part (all of its columns); below: of the next one, whose s is made."""
    wide = columns * (1 + gated)
    flop = rows * (5 * columns + 2 * wide * rank + 2 * columns * below)
    return Cost(flop, itemsize * (rows * (wide + columns + rank + below) + wide * rank + columns * below))


def activate_backward(rows: float, columns: float, gated: bool, itemsize: int = 2, rank: float = 0, below: float = 0) -> Cost:
    """dh and u read, du written; both low-rank parts are added, and their gradients made, on the way."""
    wide = columns * (1 + gated)
    flop = rows * (12 * columns + 4 * wide * rank + 4 * columns * below)
    return Cost(flop, itemsize * (rows * (2 * wide + columns + rank + below) + 3 * (wide * rank + columns * below)))


def add_low(rows: float, columns: float, itemsize: int = 2, rank: float = 0) -> Cost:
    """x and y read, their sum written."""
    return Cost((1 + 2 * rank) * rows * columns, itemsize * (3 * rows * columns + (rows + columns) * rank))


def cross_entropy_(rows: float, vocabulary: int, itemsize: int = 2) -> Cost:
    """Logits read twice, for the partition sum and for the gradient that takes their place."""
    return Cost(6 * rows * vocabulary, 3 * itemsize * rows * vocabulary)


def drop(rows: float, columns: float, itemsize: int = 2) -> Cost:
    """A matrix read and written, a random number made for every element."""
    return Cost(20 * rows * columns, 2 * itemsize * rows * columns)


def quantise(rows: float, columns: float, itemsize: int = 2) -> Cost:
    """A matrix read, its eight-bit form and one scale per row written."""
    return Cost(3 * rows * columns, (itemsize + 1) * rows * columns + 4 * rows)


def attention(tokens: float, sequence: float, heads: int, kv_heads: int, head_dim: int, causal: bool = True, itemsize: int = 2) -> Cost:
    """Softmax attention that keeps no scores, of `tokens` in sequences of `sequence` (Dao et al. 2022, arXiv:2205.14135)."""
    flop = 4 * heads * head_dim * tokens * sequence * (0.5 if causal else 1)
    return Cost(flop, tokens * (2 * (heads + kv_heads) * head_dim * itemsize + 4 * heads))


def attention_backward(
    tokens: float, sequence: float, heads: int, kv_heads: int, head_dim: int, causal: bool = True, itemsize: int = 2
) -> Cost:
    """Its backward: scores made again and four more products; dq is summed in float32."""
    flop = 2.5 * attention(tokens, sequence, heads, kv_heads, head_dim, causal).flop
    return Cost(flop, tokens * (4 * (heads + kv_heads) * head_dim * itemsize + 8 * heads * head_dim + 8 * heads))


def adamw(parameters: float, itemsize: int = 4) -> Cost:
    """One step of AdamW: parameter, gradient and two states read, all but the gradient written."""
    return Cost(14 * parameters, 7 * itemsize * parameters)


# ------------------------------------------------------------------ devices


@dataclass(frozen=True)
class Operation:
    """One kernel, launched `times` times: the stage of the block it belongs to, the rate that bounds it, the cost of one launch."""

    stage: str
    kind: Kind
    cost: Cost
    times: int = 1


Work = tuple[Operation, ...]
Curve = tuple[tuple[int, float], ...]  # (sequence length, FLOP/s), by rising length


def total(work: Iterable[Operation]) -> Cost:
    """The cost of all of `work`."""
    return sum((one.cost * one.times for one in work), Cost())


@dataclass(frozen=True)
class Rates:
    """What a device sustains. FLOP/s of matmuls and, by sequence length, of attention; bytes/s of its memory and, each way, of the link
    to pinned host memory; seconds of a launch. measured: on such a device, not assumed."""

    name: str
    matmul: float
    matmul_fp8: float
    attention: Curve
    attention_backward: Curve
    memory: float
    link: float
    launch: float = 5e-6
    measured: bool = False

    def seconds(self, work: Iterable[Operation], sequence: float) -> float:
        """Seconds of `work` on sequences of so many tokens, one kernel after the other."""
        rate = {
            "matmul": self.matmul,
            "matmul_fp8": self.matmul_fp8,
            "attention": _interpolated(self.attention, sequence),
            "attention_backward": _interpolated(self.attention_backward, sequence),
            "memory": float("inf"),
        }
        return sum(one.times * max(one.cost.flop / rate[one.kind], one.cost.bytes / self.memory, self.launch) for one in work)


def _interpolated(curve: Curve, length: float) -> float:
    """The curve at `length`, linear in its logarithm and level beyond both ends."""
    (low, rate), *rest = curve
    for high, faster in rest:
        if length < high:
            return rate + (faster - rate) * max(0.0, log(length / low) / log(high / low))
        low, rate = high, faster
    return rate


# Sustained for seconds at the card's power limit, in bf16: causal attention by cuDNN, 32 query and 8 key heads of 128.
H200 = Rates(
    name="H200",
    matmul=684e12,
    matmul_fp8=1289e12,
    attention=((2048, 487e12), (8192, 567e12), (32768, 596e12)),
    attention_backward=((2048, 374e12), (8192, 481e12), (32768, 529e12)),
    memory=4.25e12,
    link=55.4e9,
    measured=True,
)
# Assumed, on the low side of what the vendors promise.
H100 = Rates("H100", 550e12, 1000e12, ((2048, 400e12), (32768, 500e12)), ((2048, 300e12), (32768, 430e12)), 2.7e12, 45e9)
A100 = Rates("A100", 230e12, 230e12, ((2048, 150e12), (32768, 180e12)), ((2048, 120e12), (32768, 150e12)), 1.3e12, 20e9)
CUDA = Rates("CUDA device", 60e12, 60e12, ((2048, 40e12),), ((2048, 30e12),), 0.6e12, 10e9)
CPU = Rates("CPU", 0.2e12, 0.2e12, ((2048, 0.05e12),), ((2048, 0.05e12),), 30e9, 30e9)


def rates_of(device: str) -> Rates:
    """The preset of a device by the name its driver gives it ("NVIDIA H200", "cpu"); the slowest card's for one that is not known."""
    return next((rates for rates in (H200, H100, A100, CPU) if rates.name.lower() in device.lower()), CUDA)


# ------------------------------------------------------------------ the work of a block


@dataclass(frozen=True)
class Ranks:
    """The rank of the low-rank update of each role, 0 where there is none."""

    q: int = 0
    k: int = 0
    v: int = 0
    o: int = 0
    gate: int = 0
    up: int = 0
    down: int = 0

    @property
    def qkv(self) -> int:
        """Of q, k and v, whose low-rank inputs are one product."""
        return self.q + self.k + self.v

    @property
    def gu(self) -> int:
        """Of gate and up, likewise."""
        return self.gate + self.up


@dataclass(frozen=True)
class BlockShape:
    """The sizes of a transformer block. columns: of the MLP; trained: its weights train too; itemsize: bytes of an activation and of a
    weight; norm: rms before each region, or layer after it; fp8: frozen weights multiply in eight bits."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    columns: int
    gated: bool = True
    ranks: Ranks = field(default_factory=Ranks)
    trained: bool = False
    itemsize: int = 2
    norm: Literal["rms", "layer"] = "rms"
    causal: bool = True
    fp8: bool = False

    @property
    def queries(self) -> int:
        """Columns of q, and of attention's output."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Columns of q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def gu(self) -> int:
        """Columns of gate and up together, or of up alone."""
        return self.columns * (1 + self.gated)

    @property
    def parameters(self) -> int:
        """Weights of the block's matrices."""
        return self.width * (self.qkv + self.queries + self.gu + self.columns)

    @property
    def adapters(self) -> int:
        """Numbers of the low-rank factors."""
        ranks, mlp, keys = self.ranks, self.width + self.columns, self.kv_heads * self.head_dim
        from_width = ranks.q * (self.width + self.queries) + (ranks.k + ranks.v) * (self.width + keys)
        return from_width + ranks.o * (self.queries + self.width) + (ranks.gu + ranks.down) * mlp

    @property
    def makes_m_again(self) -> bool:
        """Whether the down projection's gradients need its input, which otherwise lives within one kernel."""
        return self.trained or self.ranks.down > FOLDED


def forward(shape: BlockShape, tokens: int, sequence: int, tile: int | None = None) -> Work:
    """A block's forward pass over `tokens` in sequences of `sequence`, the MLP in tiles of `tile` tokens."""
    width, size, ranks = shape.width, shape.itemsize, shape.ranks
    times, rows = _tiles(tokens, tile)
    rms = shape.norm == "rms"
    turned = rope_(tokens, shape.qkv, size, ranks.qkv) if rms else low_rank_update(tokens, shape.qkv, ranks.qkv, size)
    summed = add_low(rows, width, size, ranks.down) if rms else low_rank_update(rows, width, ranks.down, size)
    normed = rms_norm if rms else layer_norm
    return _work(
        Operation("h1", "memory", rms_norm(tokens, width, size) if rms else Cost()),
        Operation("qkv", "memory", low_rank(tokens, width, ranks.qkv, size)),
        *_weighted("qkv", shape, tokens, width, shape.qkv),
        Operation("qkv", "memory", turned),
        Operation("a", "attention", _attention(shape, tokens, sequence)),
        Operation("o", "memory", low_rank(rows, shape.queries, ranks.o, size), times),
        *_weighted("o", shape, rows, shape.queries, width, times),
        Operation("o", "memory", low_rank_update(rows, width, ranks.o, size), times),
        Operation("h2", "memory", normed(rows, width, size, residual=True), times),
        Operation("u", "memory", low_rank(rows, width, ranks.gu, size), times),
        *_weighted("u", shape, rows, width, shape.gu, times),
        Operation("m", "memory", activate(rows, shape.columns, shape.gated, size, ranks.gu, ranks.down), times),
        *_weighted("d", shape, rows, shape.columns, width, times),
        Operation("d", "memory", summed, times),
        Operation("y", "memory", Cost() if rms else layer_norm(rows, width, size, residual=True), times),
    )


def backward(shape: BlockShape, tokens: int, sequence: int, tile: int | None = None) -> Work:
    """A block's backward pass, from dy to dx; what it computes again is `recomputed`. The optimizer is not in it."""
    width, size, ranks = shape.width, shape.itemsize, shape.ranks
    times, rows = _tiles(tokens, tile)
    rms = shape.norm == "rms"
    last = rms_norm_backward(tokens, width, size, dresidual=True) if rms else add_low(tokens, width, size)
    middle = rms_norm_backward if rms else layer_norm_backward
    return _work(
        Operation("dz", "memory", Cost() if rms else layer_norm_backward(rows, width, size), times),
        *_low_backward("dm", rows, width, 0, ranks.down, size, times),
        *_weighted("dm", shape, rows, width, shape.columns, times),
        Operation("du", "memory", activate_backward(rows, shape.columns, shape.gated, size, ranks.gu, ranks.down), times),
        *_weight_gradient("dm", shape, rows, width, shape.columns, times),
        *_low_backward("dh2", rows, shape.gu, width, ranks.gu, size, times),
        *_weighted("dh2", shape, rows, shape.gu, width, times),
        *_weight_gradient("dh2", shape, rows, shape.gu, width, times),
        Operation("dr", "memory", middle(rows, width, size, dresidual=True), times),
        *_low_backward("da", tokens, width, shape.queries, ranks.o, size),
        *_weighted("da", shape, tokens, width, shape.queries),
        *_weight_gradient("da", shape, tokens, width, shape.queries),
        Operation("dqkv", "attention_backward", _attention(shape, tokens, sequence, back=True)),
        Operation("dqkv", "memory", rope_backward(tokens, shape.qkv, size)),
        *_low_backward("dh1", tokens, shape.qkv, width, ranks.qkv, size),
        *_weighted("dh1", shape, tokens, shape.qkv, width),
        *_weight_gradient("dh1", shape, tokens, shape.qkv, width),
        Operation("dx", "memory", last),
    )


# The stages of the forward pass that the backward pass of a rung runs again, by the norm of the block.
_AGAIN: dict[str, dict[Keep, str]] = {
    "rms": {"all": "", "projections": "h2 u", "attention": "h1 qkv o h2 u", "input": "h1 qkv a o h2 u"},
    "layer": {"all": "h2", "projections": "h2 u", "attention": "qkv o h2 u m d y", "input": "qkv a o h2 u m d y"},
}


def recomputed(shape: BlockShape, keep: Keep, tokens: int, sequence: int, tile: int | None = None) -> Work:
    """What the backward pass of a rung runs again: never the down projection of a pre-norm block, as nothing before it depends on it."""
    again = _AGAIN[shape.norm][keep].split() + ["m"] * shape.makes_m_again + ["h1", "h2"] * shape.trained
    return tuple(one for one in forward(shape, tokens, sequence, tile) if one.stage in again)


def linear_cross_entropy(tokens: int, width: int, vocabulary: int, trained: bool = False, itemsize: int = 2) -> Work:
    """The loss head in chunks, its gradients made in the forward pass: two matmuls, three where the head trains."""
    times, rows = _tiles(tokens, head_rows(vocabulary, itemsize))
    product = matmul(rows, width, vocabulary, itemsize)
    return _work(
        Operation("logits", "matmul", product, times),
        Operation("loss", "memory", cross_entropy_(rows, vocabulary, itemsize), times),
        Operation("dhidden", "matmul", product, times),
        Operation("dweight", "matmul", product if trained else Cost(), times),
    )


def head_rows(vocabulary: int, itemsize: int = 2) -> int:
    """Rows of a chunk of logits at most, as petune.kernels.head cuts them."""
    fewest, most = HEAD_ROWS
    return max(fewest, min(most, HEAD_BYTES // max(1, vocabulary * itemsize) // 128 * 128))


def update(shape: BlockShape) -> Work:
    """AdamW on what trains in a block: weights in their own dtype, low-rank factors in float32."""
    of_weights = adamw(shape.parameters, shape.itemsize) if shape.trained else Cost()
    return _work(Operation("update", "memory", of_weights + adamw(shape.adapters)))


def _work(*operations: Operation) -> Work:
    return tuple(one for one in operations if one.cost.flop or one.cost.bytes)


def _tiles(tokens: int, tile: int | None) -> tuple[int, float]:
    """(tiles, rows of each on average)."""
    times = max(1, ceil(tokens / tile)) if tile else 1
    return times, tokens / times


def _weighted(stage: str, shape: BlockShape, rows: float, inner: int, columns: int, times: int = 1) -> Work:
    """A matmul with a weight, which in eight bits quantises what it reads first."""
    product = matmul(rows, inner, columns, shape.itemsize)
    if not shape.fp8:
        return (Operation(stage, "matmul", product, times),)
    return (Operation(stage, "memory", quantise(rows, inner, shape.itemsize), times), Operation(stage, "matmul_fp8", product, times))


def _weight_gradient(stage: str, shape: BlockShape, rows: float, outputs: int, inputs: int, times: int = 1) -> Work:
    product = matmul(outputs, rows, inputs, shape.itemsize)
    return (Operation(stage, "matmul", product, times),) if shape.trained else ()


def _low_backward(stage: str, rows: float, outputs: int, inputs: int, rank: int, size: int, times: int = 1) -> Work:
    """ds and db from the outputs' gradient; da from the inputs and their gradient's update, for `inputs` > 0: elsewhere they ride along."""
    costs = [low_rank(rows, outputs, rank, size)] * 2
    if inputs:
        costs += [low_rank(rows, inputs, rank, size), low_rank_update(rows, inputs, rank, size)]
    return tuple(Operation(stage, "memory", cost, times) for cost in costs)


def _attention(shape: BlockShape, tokens: int, sequence: int, back: bool = False) -> Cost:
    cost = attention_backward if back else attention
    return cost(tokens, sequence, shape.heads, shape.kv_heads, shape.head_dim, shape.causal, shape.itemsize)


# ------------------------------------------------------------------ the memory of a block


def tensors(shape: BlockShape) -> dict[str, int]:
    """Bytes per token of every tensor that the tables below name."""
    size, ranks = shape.itemsize, shape.ranks
    sizes = {
        "x h1 o r t h2 d z y dy dz dh2 dr dt dh1 dx": shape.width * size,
        "qkv dq_dk_dv dqkv": shape.qkv * size,
        "a da": shape.queries * size,
        "u du": shape.gu * size,
        "m dm": shape.columns * size,
        "s": ranks.qkv * size,
        "s_o": ranks.o * size,
        "s_up": ranks.gu * size,
        "s_down": ranks.down * size,
        "dq_sum": shape.queries * 4,
        "lse delta": shape.heads * 4,
        "statistics": 8 if shape.norm == "rms" else 16,  # of both norms, in float32
        "m_fp8": shape.columns * shape.fp8,
        "du_fp8": shape.gu * shape.fp8,
    }
    return {name: size for names, size in sizes.items() for name in names.split()}


# What a rung keeps. A rung keeps what the one below it does, and more.
_KEPT: dict[str, dict[Keep, str]] = {
    "rms": {
        "input": "x s_o s_down",
        "attention": "x s_o s_down a lse",
        "projections": "x s_o s_down a lse qkv s r statistics",
        "all": "x s_o s_down a lse qkv s r statistics u s_up",
    },
    "layer": {
        "input": "x s_o s_down",
        "attention": "x s_o s_down a lse",
        "projections": "x s_o s_down a lse qkv s t z statistics",
        "all": "x s_o s_down a lse qkv s t z statistics u s_up",
    },
}

# Phase: the tensors alive in it. What the rung keeps is counted beside a working set, not in it. The MLP's tensors exist a tile at a time;
# `tiles` are a result's pieces, which are still there when the `whole` is joined.
_IN_TILES = "o r t h2 u m m_fp8 d z y dz dm du du_fp8 dh2"
_FORWARD: dict[str, dict[str, str]] = {
    "rms": {
        "projection": "x h1 qkv s",
        "attention": "x qkv s a lse",
        "norm": "x a lse o r h2 y_tiles",
        "up": "x a lse r h2 u s_up y_tiles",
        "activation": "x a lse r u s_up m y_tiles",
        "down": "x a lse r m m_fp8 d y y_tiles",
        "joining": "x a lse y_tiles y_whole r_whole",
    },
    "layer": {
        "projection": "x qkv s",
        "attention": "x qkv s a lse",
        "norm": "x a lse o t h2 y_tiles",
        "activation": "x a lse o t h2 u s_up m y_tiles",
        "down": "x a lse o t h2 u s_up m m_fp8 d z y y_tiles",
        "joining": "x a lse y_tiles y_whole t_whole",
    },
}
_MLP_BACKWARD: dict[str, dict[str, str]] = {
    "rms": {
        "activation, backward": "dy r h2 u s_up dm du dr_tiles",
        "up, backward": "dy r h2 du du_fp8 dh2 dr_tiles",
        "norm, backward": "dy r dh2 dr dr_tiles",
    },
    "layer": {
        "activation, backward": "dy t z h2 u s_up dz dm du dr_tiles",
        "up, backward": "dy t z h2 u s_up dz du du_fp8 dh2 dr_tiles",
        "norm, backward": "dy t z h2 u s_up dz du dh2 dt da dr_tiles",
    },
}
_ATTENTION_BACKWARD: dict[str, dict[str, str]] = {
    "rms": {
        "projection, again": "dy dr da x a lse h1 qkv s",
        "attention, backward": "dy dr da x a lse qkv s dq_dk_dv dq_sum delta",
        "rotation, backward": "dy dr da x a lse qkv s dq_dk_dv dqkv",
        "projection, backward": "dy dr da x a lse qkv s dqkv dh1",
        "first norm, backward": "dy dr da x a lse qkv s dh1 dx",
    },
    "layer": {
        "projection, again": "dy dt da x a lse qkv s",
        "attention, backward": "dy dt da x a lse qkv s dq_dk_dv dq_sum delta",
        "projection, backward": "dy dt da x a lse qkv s dq_dk_dv dqkv dx",
    },
}
_AGAIN_FROM_INPUT = {"projection, again": "dy x h1 qkv s", "attention, again": "dy x qkv s a lse"}
_AGAIN_FROM_ATTENTION = {
    "rms": {"norm, again": "dy x a lse o r h2 dr_tiles"},
    "layer": {"norm, again": "dy x a lse o t h2 dr_tiles", "down, again": "dy x a lse t h2 u s_up m d z y dr_tiles"},
}


@dataclass(frozen=True)
class Phase:
    """A stretch of a pass, and the bytes of each tensor alive in it but for those that the block keeps."""

    name: str
    buffers: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """Of all its buffers."""
        return sum(size for _, size in self.buffers)


def kept_bytes(shape: BlockShape, keep: Keep) -> int:
    """Bytes per token that a block keeps for its backward pass, wherever they rest."""
    sizes = tensors(shape)
    return sum(sizes[name] for name in _KEPT[shape.norm][keep].split())


def phases(shape: BlockShape, keep: Keep, tokens: int, tile: int | None = None) -> tuple[Phase, ...]:
    """The phases of a block's forward pass, then of its backward pass. A block that keeps all is not tiled."""
    tiled = _is_tiled(keep, tokens, tile)
    rows = tile if tiled and tile is not None else tokens
    in_tiles, kept = _IN_TILES.split(), _KEPT[shape.norm][keep].split()
    sizes = {name: size * (rows if name in in_tiles else tokens) for name, size in tensors(shape).items()}
    joined = shape.width * shape.itemsize * tokens * tiled
    gradients = 1 if shape.norm == "rms" else 1 + shape.queries / shape.width  # of r, or of t and a
    sizes |= {"y_tiles": joined, "y_whole": joined, "dr_tiles": int(joined * gradients)}
    sizes |= {"r_whole": joined * ("r" in kept), "t_whole": 2 * joined * ("t" in kept)}  # t and z
    return tuple(
        Phase(name, tuple((one, sizes[one]) for one in dict.fromkeys(alive.split()) if one not in kept and sizes[one]))
        for name, alive in (*_FORWARD[shape.norm].items(), *_backward_phases(shape, keep))
    )


def _backward_phases(shape: BlockShape, keep: Keep) -> Iterator[tuple[str, str]]:
    """A block that keeps its input runs attention again before its MLP and holds what it made; one that keeps attention projects late."""
    norm, held = shape.norm, ""
    if keep == "input":
        yield from _AGAIN_FROM_INPUT.items()
        held = " qkv s a lse"
    if keep in ("input", "attention"):
        yield from ((name, alive + held) for name, alive in _AGAIN_FROM_ATTENTION[norm].items())
    for name, alive in _MLP_BACKWARD[norm].items():
        again = " m" if shape.makes_m_again and name == "activation, backward" else ""
        # A pre-norm block that keeps u has no use for h2 unless weights train: the norm's scale is applied to the gradient's rows.
        spared = alive.replace(" h2 ", " ") if norm == "rms" and keep == "all" and not shape.trained else alive
        yield name, spared + again + held
    for name, alive in _ATTENTION_BACKWARD[norm].items():
        if name != "projection, again" or keep == "attention":
            yield name, alive + (" h1" if shape.trained and norm == "rms" and name == "projection, backward" else "")


def working_set(shape: BlockShape, keep: Keep, tokens: int, tile: int | None = None) -> int:
    """Bytes alive at once beside what blocks keep: in the fullest phase of a block, and its gradients, which are float32 until its end.

    A weight that trains has its gradient summed over tiles, so that the largest is there twice.
    """
    twice = shape.width * shape.gu if _is_tiled(keep, tokens, tile) else 0
    gradients = 4 * (_stacked(shape) + (shape.parameters + twice) * shape.trained)
    return max(phase.bytes for phase in phases(shape, keep, tokens, tile)) + gradients


def _is_tiled(keep: Keep, tokens: int, tile: int | None) -> bool:
    return tile is not None and tile < tokens and keep != "all"


def head_bytes(tokens: int, width: int, vocabulary: int, itemsize: int = 2) -> int:
    """Bytes alive at once between the last block and the loss, and back, for a final norm made of single operations in float32.

    The loss has the last block's result in float32, the same normed, the gradient of that, and a chunk of logits. The norm's backward pass
    has its incoming gradient, and in float32 the first of these, the gradient, what it becomes and one product on the way.
    """
    loss = (2 * itemsize + 4) * tokens * width + itemsize * min(tokens, head_rows(vocabulary, itemsize)) * vocabulary
    return max(loss, (itemsize + 16) * tokens * width)


def standing_bytes(shape: BlockShape) -> int:
    """Bytes that a block holds beside its parameters while a step runs: its factors stacked, in the dtype of the computation, and frozen
    weights in eight bits, twice."""
    return _stacked(shape) * shape.itemsize + 2 * shape.parameters * shape.fp8


def _stacked(shape: BlockShape) -> int:
    """Numbers of the factors as the engine stacks them: those of q, k and v, and of gate and up, on the diagonal of one matrix."""
    ranks, width = shape.ranks, shape.width
    of_attention = ranks.qkv * (width + shape.qkv) + ranks.o * (shape.queries + width)
    return of_attention + ranks.gu * (width + shape.gu) + ranks.down * (shape.columns + width)


# ------------------------------------------------------------------ parameters in host memory


def streamed_host_bytes(shape: BlockShape) -> int:
    """Bytes of pinned host memory in which a block's weights and AdamW states rest, all in the weights' dtype."""
    return (1 + ADAMW_STATES) * shape.itemsize * shape.parameters


def streamed_device_bytes(shape: BlockShape) -> int:
    """Bytes on the device while blocks stream: weights, gradients and states of STREAMED_BLOCKS blocks."""
    return STREAMED_BLOCKS * (2 + ADAMW_STATES) * shape.itemsize * shape.parameters
