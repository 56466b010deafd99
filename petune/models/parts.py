"""What sub-layers are described with: sizes, regions, roles, norms, groups of linears, positions that
attention scores, how tensors are sliced, how pictures and sounds are read. The vocabulary's other words, and
these again, are in spec.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import nn

Config = Any  # a transformers PreTrainedConfig, whose fields differ by family
Input = Literal["text", "image", "audio"]  # what a model reads

# qkv, gate_up: linears that are several, whose outputs lie side by side in this order
# q_pos, k_pos: of the positions that attention scores itself
# z, b, a: of attention without scores: the gate of its result, how much is written, how fast it decays
Role = Literal[
    "q",
    "k",
    "v",
    "o",
    "q_pos",
    "k_pos",
    "gate",
    "up",
    "down",
    "qkv",
    "gate_up",
    "experts",
    "z",
    "b",
    "a",
    "qkvz",
    "ba",
]
OPTIONAL: tuple[Role, ...] = ("gate", "q_pos", "k_pos")  # that a block may lack
# of a few rows, whose rounding a state would gather over all tokens: these are not quantised
FINE: tuple[Role, ...] = ("b", "a", "ba")


@dataclass(frozen=True)
class Norm:
    """A norm of a block, by its path. offset: what is added to its weight; over: all features of a token,
    those of a head or, with a row of weights for each head, those of each; scales: it has a weight."""

    path: str
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    over: Literal["features", "head", "each"] = "features"
    scales: bool = True

    def rows_below(self, at: str) -> dict[str, int]:
        """The weight if it has a row for each head, by its path below `at`, and in which dim they are."""
        return {f"{self.path.removeprefix(f'{at}.')}.weight": 0} if self.over == "each" else {}


@dataclass(frozen=True)
class Lending:
    """Keys and values, behind norms and positions, that blocks hand to later ones. argument: of a block, the
    mapping in which they are; key: the attribute of attention under whose value. lends, borrows: attention
    puts its own there, or reads those there and makes none; in a table the attributes of it that say so."""

    argument: str
    key: str
    lends: bool | str
    borrows: bool | str


@dataclass(frozen=True)
class PerToken:
    """What a block makes of a vector e that it is handed for every token (per-layer embeddings):

        y = x + norm(leave(act(enter(x)) * e))

    of linears without a bias that no method tunes, by their paths, and of the activation of its MLP.
    argument: of the block, e. features: of e; learns: the linears train; no table says them.
    """

    argument: str
    enter: str
    leave: str
    norm: Norm
    features: int = 0
    learns: bool = False


@dataclass(frozen=True)
class LinearGroup:
    """Linears that read the same input: (role, path) of each, in the order of their outputs. A gate may be
    absent from a block."""

    members: tuple[tuple[Role, str], ...]


def linears(**paths: str) -> LinearGroup:
    """The group of the linears at these paths, by role."""
    return LinearGroup(tuple(paths.items()))  # type: ignore[arg-type]  # names of keywords are str to mypy


@dataclass(frozen=True)
class Positions:
    """Scores of positions that attention makes itself, of a table that all rows share, so that it takes no
    attention function.

    argument: of `at`, the table [positions, width], which the model hands to every block. linears: of it
    alone, by role; a block that has none puts it through q and k. makers: modules beside the stack that make
    it, wherever blocks are. half: the attribute of `at` that is half the positions of the table. own: what
    extends the classes of `at`, whose name is "", and of modules below it, so that dropout is drawn by index
    there, and `at` takes a function `attend` for scores and what follows. asked, twice: the attributes of
    `at` that say whether it scores any, and whether the table goes through q and k. handed: what else a block
    hands `at`, by name; distances: that of them which says how far keys are from queries, [1, t, t], and
    depends on key - query alone; queries: what it would, where they are made of others than hidden states.
    drops: the dropouts of `at`.
    """

    argument: str
    linears: LinearGroup
    makers: tuple[str, ...]
    half: str
    own: Mapping[str, type[nn.Module]] = field(hash=False)
    asked: str
    twice: str
    handed: tuple[str, ...]
    distances: str
    queries: str
    drops: tuple[str, ...]


# the columns of a head that a position turns as one complex number, d of them: i and i + d / 2, or 2i and
# 2i + 1; the model's table of angles has each twice, in both halves or, for twins, side by side. d are all of
# a head or, of leading ones, which are halves, and of neighbours, its first, as many as the table has
Pairs = Literal["halves", "leading", "neighbours", "twins"]
CutKind = Literal["column", "row"]  # how a linear is cut across ranks: by its outputs or by its inputs
Columns = Literal["columns", "dense", "shared"]  # the field of Shape with those of an MLP


class Pieces(NamedTuple):
    """A dim that is several equal pieces one behind the other, as gate | up, each of which is sliced; or
    where a column takes several places in a row."""

    dim: int
    number: int = 1
    places: int = 1


class Member(NamedTuple):
    """A dim with the outputs of one part of a linear that is several, whose number this is (see
    petune.models.joined)."""

    dim: int
    number: int


# The dim that is sliced; "owner": on the first rank alone; "after": whole, and acting after the region's sum;
# None: whole, inside the cut
TensorSplit = int | Pieces | Member | Literal["owner", "after"] | None


@dataclass(frozen=True)
class Shape:
    """The sizes a cut or a side network needs: head counts, width of one head, MLP columns (of one expert,
    where there are experts), hidden width; the number of experts, 0 without, and beside them the columns of a
    dense block's MLP and of a shared expert; the number of blocks with a mixer; kinds: those of each kind of
    blocks, where they have other heads."""

    heads: int
    kv_heads: int
    head_dim: int
    columns: int
    width: int
    experts: int = 0
    dense: int = 0
    shared: int = 0
    mixers: int = 0
    kinds: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class Region:
    """Attention, MLP or a mixer, which no plan cuts, inside a block: the module it enters by, the row site it
    leaves by, its linears by role.

    Paths are relative to the block; `a|b` means the first that exists. `optional` regions (cross-attention)
    may be absent from a block. head_counts, kv_counts: attributes of that module with the number of heads,
    and of those of keys; "config.x": of its config. by_head, by_kv_head: tensors below that module with a
    place for each head, or for each of keys, and in which dim. gated: q has twice the features of its heads,
    see Attention. columns: see Columns. mixture: whether it is one of experts. lacks: roles besides OPTIONAL
    that a block may be without.
    """

    kind: Literal["attention", "mlp", "mixer"]
    enter: str
    leave: str
    sites: Mapping[Role, str]
    inputs: tuple[str, ...] = ("hidden_states",)
    head_counts: tuple[str, ...] = ()
    kv_counts: tuple[str, ...] = ()
    by_head: Mapping[str, int] = field(default_factory=dict)
    by_kv_head: Mapping[str, int] = field(default_factory=dict)
    cross: bool = False
    gated: bool = False
    columns: Columns = "columns"
    mixture: bool = False
    lacks: tuple[Role, ...] = ()

    @property
    def summed(self) -> str:
        """The module that gives one term of a sum where ranks share the region: of a mixture the whole, in
        which what its experts and the shared one give has met."""
        return self.enter if self.mixture else self.leave

    @property
    def within(self) -> bool:
        """Whether it is inside another region, that of a mixture, by which ranks enter and leave it."""
        return self.columns == "shared"


@dataclass(frozen=True)
class Signal:
    """How a model reads what is no text. argument: of its forward pass, a tensor [rows, channels, height,
    width] of pictures or [rows, features, frames] of sounds. embeddings: the modules before the first stack
    that make hidden states of it, by the names they have beside the stack. shape: of one input that a config
    is made for; fixed: it takes no other. tokens: (config, shape of one input) -> how many tokens the first
    stack has for it. idle: tensors that pretraining alone reads, by the ends of their names."""

    kind: Literal["image", "audio"]
    argument: str
    embeddings: tuple[str, ...]
    shape: Callable[[Config], tuple[int, ...]]
    tokens: Callable[[Config, Sequence[int]], int]
    fixed: bool = True
    idle: tuple[str, ...] = ()
