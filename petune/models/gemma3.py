"""Gemma 2 and 3 (text): a norm before and one behind each sub-layer, each scaling by 1 + weight; normed heads
or, in Gemma 2, capped scores; blocks with full and with sliding attention in turn, whose masks and rotary
angles the model hands to each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from petune.models import llama
from petune.models.spec import Config, Family, Norm, SubLayer

NORM = partial(Norm, offset=1.0)
ATTENTION = replace(
    llama.ATTENTION,
    q_norm=NORM("self_attn.q_norm", over="head"),
    k_norm=NORM("self_attn.k_norm", over="head"),
)
BLOCK = (
    SubLayer(ATTENTION, norm_in=NORM("input_layernorm"), norm_out=NORM("post_attention_layernorm")),
    SubLayer(
        llama.MLP, norm_in=NORM("pre_feedforward_layernorm"), norm_out=NORM("post_feedforward_layernorm")
    ),
)


def narrow(config: Config, reduction: int) -> Config:
    """`config` with hidden, MLP and head widths divided by `reduction`, and the scale of scores that fits
    such heads."""
    small = llama.narrow(config, reduction)
    small.query_pre_attn_scalar = config.query_pre_attn_scalar // reduction
    return small


FAMILY = Family(
    name="gemma3",
    kind="decoder",
    stacks={"decoder": replace(llama.RULE, sublayers=BLOCK)},
    heads=("score", "classifier", "qa_outputs"),
    shape=llama.shape,
    narrow=narrow,
    depth=llama.FAMILY.depth,
)
