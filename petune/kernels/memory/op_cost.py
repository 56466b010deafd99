"""What each operation of petune.kernels.reference that a step makes, and a few beside them, costs:
floating-point operations and bytes moved.

Functions have the reference's names. A multiply-add is two FLOP. Matrices are [rows, columns]; itemsize is
bytes per element; ranks may be 0: no low-rank part.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
from typing import Literal, Protocol

# Of operation: which rate bounds it. Narrow: a product that reads or writes a large matrix and has few ranks,
# on the memory's side. Grouped: products of rows in groups with weights of their own.
CostKind = Literal["matmul", "matmul_fp8", "grouped", "attention", "attention_backward", "narrow", "memory"]


@dataclass(frozen=True)
class Cost:
    """Floating-point operations, and bytes read from and written to device memory.

    hashes: elements of which it is computed whether they drop out. beside: in FLOP at the rates that are
    measured, what is computed for nobody (rows that fill the last tile of a group), and what attention takes
    longer than cuDNN's with heads of `HEAD`, of which those rates are. tiles: of a product's result; pieces:
    of them at most, where few are cut along the sum.
    """

    flop: float = 0.0
    bytes: float = 0.0
    hashes: float = 0.0
    beside: float = 0.0
    tiles: float = 0.0
    pieces: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(times * one for one in vars(self).values()))

    __rmul__ = __mul__

    def idle(self, processors: int) -> float:
        """Times as long as with all processors busy, where each has a tile at a time."""
        if not self.tiles:
            return 1.0
        few = max(1.0, min(self.pieces / self.tiles, processors // self.tiles))
        each = self.tiles * few / processors
        return ceil(each) / each


@dataclass(frozen=True)
class KernelCost:
    """One kernel, launched `times` times: the stage of the block it belongs to, the rate that bounds it, the
    cost of one launch."""

    stage: str
    kind: CostKind
    cost: Cost
    times: int = 1


Work = tuple[KernelCost, ...]
HEAD = 128
# Shares of those rates that an H200 reaches: flash attention with heads of 256 (Gemma 3), and our own kernels
# of heads wider than `NARROW`, which cap scores, add biases by distance or have sinks (Gemma 2)
WIDE = 0.45
OF_512 = 0.25, 0.17  # our own with heads of 512 columns (Gemma 4), both ways
OWN = 0.6
NARROW = 64
TILE = 128  # rows, and columns, of a result that one processor computes at a time
PIECE = 1024  # numbers of each sum at least, where a result of few tiles is cut along it
SMALL = Cost(0, 1)  # a kernel that takes no more than its launch


def costing(*operations: KernelCost) -> Work:
    """Those of `operations` that cost anything."""
    return tuple(one for one in operations if one.cost.flop or one.cost.bytes)


def total(work: Iterable[KernelCost]) -> Cost:
    """The cost of all of `work`."""
    return sum((one.cost * one.times for one in work), Cost())


# ------------------------------------------------------------------ what each costs


def matmul(rows: float, inner: float, columns: float, itemsize: int = 2) -> Cost:
    """[rows, inner] times [inner, columns]."""
    moved = itemsize * (rows * inner + inner * columns + rows * columns)
    tiles = ceil(rows / TILE) * ceil(columns / TILE)
    return Cost(2 * rows * inner * columns, moved, tiles=tiles, pieces=tiles * max(1, inner // PIECE))


def grouped(rows: float, inner: float, columns: float, groups: float, itemsize: int = 2) -> Cost:
    """Rows in so many groups, each times a matrix [inner, columns] of its own; or the products of the rows of
    each group, which give such matrices. Of more groups than rows some are empty; the last tile of each
    other is half full on average."""
    active = min(groups, rows)
    moved = rows * inner + active * inner * columns + rows * columns
    filling = 2 * active * (TILE / 2) * inner * columns
    return Cost(2 * rows * inner * columns, itemsize * moved, beside=filling)


def low_rank(rows: float, columns: float, rank: float, itemsize: int = 2) -> Cost:
    """A product that reads a matrix once and gives rank-sized results: s = x a^T, ds = dy b, db = dy^T s.
    Nothing for rank 0."""
    if not rank:
        return Cost()
    return Cost(2 * rows * columns * rank, itemsize * (rows * columns + (rows + columns) * rank))


def dropped_low(rows: float, columns: float, rank: float, parts: int, itemsize: int = 2) -> Cost:
    """`low_rank` of a matrix of which each of so many parts drops elements of its own; the way back costs the
    same."""
    return low_rank(rows, columns, rank, itemsize) + Cost(hashes=parts * rows * columns * (rank > 0))


def add_dropped_low_(rows: float, columns: float, rank: float, parts: int, itemsize: int = 2) -> Cost:
    """dx += ds a by such parts, dx read and written once. Nothing for rank 0."""
    written = Cost(0, itemsize * rows * columns * (rank > 0))
    return dropped_low(rows, columns, rank, parts, itemsize) + written


def rms_norm(rows: float, columns: float, itemsize: int = 2, residual: bool = False) -> Cost:
    """x read, its norm written; with a residual that is read and the total written too."""
    return Cost((4 + residual) * rows * columns, (2 + 2 * residual) * itemsize * rows * columns + 4 * rows)


def rms_norm_backward(rows: float, columns: float, itemsize: int = 2, dresidual: bool = False) -> Cost:
    """dy and the total read, the total's gradient written; dresidual read too."""
    return Cost((8 + dresidual) * rows * columns, (3 + dresidual) * itemsize * rows * columns + 4 * rows)


def stepwise_rms_norm(rows: float, columns: float, itemsize: int = 2) -> tuple[list[Cost], list[Cost]]:
    """The operations of an RMS norm as models write it in torch, after a residual is added: forward, and
    backward with a frozen weight. Each reads what it needs from memory and writes what it makes: in four
    bytes at least, but for the residual and the product with the weight.

    Forward the sum; the square and its mean; the product with the root, and with the weight. Backward the
    last; the product's gradients, one of them summed; the mean's; the square's, which makes 2 x in two
    operations; both added up, and the residual's.
    """
    wide = max(itemsize, 4)
    casts = [itemsize + wide] * 2 if wide > itemsize else []
    ahead = [3 * itemsize, 2 * wide, wide, 2 * wide, 2 * itemsize, *casts]
    inside = [2 * wide, 3 * wide, wide, wide, 2 * wide, 2 * wide, 3 * wide, 3 * wide]
    back = [2 * itemsize, *inside, 3 * itemsize, *casts]
    found = ([Cost(rows * columns, moved * rows * columns) for moved in way] for way in (ahead, back))
    forward, backward = found
    return forward, backward


class CostOfEach(Protocol):
    """What an operation on each number of [rows, columns] costs."""

    def __call__(self, rows: float, columns: float, itemsize: int = 2) -> Cost: ...


def each(flop: float, matrices: int) -> CostOfEach:
    """So many FLOP for each number, and so many matrices read or written."""

    def cost(rows: float, columns: float, itemsize: int = 2) -> Cost:
        return Cost(flop * rows * columns, matrices * itemsize * rows * columns)

    return cost


rope_ = each(3, 2)  # qkv read and written in place
rope_backward = each(3, 2)  # dq, dk and dv read, dqkv written
rope_unscale = each(10, 3)  # dq, dk, dv and qkv read, the gradient of what was scaled written
norm_rope = each(7, 2)  # raw read, qkv written
norm_rope_backward = each(15, 3)  # dq, dk, dv and raw read, the gradient of raw written
add = each(1, 3)  # x and y read, their sum written
copy = each(0, 2)  # a matrix read and written elsewhere
unscale = each(4, 3)  # dy and y read, dz written
# logits [rows, vocabulary] read twice, for the partition sum and for the gradient that takes their place
cross_entropy_ = each(6, 3)


def layer_norm(rows: float, columns: float, itemsize: int = 2, residual: bool = False) -> Cost:
    """As `rms_norm`, with a mean and a bias."""
    return rms_norm(rows, columns, itemsize, residual) + Cost(3 * rows * columns, 4 * rows)


def layer_norm_backward(rows: float, columns: float, itemsize: int = 2, dresidual: bool = False) -> Cost:
    """As `rms_norm_backward`, with a mean."""
    return rms_norm_backward(rows, columns, itemsize, dresidual) + Cost(3 * rows * columns, 4 * rows)


def activate(
    rows: float, columns: float, gated: bool, itemsize: int = 2, rank: float = 0, below: float = 0
) -> Cost:
    """u read, h written. columns: of h; rank: of u's low-rank part (all of its columns); below: of the next
    one, whose s is made."""
    wide = columns * (1 + gated)
    flop = rows * (5 * columns + 2 * wide * rank + 2 * columns * below)
    return Cost(flop, itemsize * (rows * (wide + columns + rank + below) + wide * rank + columns * below))


def activate_backward(
    rows: float, columns: float, gated: bool, itemsize: int = 2, rank: float = 0, below: float = 0
) -> Cost:
    """dh and u read, du written; both low-rank parts are added, and their gradients made, on the way."""
    wide = columns * (1 + gated)
    flop = rows * (12 * columns + 4 * wide * rank + 4 * columns * below)
    return Cost(
        flop, itemsize * (rows * (2 * wide + columns + rank + below) + 3 * (wide * rank + columns * below))
    )


def add_low(rows: float, columns: float, itemsize: int = 2, rank: float = 0) -> Cost:
    """A product in float32 read, its low-rank part added, the sum written."""
    return Cost(
        (1 + 2 * rank) * rows * columns, (4 + itemsize) * rows * columns + itemsize * (rows + columns) * rank
    )


def over_lengths(rows: float, columns: float, rank: float, itemsize: int = 2) -> Cost:
    """A weight read once, for the lengths of its rows and what an update of that rank adds to them."""
    return Cost(2 * (1 + rank) * rows * columns, itemsize * (rows * columns + (rows + columns) * rank))


def drop(rows: float, columns: float, itemsize: int = 2) -> Cost:
    """A matrix read and written, a random number made for every element."""
    return Cost(20 * rows * columns, 2 * itemsize * rows * columns, rows * columns)


def quantise(rows: float, columns: float, itemsize: int = 2) -> Cost:
    """A matrix read, its eight-bit form and one scale per row written."""
    return Cost(3 * rows * columns, (itemsize + 1) * rows * columns + 4 * rows)


def dense_into(rows: float, columns: float, held: float, itemsize: int = 2) -> Cost:
    """A quantised matrix read, of `held` bytes a number, and its values written."""
    return Cost(0, (held + itemsize) * rows * columns)


def attention(
    tokens: float,
    sequence: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool = True,
    itemsize: int = 2,
    keys: float | None = None,
    window: float | None = None,
    own: bool = False,
    back: bool = False,
) -> Cost:
    """Softmax attention that keeps no scores, of `tokens` in sequences of `sequence` (Dao et al. 2022,
    arXiv:2205.14135).

    keys: of each sequence of another kind that the queries attend to, in cross-attention. window: the last
    keys that a query of causal attention sees, of any other those to either side. own: by our own kernels.
    back: its backward pass: scores made again and four more products; dq is summed in float32.
    """
    others = 1 if keys is None else keys / max(1, sequence)  # keys for each query
    flop = 4 * heads * head_dim * tokens * _seen(sequence, causal, keys, window) * (2.5 if back else 1)
    moved = tokens * (2 * (heads + others * kv_heads) * head_dim * itemsize + 4 * heads) * (1 + back)
    moved += 8 * tokens * heads * head_dim * back
    return Cost(flop, moved, beside=_beside(flop, head_dim, own, OF_512[back]))


attention_backward = partial(attention, back=True)


def _beside(flop: float, head_dim: int, own: bool, widest: float) -> float:
    """Of other heads and kernels; widest: the share of heads above 256 columns. Narrow heads have fewer
    products for each exponential: an H200 runs heads of 64 at 0.71 of the rate of heads of 128, both ways."""
    if head_dim > 256:
        return flop * (1 / widest - 1)
    share = (sqrt(head_dim / HEAD) if head_dim <= HEAD else WIDE) * (OWN if own and head_dim > NARROW else 1)
    return flop * (1 / share - 1)


def _seen(sequence: float, causal: bool, keys: float | None, window: float | None) -> float:
    """The keys that a query sees on average."""
    if keys is not None:
        return keys
    if window is not None and window < sequence:
        return window * (1 - window / (2 * sequence)) * (1 if causal else 2)
    return sequence / 2 if causal else sequence


def adamw(parameters: float, itemsize: int = 4) -> Cost:
    """One step of AdamW: parameter, gradient and two states read, all but the gradient written. itemsize: of
    what trains, in whose dtype are gradient and states, however narrow an activation is."""
    return Cost(14 * parameters, 7 * itemsize * parameters)


def cast(numbers: float, before: int, after: int) -> Cost:
    """So many numbers read, and written in other bytes; nothing where the bytes are the same."""
    return Cost(0, (before + after) * numbers * (before != after))
