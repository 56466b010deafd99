"""The sub-layers of a family's table as a block of the model has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from petune.kernels.block.cores import called, calls_all, is_called, vectors_in
from petune.models.boundary import boundary_of
from petune.models.experts import spread_of
from petune.models.joined import MEMBERS
from petune.models.spec import (
    Attention,
    Lending,
    LinearGroup,
    Mlp,
    Norm,
    PerToken,
    Role,
    RoutedMlp,
    StackRule,
    SubLayer,
    child_of,
)
from petune.models.tuned_linear import bottleneck_of, linear_of
from petune.models.tuned_parts import BottleneckPart


def read_sublayers(block: nn.Module, rule: StackRule) -> tuple[SubLayer, ...]:
    """The sub-layers of a table, those that this block has and as it has them."""
    found = rule.sublayers_in(block)
    return tuple(_read(block, sublayer, sublayer is found[-1]) for sublayer in found)


def _read(block: nn.Module, sublayer: SubLayer, last: bool) -> SubLayer:
    """The sub-layer with what this block has of it: paths that exist, no gate or norm of heads where there is
    none, the scale, the bottleneck that a method has put behind it."""
    sublayer = replace(sublayer, core=_chosen(block, sublayer.core))
    core = sublayer.core
    if isinstance(core, Attention) and is_called(core):
        core = _called(block, core)
        sublayer = replace(sublayer, core=core)
        if calls_all(core):  # what a method puts there is its own affair
            return sublayer
    behind, boundary = bottleneck_in(block, sublayer, last), boundary_of(block.get_submodule(core.at))
    part = None if behind is None else behind[1]
    connection = None if boundary is None else boundary.connection
    scale = getattr(block, sublayer.scale) if isinstance(sublayer.scale, str) else sublayer.scale
    features = 0 if part is None else part.features
    drop = None if sublayer.drop is None or _is_none(block, sublayer.drop) else sublayer.drop
    scaled, entries = scaled_roles(block, core)
    core = _by_parts(block, core)
    per_token = None if sublayer.per_token is None else _of_tokens(block, sublayer.per_token)
    sublayer = replace(
        sublayer,
        core=core,
        drop=drop,
        scale=scale,
        learns=sublayer.vector is not None and block.get_parameter(sublayer.vector).requires_grad,
        per_token=per_token,
        bottleneck=features,
        beside=part is not None and part.beside,
        of_sum=part is not None and part.of_sum,
        scaled=scaled,
        entries=entries,
        connection=connection,
    )
    if isinstance(core, Mlp) or called(core):
        return sublayer
    if isinstance(core, RoutedMlp):
        router: Any = block.get_submodule(core.router)
        normed = core.normed if isinstance(core.normed, bool) else bool(getattr(router, core.normed))
        spread = spread_of(block.get_submodule(core.experts))
        held, index = ((), 0) if spread is None else (spread.counts, spread.index)
        own = replace(core, normed=normed, chosen=int(router.top_k), held=held, index=index)
        return replace(sublayer, core=own)
    attention = block.get_submodule(core.at)
    scale = _scale(attention, core)
    window = None if core.memory is not None else _window(attention, core.causal)
    rotary = core.rotary if isinstance(core.rotary, bool) else bool(getattr(attention, core.rotary))
    softcap = getattr(attention, "attn_logit_softcapping", None)
    q_norm, k_norm, v_norm = (
        norm if norm is not None and child_of(block, norm.path) else None
        for norm in (core.q_norm, core.k_norm, core.v_norm)
    )
    lending = None if core.lending is None else _lending(attention, core.lending)
    core = replace(core, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm, rotary=rotary, lending=lending)
    return replace(sublayer, core=replace(core, scale=scale, window=window, softcap=softcap))


def _chosen(block: nn.Module, core: Attention | Mlp | RoutedMlp) -> Attention | Mlp | RoutedMlp:
    """The core with the linears that this block has, by the names that they have in it."""
    if isinstance(core, RoutedMlp):
        return core
    found = child_of(block, core.region.leave)
    leave = core.region.leave if found is None else found[0]
    if isinstance(core, Mlp):
        return replace(core, up=_present(block, core.up), down=leave)
    return replace(core, groups=tuple(_present(block, group) for group in core.groups), out=leave)


def _of_tokens(block: nn.Module, table: PerToken) -> PerToken | None:
    """What a block makes of vectors of tokens, None where it is handed none."""
    if child_of(block, table.enter) is None:
        return None
    weights = [block.get_parameter(f"{path}.weight") for path in (table.enter, table.leave)]
    return replace(table, features=len(weights[0]), learns=any(one.requires_grad for one in weights))


def _lending(attention: nn.Module, table: Lending) -> Lending | None:
    """Whether attention hands its keys on, or reads those of others; None where it does neither."""
    lends, borrows = (
        says if isinstance(says, bool) else bool(getattr(attention, says))
        for says in (table.lends, table.borrows)
    )
    return replace(table, lends=lends, borrows=borrows) if lends or borrows else None


def _called(block: nn.Module, core: Attention) -> Attention:
    """The same with what its call needs."""
    module = block.get_submodule(core.at)
    tabled = core.positions is not None and bool(getattr(module, core.positions.asked))
    positions = core.positions and replace(core.positions, linears=_present(block, core.positions.linears))
    return replace(core, called=sum(1 for _ in module.parameters()), tabled=tabled, positions=positions)


def bottleneck_in(block: nn.Module, sublayer: SubLayer, last: bool) -> tuple[str, BottleneckPart] | None:
    """The bottleneck that acts in a sub-layer, with the path of the module that it is part of. last: whether
    the block ends with it."""
    for of_sum in (False, *((True,) if last or sublayer.norm_after_sum else ())):
        path = sublayer.bottleneck_at(of_sum)
        part = bottleneck_of(block.get_submodule(path))
        if part is not None and part.of_sum == of_sum:
            return path, part
    return None


def _window(attention: Any, causal: bool) -> int | None:
    """Tokens of the sliding window: of this attention, where it says so, else of its config, which says of
    some that they have none; 0 is none too. To both sides transformers' masks reach as many tokens as the
    config says, whatever an attention says of itself: ModernBERT's counts its own token, T5Gemma's does
    not."""
    config: Any = getattr(attention, "config", None)
    if hasattr(attention, "sliding_window"):
        own = attention.sliding_window or None
        return own if causal or own is None else config.sliding_window + 1
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[attention.layer_idx] == "full_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def _scale(attention: Any, core: Attention) -> float:
    if isinstance(core.scale, str):
        return float(getattr(attention, core.scale) ** -0.5)
    return float(attention.scaling) if core.scale is None else core.scale


def scaled_roles(
    block: nn.Module, core: Attention | Mlp | RoutedMlp
) -> tuple[frozenset[Role], frozenset[Role]]:
    """The roles of its linears whose results, and whose inputs, a method multiplies by what trains."""
    if isinstance(core, RoutedMlp):
        return frozenset(), frozenset()
    found = ((role, child_of(block, path)) for role, path in core.region.sites.items())
    parts = [(role, linear_of(hit[1])) for role, hit in found if hit is not None]
    known = [(role, part) for role, part in parts if part is not None]
    return (
        frozenset(role for role, part in known if part.scales_outputs),
        frozenset(role for role, part in known if part.scaling == "inputs"),
    )


def _present(block: nn.Module, group: LinearGroup) -> LinearGroup:
    found = ((role, child_of(block, path)) for role, path in group.members)
    return LinearGroup(tuple((role, hit[0]) for role, hit in found if hit is not None))


def _by_parts(block: nn.Module, core: Attention | Mlp | RoutedMlp) -> Attention | Mlp | RoutedMlp:
    """The core with the parts of a linear that is several, where each is tuned by itself, all at its path."""
    if isinstance(core, RoutedMlp):
        shared = None if core.shared is None else cast("Mlp", _by_parts(block, core.shared))
        return replace(core, shared=shared)

    def own(group: LinearGroup) -> LinearGroup:
        return LinearGroup(tuple((part, path) for role, path in group.members for part in parts(role, path)))

    def parts(role: Role, path: str) -> tuple[Role, ...]:
        linear = linear_of(block.get_submodule(path)) if role in MEMBERS else None
        return MEMBERS[role] if linear is not None and linear.parts else (role,)

    if isinstance(core, Mlp):
        return replace(core, up=own(core.up))
    return replace(core, groups=tuple(map(own, core.groups)))


def norms_of(sublayer: SubLayer) -> list[Norm]:
    """Its norms."""
    core = sublayer.core
    if isinstance(core, Attention) and not core.called:
        heads = core.q_norm, core.k_norm, core.v_norm
    else:
        heads = None, None, None
    tokens = None if sublayer.per_token is None else sublayer.per_token.norm
    return [
        norm
        for norm in (sublayer.norm_in, *heads, sublayer.norm_out, tokens, sublayer.norm_after_sum)
        if norm is not None
    ]


def begun(vectors: Sequence[tuple[nn.Module, str]], sublayers: Sequence[SubLayer]) -> bool:
    """Whether one of these vectors of a block trains that did not when its sub-layers were read, by which
    nothing is kept for that."""
    if not vectors:
        return False
    held = [learns for one in sublayers for learns in vectors_in(one)]
    return any(getattr(*at).requires_grad > own for at, own in zip(vectors, held, strict=True))


def _is_none(block: nn.Module, path: str) -> bool:
    """Whether an identity stands in the place of a dropout, of which nothing ever drops out."""
    owner, name = where(block, path)
    return isinstance(getattr(owner, name), nn.Identity)


def where(block: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module and the attribute of it that a path names."""
    owner, _, name = path.rpartition(".")
    return block.get_submodule(owner), name
