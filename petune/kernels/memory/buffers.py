"""The bytes of a fused block: tables of the tensors that it keeps and that are alive in each phase of its passes, so its peak of memory.

The tables describe one engine, petune/kernels/program.py, and have its names, with the two norms told apart. Pre-norm:
x -> h1 -> qkv -> a, lse -> o -> r = x + o -> h2 -> u -> m -> d -> y = r + d. Post-norm: no h1; t = x + o -> h2 -> u -> m -> d -> z = h2 + d
-> y. s, s_o, s_up and s_down are low-rank inputs; a d before a name is its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from petune.kernels.head.linear_cross_entropy import chunk_rows
from petune.kernels.memory.block_cost import Keep
from petune.kernels.memory.shape import BlockShape, Ranks

STREAMED_BLOCKS = 3  # blocks on the device while parameters stream: the one that runs, the one that arrives, the one that leaves
ADAMW_STATES = 2  # numbers AdamW keeps for each one that trains


def tensors(shape: BlockShape) -> dict[str, int]:
    """Bytes per token of every tensor that the tables below name."""
    size, ranks, wide = shape.itemsize, shape.ranks, 4 * shape.fp8
    room = Ranks() if shape.fp8 else replace(ranks, gate=0, up=0) if shape.defers else ranks
    sizes = {
        "x o r t d z y dy dz dh2 dr dt dh1 dx": shape.width * size,
        "h1 x_s": (shape.width + room.qkv) * size,
        "h2": (shape.width + room.gu) * size,
        "qkv dq_dk_dv dqkv": shape.qkv * size,
        "a da": shape.queries * size,
        "u du": shape.gu * size,
        "m": (shape.columns + room.down) * size,
        "dm m_again": shape.columns * size,
        "qkv_sum": shape.qkv * wide * (ranks.qkv > 0),
        "o_sum": shape.width * 4 * (ranks.o > 0),
        "d_sum": shape.width * wide * (ranks.down > 0),
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
_IN_TILES = "o o_sum r t h2 u m m_again m_fp8 d d_sum z y dz dm du du_fp8 dh2"
_FORWARD: dict[str, dict[str, str]] = {
    "rms": {
        "projection": "x h1 qkv_sum qkv s",
        "attention": "x qkv s a lse",
        "output": "x a lse o_sum o y_tiles",
        "norm": "x a lse o r h2 y_tiles",
        "up": "x a lse r h2 u s_up y_tiles",
        "activation": "x a lse r u s_up m y_tiles",
        "down": "x a lse r u m m_fp8 d_sum d y_tiles",
        "joining": "x a lse y_tiles y_whole",
    },
    "layer": {
        "projection": "x x_s qkv_sum qkv s",
        "attention": "x qkv s a lse",
        "output": "x a lse o_sum o y_tiles",
        "norm": "x a lse o t h2 y_tiles",
        "up": "x a lse h2 u s_up y_tiles",
        "activation": "x a lse h2 u s_up m y_tiles",
        "down": "x a lse h2 u s_up m m_fp8 d_sum d y_tiles",
        "last norm": "x a lse h2 d z y y_tiles",
        "joining": "x a lse y_tiles y_whole",
    },
}
_MLP_BACKWARD: dict[str, dict[str, str]] = {
    "rms": {
        "activation, backward": "dy r h2 u s_up dm du dr_tiles",
        "up, backward": "dy r h2 du du_fp8 dh2 dr_tiles",
        "norm, backward": "dy r dh2 dr dr_tiles",
    },
    "layer": {
        "last norm, backward": "dy t z h2 u s_up dz dr_tiles",
        "activation, backward": "dy t h2 u s_up dz dm du dr_tiles",
        "up, backward": "dy t h2 dz du du_fp8 dh2 dr_tiles",
        "norm, backward": "dy t dh2 dt dr_tiles",
    },
}
_ATTENTION_BACKWARD: dict[str, dict[str, str]] = {
    "rms": {
        "projection, again": "dy dr da x a lse h1 qkv_sum qkv s",
        "attention, backward": "dy dr da x a lse qkv s dq_dk_dv dq_sum delta",
        "rotation, backward": "dy dr x s dq_dk_dv dqkv",
        "projection, backward": "dy dr x s dqkv dh1",
        "first norm, backward": "dy dr x dh1 dx",
    },
    "layer": {
        "projection, again": "dy dt da x a lse x_s qkv_sum qkv s",
        "attention, backward": "dy dt da x a lse qkv s dq_dk_dv dq_sum delta",
        "heads, backward": "dy dt da x a lse qkv s dq_dk_dv dqkv",
        "projection, backward": "dy dt x s dqkv dx",
    },
}
_AGAIN_FROM_INPUT = {"projection, again": "dy x h1 qkv_sum qkv s", "attention, again": "dy x qkv s a lse"}
_AGAIN_FROM_ATTENTION = {
    "rms": {"norm, again": "dy x a lse o r h2 dr_tiles"},
    "layer": {
        "norm, again": "dy x a lse o t h2 dr_tiles",
        "down, again": "dy x a lse t h2 u s_up m d dr_tiles",
        "last norm, again": "dy x a lse t h2 u s_up d z y dr_tiles",
    },
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
    sizes |= dict.fromkeys(("y_tiles", "y_whole", "dr_tiles"), joined)
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
        again = " m_again" if shape.makes_m_again and name == "activation, backward" else ""
        # A block that keeps u makes h2 again for the gradients of up alone; a pre-norm one not even there unless weights train, as the
        # norm's scale is applied to the gradient's rows.
        useless = (norm == "layer" and name == "activation, backward") or (norm == "rms" and not shape.trained)
        spared = alive.replace(" h2 ", " ") if keep == "all" and useless else alive
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
    """Bytes alive at once between the last block and the loss, and back, for a final norm that is one operation.

    The last block's result, the same normed, the gradient of that, and a chunk of logits.
    """
    return 3 * itemsize * tokens * width + itemsize * min(tokens, chunk_rows(vocabulary, itemsize)) * vocabulary


def standing_bytes(shape: BlockShape) -> int:
    """Bytes that a block holds beside its parameters while a step runs: its factors stacked, in the dtype of the computation, the room for
    them behind frozen weights, and frozen weights in eight bits, twice."""
    ranks = shape.ranks
    up = ranks.gu * shape.gu if shape.gated or not shape.defers else 0
    room = 0 if shape.fp8 else ranks.qkv * shape.qkv + up + ranks.down * shape.width
    return (_stacked(shape) + room) * shape.itemsize + 2 * shape.parameters * shape.fp8


def _stacked(shape: BlockShape) -> int:
    """Numbers of the factors as the engine stacks them: those of q, k and v, and of gate and up, on the diagonal of one matrix."""
    ranks, width = shape.ranks, shape.width
    of_attention = ranks.qkv * (width + shape.qkv) + ranks.o * (shape.queries + width)
    return of_attention + ranks.gu * (width + shape.gu) + ranks.down * (shape.columns + width)


# ------------------------------------------------------------------ parameters in host memory


def states_bytes(itemsize: int, wide: bool) -> int:
    """Bytes of AdamW's states of a streamed parameter: in the weights' dtype, or `wide`, in float32 with a master of a narrower weight."""
    return 4 * (ADAMW_STATES + (itemsize < 4)) if wide else ADAMW_STATES * itemsize


def streamed_host_bytes(shape: BlockShape, wide: bool = False) -> int:
    """Bytes of pinned host memory in which a block's weights and AdamW states rest; `wide` as of `states_bytes`."""
    return (shape.itemsize + states_bytes(shape.itemsize, wide)) * shape.parameters


def streamed_device_bytes(shape: BlockShape, wide: bool = False) -> int:
    """Bytes on the device while blocks stream: weights, gradients and states of STREAMED_BLOCKS blocks."""
    return STREAMED_BLOCKS * (2 * shape.itemsize + states_bytes(shape.itemsize, wide)) * shape.parameters
