"""A block of a family as a fused one computes it, read off the model by the family's table; or the reason why
it cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn
from transformers.activations import ACT2FN

from petune.kernels.block.call import Spec
from petune.kernels.block.called import CalledCore
from petune.kernels.block.cores import called
from petune.kernels.block.mixture import Mixture
from petune.kernels.block.program import Sizes, compiled
from petune.kernels.dispatch import Ops
from petune.kernels.norm_probe import clamps, computes, eps_of
from petune.models.acts import ACTS
from petune.models.attention import CAPPING
from petune.models.boundary import boundary_of
from petune.models.exchange import Exchange, exchange_of
from petune.models.experts import gates_plainly, low_ranks_of, spread_of
from petune.models.sharded import class_in
from petune.models.spec import (
    Attention,
    LinearAttention,
    LinearGroup,
    Mlp,
    Norm,
    Role,
    RoutedMlp,
    Shape,
    StackRule,
    SubLayer,
    child_of,
)
from petune.models.stack import Stack
from petune.models.tuned_linear import (
    BottleneckPart,
    LowRank,
    TunedLinear,
    TunedOfAnyClass,
    bottleneck_of,
    linear_of,
)

# of a config
_ACT_KEYS = ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn")


def spec_of(block: nn.Module, stack: Stack, shape: Shape, config: Any, ops: Ops) -> Spec | str:
    """The block as a fused one computes it, or why it cannot be."""
    if stack.rule.unfused is not None:
        return stack.rule.unfused
    name = str(next((own for key in _ACT_KEYS if (own := getattr(config, key, None))), None))
    sublayers = read_sublayers(block, stack.rule)
    cores = [sublayer.core for sublayer in sublayers]
    mixed = [core for core in cores if isinstance(core, RoutedMlp)]
    stepped = [one for one in sublayers if not called(one.core)]
    for path, part in filter(None, (_bottleneck(block, one, one is sublayers[-1]) for one in stepped)):
        if part.activation not in ACTS.values():
            where = path or "the block"
            return f"the activation {part.activation!r} of the bottleneck behind {where} has no kernel"
    for core in (*cores, *(own.shared for own in mixed if own.shared)):
        if (stranger := _other_layer(block, core)) is not None:
            return stranger
        if not called(core) and (strange := _shared_entry(block, core)) is not None:
            return f"{strange} scales an input that other linears read"
    for own in mixed:
        if own.shared is not None and any(_scaled_roles(block, own.shared)):
            return "the tuning scales what linears of its shared expert read or give"
    if (reason := next(filter(None, (_other_mixture(block, core) for core in mixed)), None)) is not None:
        return reason
    if mixed and getattr(config, "output_router_logits", False):
        return "the loss that keeps its routers even reads their scores (output_router_logits)"
    if (act := ACTS.get(name)) is None:
        return f"its activation {name!r} has no kernel"
    crosses = any(isinstance(one.core, Attention) and one.core.memory is not None for one in sublayers)
    if not crosses and (getattr(block, "is_decoder", False) or getattr(block, "add_cross_attention", False)):
        return "it attends to an encoder, of which its family's table says nothing"
    norms = [(norm, block.get_submodule(norm.path)) for sublayer in sublayers for norm in _norms_of(sublayer)]
    if (
        reason := _stranger(block, name, [core.at for core in cores if called(core)])
        or _other_norm(norms)
        or _other_attention(block, sublayers)
    ) is not None:
        return reason
    attentions = [
        block.get_submodule(core.at) for core in cores if isinstance(core, Attention) and not core.called
    ]
    heads = _heads(block, sublayers, shape)
    boundaries = {
        at: boundary
        for at, one in enumerate(sublayers)
        if not called(one.core) and (boundary := boundary_of(block.get_submodule(one.core.at)))
    }
    program = compiled(
        _exchanging(block, sublayers, heads[1]), Sizes(*heads, act, cast("float", eps_of(norms[0][1])))
    )
    spec = Spec(
        program=program,
        layers=[[block.get_submodule(path) for path in group.paths] for group in program.groups],
        norms=[
            (block.get_submodule(norm.path), name)
            for norm in program.norms
            for name in ("weight", "bias")[: 1 + (norm.kind == "layer")]
        ],
        dropouts=[_where(block, path) for path in program.dropouts],
        behind=[block.get_submodule(path) for path in program.bottlenecks],
        mixtures=[_mixture(block, core) for core in program.mixtures],
        sinks=[_where(block, path) for path in program.sinks],
        called=[CalledCore(block.get_submodule(core.at), core) for core in program.called],
        attentions=attentions,
        boundaries=boundaries,
        exchanges=[exchange_of(attention) for attention in attentions],
        ops=ops,
        arguments=tuple(inspect.signature(type(block).forward).parameters)[2:],
        carry=stack.rule.carry,
        distances=_distances(block, sublayers),
        clamps=stack.rule.clamps,
    )
    return spec.overflows(spec.dtype) or spec


def _other_layer(block: nn.Module, core: Attention | Mlp | RoutedMlp) -> str | None:
    """A layer of a core that computes something else than a linear, with a bottleneck behind its last one."""
    for role, path in core.region.sites.items():
        layer = block.get_submodule(path)
        known = low_ranks_of(layer) if role == "experts" else linear_of(layer)
        if known is None or (bottleneck_of(layer) is not None and path != core.region.leave):
            return f"{path} is a {_kind(layer)}"
    return None


def _bottleneck(block: nn.Module, sublayer: SubLayer, last: bool) -> tuple[str, BottleneckPart] | None:
    """The bottleneck that acts in a sub-layer, with the path of the module that it is part of. last: whether
    the block ends with it."""
    for of_sum in (False, *((True,) if last or sublayer.norm_after_sum else ())):
        path = sublayer.bottleneck_at(of_sum)
        part = bottleneck_of(block.get_submodule(path))
        if part is not None and part.of_sum == of_sum:
            return path, part
    return None


def _other_mixture(block: nn.Module, core: RoutedMlp) -> str | None:
    """What a mixture computes beside what the table says."""
    whole: Any = block.get_submodule(core.at)
    if getattr(whole, "jitter_noise", 0):
        return "its routers read noise (router_jitter_noise)"
    experts = block.get_submodule(core.experts)
    if not (gates_plainly(experts) if core.act is None else clamps(experts)):
        return f"{core.experts} is a {type(experts).__name__}, whose gate has no steps"
    gate = None if core.gate is None else block.get_submodule(core.gate)
    return None if gate is None or type(gate) is nn.Linear else f"{core.gate} is a {type(gate).__name__}"


def _mixture(block: nn.Module, core: RoutedMlp) -> Mixture:
    gate = None if core.gate is None else cast("nn.Linear", block.get_submodule(core.gate))
    return Mixture(block.get_submodule(core.router), block.get_submodule(core.experts), gate)


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


def _other_attention(block: nn.Module, sublayers: Sequence[SubLayer]) -> str | None:
    """An attention that computes something else than the table says."""
    for core in (one.core for one in sublayers if isinstance(one.core, Attention)):
        module = block.get_submodule(core.at)
        exchange, boundary = exchange_of(module), boundary_of(module)
        if core.called and exchange is not None:
            return "its attention, which is called as it is, does not see tokens of other ranks"
        if core.called and boundary is not None and boundary.overlapped:
            return "its attention, which is called as it is, hides what it says to other ranks in its own way"
        if core.called:
            continue
        if exchange is not None and not isinstance(exchange, Exchange):
            return f"its attention exchanges tokens in a way that is not known here ({_name(exchange)})"
        if core.causal and not getattr(module, "is_causal", True):
            return (
                "its attention sees later tokens too (use_bidirectional_attention), of which its family's"
                " table says nothing"
            )
        if core.rotary and (share := _turned(module)) != 1:
            return f"its positions turn {share:.0%} of a head's columns"
        if core.sinks and exchange is not None:
            return "its attention has sinks, which does not see tokens of other ranks"
        if core.softcap and exchange is not None and exchange.kind == "ring":
            return "its attention caps its scores (attn_logit_softcapping), which a ring does not"
        if core.softcap and (own := cast("Any", module).config._attn_implementation) not in CAPPING:
            return f"its scores are capped, and its own attention ({own}) leaves that out: choose eager"
    return None


def _turned(attention: Any) -> float:
    """The share of a head's columns that rotary positions turn, by the config of an attention."""
    found = getattr(getattr(attention, "config", None), "rope_parameters", None) or {}
    return float(found.get("partial_rotary_factor", 1.0))


def _heads(block: nn.Module, sublayers: Sequence[SubLayer], shape: Shape) -> tuple[int, int, int]:
    """(heads, key and value heads, columns of one): as the block counts them, whose stack may differ from the
    other one's, else as many as its weights have columns for, of which a rank may have some."""
    core = next(one.core for one in sublayers if isinstance(one.core, Attention))
    if core.called:  # which nobody asks for
        return shape.heads, shape.kv_heads, shape.head_dim
    if "qkv" in core.region.sites:
        group = shape.heads // shape.kv_heads
        rows = len(cast("Any", block.get_submodule(core.region.sites["qkv"])).weight)
        keys = rows // (shape.head_dim * (group + 2))
        return group * keys, keys, shape.head_dim
    queries, keys = (
        len(cast("Any", block.get_submodule(core.region.sites[role])).weight) for role in ("q", "k")
    )
    if not core.head_counts:
        return queries // shape.head_dim, keys // shape.head_dim, shape.head_dim
    heads = int(getattr(block.get_submodule(core.at), core.head_counts[0]))
    return heads, heads, queries // heads


def _exchanging(block: nn.Module, sublayers: Sequence[SubLayer], kv_heads: int) -> tuple[SubLayer, ...]:
    """The sub-layers, with how attention sees the tokens of other ranks."""

    def described(sublayer: SubLayer) -> SubLayer:
        core = sublayer.core
        exchange = exchange_of(block.get_submodule(core.at))
        if not isinstance(core, Attention) or exchange is None or core.called:
            return sublayer
        return replace(sublayer, core=replace(core, exchange=exchange.described(kv_heads)))

    return tuple(map(described, sublayers))


def _name(exchange: Any) -> str:
    return str(getattr(exchange, "__name__", type(exchange).__name__))


def _distances(block: nn.Module, sublayers: Sequence[SubLayer]) -> tuple[nn.Module, str] | None:
    """The attention that has the table of relative positions and where, if this block does."""
    cores = ((one.core.at, one.core.bias) for one in sublayers if isinstance(one.core, Attention))
    return next(
        ((block.get_submodule(at), path) for at, path in cores if path and child_of(block, f"{at}.{path}")),
        None,
    )


def read_sublayers(block: nn.Module, rule: StackRule) -> tuple[SubLayer, ...]:
    """The sub-layers of a table, those that this block has and as it has them."""
    found = rule.sublayers_in(block)
    return tuple(_read(block, sublayer, sublayer is found[-1]) for sublayer in found)


def _read(block: nn.Module, sublayer: SubLayer, last: bool) -> SubLayer:
    """The sub-layer with what this block has of it: paths that exist, no gate or norm of heads where there is
    none, the scale, the bottleneck that a method has put behind it."""
    core = sublayer.core
    if isinstance(core, Attention) and (core.gated or isinstance(core, LinearAttention)):
        count = sum(1 for _ in block.get_submodule(core.at).parameters())
        # what a method puts there is its own affair
        return replace(sublayer, core=replace(core, called=count))
    behind, boundary = _bottleneck(block, sublayer, last), boundary_of(block.get_submodule(core.at))
    part = None if behind is None else behind[1]
    connection = None if boundary is None else boundary.connection
    scale = getattr(block, sublayer.scale) if isinstance(sublayer.scale, str) else sublayer.scale
    features = 0 if part is None else part.features
    drop = None if sublayer.drop is None or _is_none(block, sublayer.drop) else sublayer.drop
    scaled, entries = _scaled_roles(block, core)
    sublayer = replace(
        sublayer,
        drop=drop,
        scale=scale,
        bottleneck=features,
        beside=part is not None and part.beside,
        of_sum=part is not None and part.of_sum,
        scaled=scaled,
        entries=entries,
        connection=connection,
    )
    if isinstance(core, Mlp):
        return replace(sublayer, core=replace(core, up=_present(block, core.up)))
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
    q_norm, k_norm = (
        norm if norm is not None and child_of(block, norm.path) else None
        for norm in (core.q_norm, core.k_norm)
    )
    core = replace(core, q_norm=q_norm, k_norm=k_norm, rotary=rotary)
    return replace(sublayer, core=replace(core, scale=scale, window=window, softcap=softcap))


def _kind(layer: nn.Module) -> str:
    """What to call a layer that is not fused."""
    return layer.kind if isinstance(layer, TunedLinear) else type(layer).__name__


def _scaled_roles(
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


def _shared_entry(block: nn.Module, core: Attention | Mlp | RoutedMlp) -> str | None:
    """A linear whose input is scaled for it alone, though others read it too; None where there is none."""
    if isinstance(core, RoutedMlp):
        return None
    groups = (core.up,) if isinstance(core, Mlp) else core.groups
    paths = [path for group in groups if len(group.members) > 1 for _, path in group.members]
    return next((path for path in paths if _part(block, path).scaling == "inputs"), None)


def _part(block: nn.Module, path: str) -> LowRank:
    return cast("LowRank", linear_of(block.get_submodule(path)))


def _present(block: nn.Module, group: LinearGroup) -> LinearGroup:
    found = ((role, child_of(block, path)) for role, path in group.members)
    return LinearGroup(tuple((role, hit[0]) for role, hit in found if hit is not None))


def _norms_of(sublayer: SubLayer) -> list[Norm]:
    """Its norms."""
    core = sublayer.core
    heads = (core.q_norm, core.k_norm) if isinstance(core, Attention) and not core.called else ()
    return [
        norm
        for norm in (sublayer.norm_in, *heads, sublayer.norm_out, sublayer.norm_after_sum)
        if norm is not None
    ]


def _stranger(block: nn.Module, activation: str, own: Sequence[str]) -> str | None:
    """What in the block, but for modules that it calls as they are, is neither torch's, transformers' nor
    ours, so that it may compute anything, or is not the config's activation."""
    known = type(ACT2FN[activation])
    for path, module in block.named_modules():
        if any(f"{path}.".startswith(f"{at}.") for at in own):
            continue
        kind = class_in(module)
        homes = {kind.__module__.partition(".")[0], str(kind.forward.__module__).partition(".")[0]}
        if "forward" in vars(module) or not homes <= {"torch", "transformers", "petune"}:
            return f"{path or 'the block'} is a {kind.__name__} whose forward is not transformers' own"
        if not (
            module._modules or module._parameters or isinstance(module, known | nn.Dropout | nn.Identity)
        ):
            return f"{path} is a {kind.__name__}, and the config's activation is {activation!r}"
    return None


def _other_norm(norms: Sequence[tuple[Norm, nn.Module]]) -> str | None:
    """A norm that computes something else than the table says, or with another epsilon than the first."""
    for norm, found in norms:
        part = bottleneck_of(found)  # of what the norm is part of, it is the norm itself that is tried
        widened = part is not None and part.of_sum
        module = cast("TunedOfAnyClass", found).plain() if widened else found
        if (norm.kind == "layer" and type(module) is not nn.LayerNorm) or not computes(
            module, norm.kind, norm.offset
        ):
            kind = "a LayerNorm" if norm.kind == "layer" else "an RMS norm"
            scale = (
                f" that scales by {norm.offset:g} + weight" if norm.offset else " that scales by its weight"
            )
            return f"its norm {type(module).__name__} is not {kind}{scale}, by a probe of what it computes"
        if eps_of(module) != eps_of(norms[0][1]):
            return "its norms have different epsilons"
    return None


def _is_none(block: nn.Module, path: str) -> bool:
    """Whether an identity stands in the place of a dropout, of which nothing ever drops out."""
    owner, name = _where(block, path)
    return isinstance(getattr(owner, name), nn.Identity)


def _where(block: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module and the attribute of it that a path names."""
    owner, _, name = path.rpartition(".")
    return block.get_submodule(owner), name
