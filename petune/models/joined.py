"""Linears of a checkpoint that are several, whose outputs lie one behind the other: q, k and v, or gate and
up.

A part goes by its layer's name and its own role, "...self_attn.qkv_proj.q". Keys and values may be fewer than
queries (grouped-query attention); gate and up are halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from torch import nn

from petune.errors import UsageError
from petune.models.parts import Role, Shape
from petune.models.sites import ends_of, find_sites
from petune.models.spec import Family, child_of

MEMBERS: Mapping[Role, tuple[Role, ...]] = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
}  # in their order


class JoinedLinear(NamedTuple):
    """A linear that is several: the outputs of each part, by role, in their order."""

    module: nn.Module
    lengths: Mapping[str, int]


def joined_linears(model: nn.Module, family: Family | None) -> dict[str, JoinedLinear]:
    """Every linear of a whole model that is several, by full name, but for those of mixers.

    Raises UsageError where the parts do not add up to its outputs: the table and the model disagree.
    """
    found: dict[str, JoinedLinear] = {}
    for site in find_sites(model, family) if family is not None else ():
        if site.role not in MEMBERS or site.region.kind == "mixer":
            continue
        assert family is not None
        outputs = ends_of(site.module)[1]
        sizes = lengths_of(
            site.role, outputs, family.shape(family.part(cast("Any", model).config, site.stack))
        )
        if sum(sizes) != outputs:
            what = f"the parts {', '.join(MEMBERS[site.role])} do not add up to this linear's outputs"
            raise UsageError(what, where=site.name, expected=" + ".join(map(str, sizes)), found=str(outputs))
        found[site.name] = JoinedLinear(site.module, dict(zip(MEMBERS[site.role], sizes, strict=True)))
    return found


def lengths_of(role: Role, outputs: int, shape: Shape) -> tuple[int, ...]:
    """Outputs of each member of a joined role, of a whole linear with so many."""
    if role == "gate_up":
        return outputs // 2, outputs // 2
    return tuple(rows_of_heads(shape.heads, shape.kv_heads, shape.head_dim).values())


def rows_of_heads(heads: int, kv_heads: int, head_dim: int, gated: bool = False) -> dict[Role, int]:
    """Rows of the weights of q, k and v, in their order, for so many heads; gated: q makes its gates too."""
    keys = kv_heads * head_dim
    return {"q": (1 + gated) * heads * head_dim, "k": keys, "v": keys}


def split_name(name: str, joined: Mapping[str, JoinedLinear]) -> tuple[str, str] | None:
    """The layer and the role of the part that a name means; None for any other name."""
    layer, _, role = name.rpartition(".")
    return (layer, role) if layer in joined and role in joined[layer].lengths else None


def part_at(model: nn.Module, family: Family | None, name: str) -> tuple[JoinedLinear, str] | None:
    """The linear of a whole model, and the role in it, of the part that a name means; None for others."""
    layer, _, role = name.rpartition(".")
    if not any(role in members for members in MEMBERS.values()) or child_of(model, name):
        return None
    found = joined_linears(model, family).get(layer)
    return None if found is None or role not in found.lengths else (found, role)
