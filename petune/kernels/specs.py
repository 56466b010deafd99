"""A block of a family as a fused one computes it, read off the model by the family's table; or the reason why it cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from petune.kernels.call import Spec, Where
from petune.kernels.ops import Ops
from petune.kernels.parts import part_of
from petune.kernels.postnorm import PostNorm
from petune.kernels.prenorm import PreNorm
from petune.kernels.reference import Act
from petune.sites import Norms, Region, Role, Shape, child_of
from petune.stack import Stack

_ACTS: dict[str, Act] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
GROUPS: tuple[tuple[Role, ...], ...] = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))


def spec_of(block: nn.Module, stack: Stack, shape: Shape, config: Any, ops: Ops) -> Spec | str:
    """The block as a fused one computes it, or why it cannot be."""
    norms = cast("Norms", stack.rule.norms)
    linears = _linears(block, stack.rule.regions)
    if isinstance(linears, str):
        return linears
    act = _ACTS.get(str(getattr(config, "hidden_act", None) or getattr(config, "activation_function", None)))
    if act is None:
        return f"its activation {getattr(config, 'hidden_act', None)!r} has no kernel"
    if getattr(block, "is_decoder", False) or getattr(block, "add_cross_attention", False):
        return "it attends to an encoder"
    found = _norm_tensors(block, norms)
    first = block.get_submodule(norms.first)
    attention = block.get_submodule(next(region.enter for region in stack.rule.regions if region.kind == "attention"))
    after = norms.drops or (None, None)
    return Spec(
        kind=PostNorm if norms.post else PreNorm,
        layers=linears,
        norms=found,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        act=act,
        gated=len(linears[2]) == 2,
        eps=float(cast("Any", first).variance_epsilon if hasattr(first, "variance_epsilon") else cast("Any", first).eps),
        scale=float(cast("Any", attention).scaling),
        causal=stack.rule.causal,
        ops=ops,
        dropouts=(_where(block, norms.attention_drop), _where(block, after[0]), _where(block, after[1])),
        arguments=tuple(inspect.signature(type(block).forward).parameters)[2:],
    )


def _linears(block: nn.Module, regions: Sequence[Region]) -> list[list[nn.Module]] | str:
    """The linears of each group, or why there are none."""
    by_role: dict[str, nn.Module] = {}
    for region in regions:
        if region.cross:
            continue
        for role, path in region.sites.items():
            hit = child_of(block, path)
            if hit is not None:
                by_role[role] = hit[1]
                if part_of(hit[1]) is None:
                    return f"{hit[0]} is a {type(hit[1]).__name__}"
    return [[by_role[role] for role in group if role in by_role] for group in GROUPS]


def _norm_tensors(block: nn.Module, norms: Norms) -> list[tuple[nn.Module, str] | None]:
    if norms.post:
        return [(block.get_submodule(path), name) for path in (norms.first, norms.second) for name in ("weight", "bias")]
    paths = [norms.first, norms.second, norms.q, norms.k]
    return [None if path is None or child_of(block, path) is None else (block.get_submodule(path), "weight") for path in paths]


def _where(block: nn.Module, path: str | None) -> Where:
    """The module and the attribute of it that a path names."""
    if path is None:
        return None
    owner, _, name = path.rpartition(".")
    return block.get_submodule(owner), name
