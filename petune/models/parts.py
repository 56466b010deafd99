"""What sub-layers are described with: roles, norms, groups of linears, positions that attention scores, how
tensors are sliced, sizes. The vocabulary's other words, and these again, are in spec.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

# qkv, gate_up: linears that are several, whose outputs lie side by side in this order
# q_pos, k_pos: of the positions that attention scores itself
Role = Literal["q", "k", "v", "o", "q_pos", "k_pos", "gate", "up", "down", "qkv", "gate_up", "experts"]
OPTIONAL: tuple[Role, ...] = ("gate", "q_pos", "k_pos")  # that a block may lack


@dataclass(frozen=True)
class Norm:
    """A norm of a block, by its path. offset: what is added to its weight; over: all features of a token, or
    those of each head."""

    path: str
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    over: Literal["features", "head"] = "features"


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
    there.
    """

    argument: str
    linears: LinearGroup
    makers: tuple[str, ...]
    half: str
    own: Mapping[str, type[nn.Module]]


CutKind = Literal["column", "row"]  # how a linear is cut across ranks: by its outputs or by its inputs
Columns = Literal["columns", "dense", "shared"]  # the field of Shape with those of an MLP


class Pieces(NamedTuple):
    """A dim that is several equal pieces one behind the other, as gate | up, each of which is sliced; or
    where a column takes several places in a row."""

    dim: int
    number: int = 1
    places: int = 1


# The dim that is sliced; "owner": on the first rank alone; "after": whole, and acting after the region's sum;
# None: whole, inside the cut
Split = int | Pieces | Literal["owner", "after"] | None


@dataclass(frozen=True)
class Shape:
    """The sizes a cut or a side network needs: head counts, width of one head, MLP columns (of one expert,
    where there are experts), hidden width, and the number of experts, 0 without; beside experts the columns
    of a dense block's MLP and of a shared expert, 0 without."""

    heads: int
    kv_heads: int
    head_dim: int
    columns: int
    width: int
    experts: int = 0
    dense: int = 0
    shared: int = 0
