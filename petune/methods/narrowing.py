"""What a ladder is made of: the config, the blocks and the norm of a family with every width divided."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import nn

from petune.errors import Problem, UsageError
from petune.models.spec import Config, Family, StackRule


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
    problems = [
        Problem(f"side.reduction {reduction} does not divide the model's {name}", found=f"{name} {value}")
        for name, value in sizes.items()
        if value % reduction
    ]
    width = given["head_dim"] // reduction
    if any(rule.rotary for rule in family.stacks.values()) and width % 2:
        problems.append(
            Problem(
                f"side.reduction {reduction} leaves heads of width {width}, and rotary positions turn pairs",
                found=f"head_dim {given['head_dim']}",
                remedy=f"use a divisor of {given['head_dim'] // 2}",
            )
        )
    if problems:
        raise UsageError(problems)
    for narrow in {id(one): one for stack in family.stacks for one in (family.part(small, stack),)}.values():
        for name in ("layer_types", "no_rope_layers"):
            if getattr(narrow, name, None):  # side blocks are numbered past the others
                setattr(narrow, name, list(getattr(narrow, name)) * 2)
    return small


def narrow_block(block: nn.Module, config: Config, rule: StackRule, index: int, levels: int) -> nn.Module:
    """A block of the same class at side width, numbered past the backbone's so that its keys and values have
    their own cache layer."""
    accepted = inspect.signature(type(block).__init__).parameters
    settings: dict[str, Any] = {"layer_idx": levels + index} if "layer_idx" in accepted else {}
    if rule.bias:
        settings[rule.bias] = index == 0
    return type(block)(config, **settings)


def narrow_norm(tail: nn.Module, width: int) -> nn.Module:
    """A norm of the tail's class and epsilon over `width` features."""
    epsilon = getattr(tail, "variance_epsilon", None) or getattr(tail, "eps", 1e-6)
    return cast("nn.Module", cast("Any", type(tail))(width, eps=epsilon))
