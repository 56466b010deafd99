"""A block of a family as a fused one computes it, read off the model by the family's table; or the reason why
it cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from petune.kernels.block.call import Spec
from petune.kernels.block.called import CalledCore
from petune.kernels.block.cores import CoreSizes, calls_all
from petune.kernels.block.mixture import Mixture
from petune.kernels.block.program import compiled
from petune.kernels.block.refusals import refusal, unread
from petune.kernels.block.sublayers import norms_of, read_sublayers, where
from petune.kernels.dispatch import Ops
from petune.kernels.norm_probe import eps_of
from petune.models.acts import ACTS
from petune.models.boundary import boundary_of
from petune.models.exchange import exchange_of
from petune.models.joined import rows_of_heads
from petune.models.spec import Attention, Mlp, RoutedMlp, Shape, SubLayer, child_of
from petune.models.stack import Stack
from petune.models.tuned_linear import linear_of
from petune.models.tuned_parts import LowRank

# attributes of a config
_ACT_KEYS = ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn")


def spec_of(block: nn.Module, stack: Stack, shape: Shape, config: Any, ops: Ops) -> Spec | str:
    """The block as a fused one computes it, or why it cannot be."""
    if (reason := unread(block, stack.rule)) is not None:
        return reason
    sublayers = read_sublayers(block, stack.rule)
    name = _activation(sublayers, config)
    if (reason := refusal(block, sublayers, config, name)) is not None:
        return reason
    cores = [sublayer.core for sublayer in sublayers]
    attentions = [
        block.get_submodule(core.at) for core in cores if isinstance(core, Attention) and not core.called
    ]
    heads = _heads(block, sublayers, shape)
    first = block.get_submodule(next(norm.path for one in sublayers for norm in norms_of(one)))
    boundaries = {
        at: boundary
        for at, one in enumerate(sublayers)
        if not calls_all(one.core) and (boundary := boundary_of(block.get_submodule(one.core.at)))
    }
    program = compiled(
        _exchanging(block, sublayers, heads[1]), CoreSizes(*heads, ACTS[name], cast("float", eps_of(first)))
    )
    spec = Spec(
        program=program,
        layers=[[block.get_submodule(path) for path in group.paths] for group in program.groups],
        norms=[
            (block.get_submodule(norm.path), name)
            for norm in program.norms
            for name in ("weight", "bias")[: 1 + (norm.kind == "layer")]
        ],
        dropouts=[where(block, path) for path in program.dropouts],
        behind=[block.get_submodule(path) for path in program.bottlenecks],
        mixtures=[_mixture(block, core) for core in program.mixtures],
        sinks=[where(block, path) for path in program.sinks],
        called=[CalledCore(block.get_submodule(core.at), core) for core in program.called],
        vectors=[where(block, path) for path in program.vectors],
        attentions=attentions,
        boundaries=boundaries,
        exchanges=[exchange_of(attention) for attention in attentions],
        ops=ops,
        arguments=tuple(inspect.signature(type(block).forward).parameters)[2:],
        carry=(*stack.rule.carry, *("",) * stack.rule.besides),
        distances=_distances(block, sublayers),
        clamps=stack.rule.clamps,
    )
    return spec.overflows(spec.dtype) or spec


def _activation(sublayers: Sequence[SubLayer], config: Any) -> str:
    """That of an MLP by its name: what the table says of one with a gate, else the config's."""
    gated = (one.core for one in sublayers if isinstance(one.core, Mlp) and "gate" in one.core.region.sites)
    own = next((core.gated_act for core in gated if core.gated_act), None)
    return own or str(next((own for key in _ACT_KEYS if (own := getattr(config, key, None))), None))


def _mixture(block: nn.Module, core: RoutedMlp) -> Mixture:
    gate = None if core.gate is None else cast("nn.Linear", block.get_submodule(core.gate))
    return Mixture(block.get_submodule(core.router), block.get_submodule(core.experts), gate)


def _heads(block: nn.Module, sublayers: Sequence[SubLayer], shape: Shape) -> tuple[int, int, int]:
    """(heads, key and value heads, columns of one): as the block counts them, whose stack may differ from the
    other one's, else as many as its weights have columns for, of which a rank may have some."""
    core = next(one.core for one in sublayers if isinstance(one.core, Attention))
    if calls_all(core):  # nobody asks for them
        return shape.heads, shape.kv_heads, shape.head_dim
    attention = block.get_submodule(core.at)
    if core.called:
        heads = int(getattr(attention, core.head_counts[0]))
        return heads, heads, shape.head_dim
    width = int(getattr(attention, "head_dim", shape.head_dim))  # which may be this block's own
    sites = core.region.sites
    if core.lending is not None and core.lending.borrows:  # as many as another block has
        heads = cast("LowRank", linear_of(block.get_submodule(sites["q"]))).outputs // width
        return heads, heads // int(cast("Any", attention).num_key_value_groups), width
    paths = [sites["qkv"] if "qkv" in sites else sites[role] for role in ("q", "k")]
    queries, keys = (cast("LowRank", linear_of(block.get_submodule(path))).outputs for path in paths)
    if paths[0] == paths[1]:  # of one linear
        group = shape.heads // shape.kv_heads
        keys = queries // sum(rows_of_heads(group, 1, width).values())
        return group * keys, keys, width
    if not core.head_counts:
        return queries // width, keys // width, width
    heads = int(getattr(attention, core.head_counts[0]))
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


def _distances(block: nn.Module, sublayers: Sequence[SubLayer]) -> tuple[nn.Module, str] | None:
    """The attention that has the table of relative positions and where, if this block does."""
    cores = ((one.core.at, one.core.bias) for one in sublayers if isinstance(one.core, Attention))
    return next(
        ((block.get_submodule(at), path) for at, path in cores if path and child_of(block, f"{at}.{path}")),
        None,
    )
