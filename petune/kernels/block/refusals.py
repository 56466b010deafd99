"""Why a block cannot be fused: what in it computes something else than its family's table says, or than there
are kernels for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from transformers.activations import ACT2FN

from petune.kernels.block.cores import called, calls_all, is_called
from petune.kernels.block.sublayers import bottleneck_in, norms_of, scaled_roles
from petune.kernels.norm_probe import clamps, computes, eps_of
from petune.models.acts import ACTS
from petune.models.attention import CAPPING
from petune.models.boundary import boundary_of
from petune.models.exchange import Exchange, exchange_of
from petune.models.experts import gates_plainly, low_ranks_of
from petune.models.sharded import class_in
from petune.models.spec import Attention, Mlp, Norm, PerToken, RoutedMlp, StackRule, SubLayer
from petune.models.tuned_linear import TunedLinear, TunedOfAnyClass, bottleneck_of, linear_of
from petune.models.tuned_parts import LowRank


def refusal(block: nn.Module, sublayers: Sequence[SubLayer], config: Any, activation: str) -> str | None:
    """Why a block of these sub-layers cannot be fused, or None. activation: by its config's name."""
    cores = [sublayer.core for sublayer in sublayers]
    mixed = [core for core in cores if isinstance(core, RoutedMlp)]
    stepped = [one for one in sublayers if not calls_all(one.core)]
    for path, part in filter(None, (bottleneck_in(block, one, one is sublayers[-1]) for one in stepped)):
        if part.activation not in ACTS.values():
            where = path or "the block"
            return f"the activation {part.activation!r} of the bottleneck behind {where} has no kernel"
    for core in (*cores, *(own.shared for own in mixed if own.shared)):
        if (stranger := _other_layer(block, core)) is not None:
            return stranger
        if not called(core) and (strange := _shared_entry(block, core)) is not None:
            return f"{strange} scales an input that other linears read"
    for own in mixed:
        if own.shared is not None and any(scaled_roles(block, own.shared)):
            return "the tuning scales what linears of its shared expert read or give"
    if (reason := next(filter(None, (_other_mixture(block, core) for core in mixed)), None)) is not None:
        return reason
    if mixed and getattr(config, "output_router_logits", False):
        return "the loss that keeps its routers even reads their scores (output_router_logits)"
    if activation not in ACTS:
        return f"its activation {activation!r} has no kernel"
    crosses = any(isinstance(one.core, Attention) and one.core.memory is not None for one in sublayers)
    if not crosses and (getattr(block, "is_decoder", False) or getattr(block, "add_cross_attention", False)):
        return "it attends to an encoder, of which its family's table says nothing"
    for path in (path for one in sublayers if one.per_token for path in _of_tokens(one.per_token)):
        layer: Any = block.get_submodule(path)
        if class_in(layer) is not nn.Linear or layer.bias is not None:
            return f"{path} is a {_kind(layer)}, and the table says torch's Linear without a bias"
    norms = [(norm, block.get_submodule(norm.path)) for sublayer in sublayers for norm in norms_of(sublayer)]
    bare = [norm.path for norm, _ in norms if not norm.scales]
    return (
        _stranger(block, activation, [core.at for core in cores if called(core)], bare)
        or _other_norm(norms)
        or _other_attention(block, sublayers)
    )


def unread(block: nn.Module, rule: StackRule) -> str | None:
    """Why a block cannot be read by its table, written for other names of its attention's, or None."""
    for core in (one.core for one in rule.sublayers_in(block)):
        if isinstance(core, Attention) and core.scale is None and not is_called(core):
            module = block.get_submodule(core.at)
            if not hasattr(module, "scaling"):
                return f"{core.at} is a {type(module).__name__}, which does not say the scale of its scores"
    return None


def _of_tokens(table: PerToken) -> tuple[str, str]:
    return table.enter, table.leave


def _other_layer(block: nn.Module, core: Attention | Mlp | RoutedMlp) -> str | None:
    """A layer of a core that computes something else than a linear, with a bottleneck behind its last one."""
    for role, path in core.region.sites.items():
        layer = block.get_submodule(path)
        known = low_ranks_of(layer) if role == "experts" else linear_of(layer)
        if known is None or (bottleneck_of(layer) is not None and path != core.region.leave):
            return f"{path} is a {_kind(layer)}"
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


def _other_attention(block: nn.Module, sublayers: Sequence[SubLayer]) -> str | None:
    """An attention that computes something else than the table says."""
    for core in (one.core for one in sublayers if isinstance(one.core, Attention)):
        module = block.get_submodule(core.at)
        exchange, boundary = exchange_of(module), boundary_of(module)
        if core.called and exchange is not None:
            return "its attention, which is called as it is, does not see tokens of other ranks"
        if core.called and boundary is not None and boundary.connection == "sequence":
            return "its attention, which is called as it is, reads tokens of other ranks"
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
        if core.rotary and core.pairs in ("halves", "twins") and (share := _turned(module)) != 1:
            return f"its positions turn {share:.0%} of a head's columns"
        if core.lending and exchange is not None:
            return "its blocks share keys and values, and attention sees tokens of other ranks"
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


def _name(exchange: Any) -> str:
    return str(getattr(exchange, "__name__", type(exchange).__name__))


def _kind(layer: nn.Module) -> str:
    """What to call a layer that is not fused."""
    return layer.kind if isinstance(layer, TunedLinear) else type(layer).__name__


def _shared_entry(block: nn.Module, core: Attention | Mlp | RoutedMlp) -> str | None:
    """A linear whose input is scaled for it alone, though others read it too; None where there is none."""
    if isinstance(core, RoutedMlp):
        return None
    groups = (core.up,) if isinstance(core, Mlp) else core.groups
    paths = [path for group in groups if len(group.members) > 1 for _, path in group.members]
    return next((path for path in paths if _part(block, path).scaling == "inputs"), None)


def _part(block: nn.Module, path: str) -> LowRank:
    return cast("LowRank", linear_of(block.get_submodule(path)))


def _stranger(block: nn.Module, activation: str, own: Sequence[str], bare: Sequence[str]) -> str | None:
    """What in the block, but for modules that it calls as they are, is neither torch's, transformers' nor
    ours, so that it may compute anything, or is not the config's activation. bare: norms without weights."""
    known = type(ACT2FN[activation])
    for path, module in block.named_modules():
        if any(f"{path}.".startswith(f"{at}.") for at in own):
            continue
        kind = class_in(module)
        homes = {kind.__module__.partition(".")[0], str(kind.forward.__module__).partition(".")[0]}
        if "forward" in vars(module) or not homes <= {"torch", "transformers", "petune"}:
            return f"{path or 'the block'} is a {kind.__name__} whose forward is not transformers' own"
        held = module._modules or module._parameters or path in bare
        if not (held or isinstance(module, known | nn.Dropout | nn.Identity)):
            return f"{path} is a {kind.__name__}, and the config's activation is {activation!r}"
    return None


def _other_norm(norms: Sequence[tuple[Norm, nn.Module]]) -> str | None:
    """A norm that computes something else than the table says, or with another epsilon than the first."""
    for norm, found in norms:
        part = bottleneck_of(found)  # of what the norm is part of, it is the norm itself that is tried
        widened = part is not None and part.of_sum
        module = cast("TunedOfAnyClass", found).plain() if widened else found
        if not computes(module, norm.kind, norm.offset, norm.scales, norm.over == "each"):
            kind = "a LayerNorm" if norm.kind == "layer" else "an RMS norm"
            by = f"by {norm.offset:g} + weight" if norm.offset else "by its weight"
            scale = f" that scales {by if norm.scales else 'nothing'}"
            return f"its norm {type(module).__name__} is not {kind}{scale}, by a probe of what it computes"
        if eps_of(module) != eps_of(norms[0][1]):
            return "its norms have different epsilons"
    return None
