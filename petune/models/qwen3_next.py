"""Qwen3-Next and Qwen3.5 (text): three of four blocks have a gated-delta mixer in the place of attention with
scores, whose result is gated too; norms scale by 1 + weight. Qwen3.5 has dense MLPs, the others routed
experts and one that every token goes through."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.models import llama, moe
from petune.models.gemma3 import ATTENTION as NORMED
from petune.models.gemma3 import NORM
from petune.models.linear_attention import GatedDelta
from petune.models.spec import Config, Family, LinearAttention, LinearGroup, Shape, SubLayer, linears


class Interleaved(GatedDelta):
    """Extends Qwen3-Next's mixer, whose linears give all that is of a key head side by side."""

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """As the base."""
        own = cast("Any", self)
        q, k, v, *rest = own.fix_query_key_value_ordering(own.in_proj_qkvz(x), own.in_proj_ba(x))
        return torch.cat([part.flatten(2) for part in (q, k, v)], -1), *rest


class SeparateMixer(GatedDelta):
    """Extends Qwen3.5's mixer, which has q, k and v in one linear and the rest in one each."""

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """As the base."""
        own = cast("Any", self)
        z = own.in_proj_z(x).unflatten(-1, (-1, own.head_v_dim))
        return own.in_proj_qkv(x), z, own.in_proj_b(x), own.in_proj_a(x)


def mixing(form: type[nn.Module], group: LinearGroup) -> SubLayer:
    """Attention without scores and, in other blocks, with scores that are gated."""
    full = replace(NORMED, gated=True)
    core = LinearAttention(
        at="linear_attn", groups=(group,), out="linear_attn.out_proj", causal=True, full=full, form=form
    )
    return SubLayer(core, norm_in=NORM("input_layernorm"))


APART = linears(
    qkv="linear_attn.in_proj_qkv",
    z="linear_attn.in_proj_z",
    b="linear_attn.in_proj_b",
    a="linear_attn.in_proj_a",
)
INTERLEAVED = linears(qkvz="linear_attn.in_proj_qkvz", ba="linear_attn.in_proj_ba")
ROUTED = replace(moe.ROUTED, shared=moe.SHARED, gate="mlp.shared_expert_gate")


def shape(config: Config, kin: Family) -> Shape:
    """Sizes as of its kin, with the blocks that have mixers."""
    return replace(kin.shape(config), mixers=config.layer_types.count("linear_attention"))


def narrow(config: Config, reduction: int, kin: Family) -> Config:
    """`config` with the widths of its kin divided by `reduction`, and those of heads of mixers."""
    small = kin.narrow(config, reduction)
    small.linear_key_head_dim = config.linear_key_head_dim // reduction
    small.linear_value_head_dim = config.linear_value_head_dim // reduction
    return small


def table(kin: Family, name: str, mixer: SubLayer) -> Family:
    """The table of a decoder with this mixer and the MLPs, or experts, of its kin."""
    mlp = replace(kin.stacks["decoder"].sublayers[1], norm_in=NORM("post_attention_layernorm"))
    like = llama.like(name, mixer, mlp)
    sizes, small = partial(shape, kin=kin), partial(narrow, kin=kin)
    return replace(kin, name=name, stacks=like.stacks, shape=sizes, narrow=small)


QWEN3_5 = table(llama.FAMILY, "qwen3_5", mixing(SeparateMixer, APART))
QWEN3_NEXT = table(
    moe.table("qwen3_next", ROUTED, "moe_intermediate_size"), "qwen3_next", mixing(Interleaved, INTERLEAVED)
)
QWEN3_5_MOE = table(
    moe.table("qwen3_5_moe", replace(ROUTED, dense=None, normed=True), "moe_intermediate_size"),
    "qwen3_5_moe",
    mixing(SeparateMixer, APART),
)
