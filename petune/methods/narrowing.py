"""What a ladder is made of: the config, the blocks and the norm of a family with every width divided."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from petune.errors import Problem, UsageError
from petune.methods.configs import SideConfig
from petune.models.spec import Config, Family, StackRule


def check(config: SideConfig, depths: Mapping[str, int]) -> None:
    """Raise UsageError for settings that mean nothing beside the others, for a block that no stack has, and
    for a stack that would have no level. depths: the blocks of each stack, by its path."""
    if config.fisher_rows is not None and config.start != "fisher":
        remedy = "set start: fisher, or leave it out"
        raise UsageError("fisher_rows is of start: fisher", where="fisher_rows", remedy=remedy)
    if config.alpha is not None and config.climbs:
        raise UsageError("alpha is of end: blend", where="alpha", remedy="set end: blend, or leave it out")
    if config.temperature != SideConfig.temperature and not config.climbs:
        raise UsageError(
            "temperature is of gates, and end: blend has none", where="temperature", remedy="leave it out"
        )
    deepest = max(depths.values())
    if idle := sorted(set(config.layers or ()) - set(range(deepest))):
        expected = f"of the blocks 0 to {deepest - 1}"
        raise UsageError(f"there is no block {idle[0]}", where="layers", expected=expected)
    for path, depth in depths.items():
        if not config.beside(depth):
            what = "layers leaves this stack without a side block"
            found = str(list(config.layers or ()))
            remedy = f"name one of its blocks 0 to {depth - 1}, or leave layers out"
            raise UsageError(what, where=path, found=found, remedy=remedy)


def narrow_config(model: nn.Module, family: Family, reduction: int) -> Config:
    """The config of the side blocks. Raises UsageError naming every size that `reduction` does not divide."""
    config: Any = model.config
    small = family.narrow(config, reduction)
    given = {"head_dim": family.shape(config).head_dim}
    sizes = dict(given)
    for stack in family.stacks:
        part, narrow = family.part(config, stack), family.part(small, stack)
        sizes |= {
            name: value
            for name, value in (part.to_dict() | given).items()
            if isinstance(value, int) and getattr(narrow, name, value) != value
        }
    turned = any(rule.rotary for rule in family.stacks.values())
    fits = math.gcd(*sizes.values(), given["head_dim"] // 2 if turned else 0)
    remedy = f"set reduction to a divisor of {fits}, as all sizes allow"
    problems = [
        Problem(
            f"side.reduction {reduction} does not divide the model's {name}",
            "method.reduction",
            f"a divisor of {value}",
            f"{name} {value}",
            remedy,
        )
        for name, value in sizes.items()
        if value % reduction
    ]
    width = given["head_dim"] // reduction
    if turned and width % 2:
        problems.append(
            Problem(
                f"side.reduction {reduction} leaves heads of width {width}, and rotary positions turn pairs",
                "method.reduction",
                found=f"head_dim {given['head_dim']}",
                remedy=remedy,
            )
        )
    if problems:
        raise UsageError(problems)
    for narrow in {id(one): one for stack in family.stacks for one in (family.part(small, stack),)}.values():
        for name in ("layer_types", "no_rope_layers"):
            if getattr(narrow, name, None):  # side blocks are numbered past the others
                setattr(narrow, name, list(getattr(narrow, name)) * 2)
    return small


def narrow_block(block: nn.Module, config: Config, rule: StackRule, number: int, first: bool) -> nn.Module:
    """A block of the same class at side width, of that number, which is past the backbone's so that its keys
    and values have their own cache layer. first: of its stack, whose learned position bias it has then."""
    accepted = inspect.signature(type(block).__init__).parameters
    settings: dict[str, Any] = {"layer_idx": number} if "layer_idx" in accepted else {}
    if rule.bias:
        settings[rule.bias] = first
    return type(block)(config, **settings)


def narrow_norm(tail: nn.Module, width: int) -> nn.Module:
    """A norm of the tail's class and epsilon over `width` features."""
    epsilon = getattr(tail, "variance_epsilon", None) or getattr(tail, "eps", 1e-6)
    return cast("nn.Module", cast("Any", type(tail))(width, eps=epsilon))
