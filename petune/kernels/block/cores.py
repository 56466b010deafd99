"""What the cores of a block's sub-layers are to its program: their names, how many tensors they have, and
where something drops out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from petune.kernels.reference import Act
from petune.models.spec import Attention, Family, LinearAttention, Mlp, RoutedMlp, SubLayer

Core = Attention | Mlp | RoutedMlp
Drawn = Literal["group", "drop", "bottleneck", "core"]  # what has a dropout of its own


@dataclass(frozen=True)
class CoreSizes:
    """What a table does not say of a block: heads and their width, the activation of its MLP, the epsilon of
    its norms."""

    heads: int
    kv_heads: int
    head_dim: int
    act: Act
    eps: float


class Drawing(NamedTuple):
    """A draw of what drops out: of the group, dropout or bottleneck number `at`, or all of a called core's.
    within: the number of the sub-layer, cut across ranks, inside which it is; over: what of it is one rank's
    part, None for nothing. head: the first head of those that this rank has traded tokens for, in whose
    attention it is."""

    kind: Drawn
    at: int
    within: int | None = None
    over: Literal["features", "heads"] | None = None
    head: int | None = None


def has_sinks(core: Core) -> bool:
    """Whether it is attention whose sinks a step reads."""
    return isinstance(core, Attention) and core.sinks is not None and not core.called


def called(core: Core) -> int:
    """Tensors of a core that the block calls as it is, 0 for any other."""
    return core.called if isinstance(core, Attention) else 0


def is_called(core: Core) -> bool:
    """Whether no steps compute it, so that a block calls it as it is."""
    return isinstance(core, LinearAttention) or (
        isinstance(core, Attention) and (core.gated or core.positions is not None)
    )


def calls_cores(family: Family) -> bool:
    """Whether blocks of a family call one of their cores as it is."""
    return any(is_called(core) for rule in family.stacks.values() for core in rule.cores)


def calls_all(core: Core) -> bool:
    """Whether the block calls the linear by which the core is left too, as a part of the rest."""
    return called(core) > 0 and core.region.leave.startswith(f"{core.at}.")


def vectors_in(sublayer: SubLayer) -> list[bool]:
    """Of each vector of a sub-layer, that of its features and that of its sum, whether it trains; of the
    matrices of vectors of tokens, between both, too."""
    own = [] if sublayer.vector is None else [sublayer.learns]
    own += [] if sublayer.per_token is None else [sublayer.per_token.learns] * 2
    return own if sublayer.factor is None else [*own, False]


def name_of(core: Core) -> str:
    """What its values are named after."""
    if isinstance(core, Attention):
        return "attention" if core.memory is None else "cross"
    return "mlp"


def linears_of(core: Core) -> int:
    """Its linears that are products of steps, a shared expert's among them."""
    if isinstance(core, RoutedMlp):
        return 0 if core.shared is None else linears_of(core.shared)
    if called(core):
        return 0 if calls_all(core) else 1
    groups = (core.up,) if isinstance(core, Mlp) else core.groups
    return 1 + sum(len(group.members) for group in groups)
