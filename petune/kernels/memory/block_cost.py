"""The seconds of a transformer block on a device: its passes as lists of operations, and the rates that a device sustains.

An operation is as slow as its arithmetic, its traffic or its launch (Williams et al. 2009, the roofline). Stages have the names of the
tensors that they make; petune.kernels.memory.buffers says which those are, and what they come to in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log
from typing import Literal

from petune.kernels.head.linear_cross_entropy import chunk_rows
from petune.kernels.memory.op_cost import (
    Cost,
    Operation,
    Work,
    activate,
    activate_backward,
    adamw,
    add,
    add_low,
    attention,
    attention_backward,
    costing,
    cross_entropy_,
    layer_norm,
    layer_norm_backward,
    low_rank,
    low_rank_update,
    matmul,
    quantise,
    rms_norm,
    rms_norm_backward,
    rope_,
    rope_backward,
)
from petune.kernels.memory.shape import BlockShape

Keep = Literal["all", "projections", "attention", "input"]
Curve = tuple[tuple[int, float], ...]  # (sequence length, FLOP/s), by rising length

# ------------------------------------------------------------------ devices


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


def forward(shape: BlockShape, tokens: int, sequence: int, tile: int | None = None) -> Work:
    """A block's forward pass over `tokens` in sequences of `sequence`, the MLP in tiles of `tile` tokens."""
    width, size, ranks = shape.width, shape.itemsize, shape.ranks
    times, rows = _tiles(tokens, tile)
    rms = shape.norm == "rms"
    beside, deferred = (ranks.gu, 0) if not shape.defers else (0, ranks.gu)
    normed = rms_norm if rms else layer_norm
    return costing(
        Operation("h1", "memory", rms_norm(tokens, width, size) if rms else Cost()),
        Operation("qkv", "memory", low_rank(tokens, width, ranks.qkv, size)),
        *_updated("qkv", shape, tokens, width, shape.qkv, ranks.qkv),
        Operation("qkv", "memory", rope_(tokens, shape.qkv, size) if rms else Cost()),
        Operation("a", "attention", _attention(shape, tokens, sequence)),
        Operation("o", "memory", low_rank(rows, shape.queries, ranks.o, size), times),
        *_updated("o", shape, rows, shape.queries, width, ranks.o, times, room=False),
        Operation("h2", "memory", normed(rows, width, size, residual=True), times),
        Operation("u", "memory", low_rank(rows, width, ranks.gu, size), times),
        *_updated("u", shape, rows, width, shape.gu, beside, times),
        Operation("m", "memory", activate(rows, shape.columns, shape.gated, size, deferred, ranks.down), times),
        *_updated("d", shape, rows, shape.columns, width, ranks.down, times),
        Operation("y", "memory", add(rows, width, size) if rms else layer_norm(rows, width, size, residual=True), times),
    )


def backward(shape: BlockShape, tokens: int, sequence: int, tile: int | None = None) -> Work:
    """A block's backward pass, from dy to dx; what it computes again is `recomputed`. The optimizer is not in it."""
    width, size, ranks = shape.width, shape.itemsize, shape.ranks
    times, rows = _tiles(tokens, tile)
    rms = shape.norm == "rms"
    last = rms_norm_backward(tokens, width, size, dresidual=True) if rms else add(tokens, width, size)
    middle = rms_norm_backward if rms else layer_norm_backward
    return costing(
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
    times, rows = _tiles(tokens, chunk_rows(vocabulary, itemsize))
    product = matmul(rows, width, vocabulary, itemsize)
    return costing(
        Operation("logits", "matmul", product, times),
        Operation("loss", "memory", cross_entropy_(rows, vocabulary, itemsize), times),
        Operation("dhidden", "matmul", product, times),
        Operation("dweight", "matmul", product if trained else Cost(), times),
    )


def update(shape: BlockShape) -> Work:
    """AdamW on what trains in a block: weights in their own dtype, low-rank factors in float32."""
    of_weights = adamw(shape.parameters, shape.itemsize) if shape.trained else Cost()
    return costing(Operation("update", "memory", of_weights + adamw(shape.adapters)))


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


def _updated(stage: str, shape: BlockShape, rows: float, inner: int, columns: int, rank: int, times: int = 1, room: bool = True) -> Work:
    """A matmul with a weight and its low-rank update: one product where the weight has room for the factor, else a sum in float32."""
    if not rank or (room and not shape.fp8):
        return _weighted(stage, shape, rows, inner + rank, columns, times)
    wider = Operation(stage, "memory", Cost(0, (4 - shape.itemsize) * rows * columns), times)
    summed = Operation(stage, "memory", add_low(rows, columns, shape.itemsize, rank), times)
    return (*_weighted(stage, shape, rows, inner, columns, times), wider, summed)


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
