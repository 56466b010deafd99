"""A block of a family as a fused one computes it, read off the model by the family's table; or the reason why it cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from transformers.activations import ACT2FN

from petune.kernels.block.call import Spec, Where
from petune.kernels.block.postnorm import PostNorm
from petune.kernels.block.prenorm import PreNorm
from petune.kernels.dispatch import Ops
from petune.kernels.reference import Act
from petune.kernels.single_modules import is_rms_norm
from petune.models.spec import Norms, Region, Role, Shape, child_of
from petune.models.stack import Stack
from petune.models.tuned_linear import low_rank_of

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
    name = str(getattr(config, "hidden_act", None) or getattr(config, "activation_function", None))
    if (act := _ACTS.get(name)) is None:
        return f"its activation {name!r} has no kernel"
    if getattr(block, "is_decoder", False) or getattr(block, "add_cross_attention", False):
        return "it attends to an encoder"
    found = _norm_tensors(block, norms)
    if (reason := _stranger(block, name) or _other_norm([one[0] for one in found if one is not None], norms)) is not None:
        return reason
    first = block.get_submodule(norms.first)
    attention = block.get_submodule(next(region.enter for region in stack.rule.regions if region.kind == "attention"))
    if getattr(attention, "exchange", None) is not None:
        return "its attention exchanges tokens with other ranks"
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
        eps=_eps(first),
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
                if low_rank_of(hit[1]) is None:
                    return f"{hit[0]} is a {type(hit[1]).__name__}"
    return [[by_role[role] for role in group if role in by_role] for group in GROUPS]


def _stranger(block: nn.Module, activation: str) -> str | None:
    """What in the block is neither torch's, transformers' nor ours, so that it may compute anything, or is not the config's activation."""
    known = type(ACT2FN[activation])
    for path, module in block.named_modules():
        kind = type(module)
        homes = {kind.__module__.partition(".")[0], str(kind.forward.__module__).partition(".")[0]}
        if "forward" in vars(module) or not homes <= {"torch", "transformers", "petune"}:
            return f"{path or 'the block'} is a {kind.__name__} whose forward is not transformers' own"
        if not (module._modules or module._parameters or isinstance(module, known | nn.Dropout | nn.Identity)):
            return f"{path} is a {kind.__name__}, and the config's activation is {activation!r}"
    return None


def _other_norm(norms: Sequence[nn.Module], rule: Norms) -> str | None:
    """A norm that computes something else than the table says, or with another epsilon than the first."""
    for norm in norms:
        if type(norm) is not nn.LayerNorm if rule.post else not is_rms_norm(norm):
            return f"its norm {type(norm).__name__} is not {'a LayerNorm' if rule.post else 'an RMS norm'}"
        if _eps(norm) != _eps(norms[0]):
            return "its norms have different epsilons"
    return None


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


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
