"""Llama and its kin (Mistral, Qwen2, Qwen3): pre-norm decoder, rotary positions, grouped key and value heads,
gated MLP."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.models.by_fields import deep
from petune.models.spec import Attention, Config, Family, Mlp, Norm, Shape, StackRule, SubLayer, linears

ATTENTION = Attention(
    at="self_attn",
    groups=(linears(q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj"),),
    out="self_attn.o_proj",
    rotary=True,
    causal=True,
    q_norm=Norm("self_attn.q_norm", over="head"),  # Qwen3's
    k_norm=Norm("self_attn.k_norm", over="head"),
    drop="self_attn.attention_dropout",
)
MLP = Mlp(at="mlp", up=linears(gate="mlp.gate_proj", up="mlp.up_proj"), down="mlp.down_proj")
BLOCK = (
    SubLayer(ATTENTION, norm_in=Norm("input_layernorm")),
    SubLayer(MLP, norm_in=Norm("post_attention_layernorm")),
)


def head_dim(config: Config) -> int:
    """Width of one head: given by the config, or hidden size over heads."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def shape(config: Config, columns: str = "intermediate_size") -> Shape:
    """Sizes of a Llama-like config; `columns` is the field with those of an MLP, or of an expert."""
    heads = config.num_attention_heads
    return Shape(
        heads,
        config.num_key_value_heads or heads,
        head_dim(config),
        getattr(config, columns),
        config.hidden_size,
    )


def narrow(config: Config, reduction: int) -> Config:
    """`config` with hidden, MLP and head widths divided by `reduction`."""
    small = deepcopy(config)
    small.hidden_size = config.hidden_size // reduction
    small.intermediate_size = config.intermediate_size // reduction
    small.head_dim = head_dim(config) // reduction
    return small


RULE = StackRule(blocks="layers", sublayers=BLOCK, tail="norm", rotary="rotary_emb")
FAMILY = Family(
    name="llama",
    kind="decoder",
    stacks={"decoder": RULE},
    heads=("score", "classifier", "qa_outputs"),
    shape=shape,
    narrow=narrow,
    depth=deep({"decoder": "num_hidden_layers"}),
)


def like(name: str, *block: SubLayer, uncut: str | None = None) -> Family:
    """A family of Llama's parts with these sub-layers, by default its own; see StackRule."""
    rule = replace(RULE, sublayers=block or BLOCK, uncut=uncut)
    return replace(FAMILY, name=name, stacks={"decoder": rule})


def by_position(attention: nn.Module, positions: Tensor) -> Tensor:
    """What Ministral 3 multiplies queries by: 1 + beta log(1 + floor(position / p)), p the positions of its
    first training."""
    rope = cast("Any", attention).config.rope_parameters
    far = torch.floor(positions / rope["original_max_position_embeddings"])
    return 1 + float(rope["llama_4_scaling_beta"]) * torch.log(1 + far)


GRANITE = like("granite", *(replace(one, scale="residual_multiplier") for one in BLOCK))
SMOLLM3 = like("smollm3", replace(BLOCK[0], core=replace(ATTENTION, rotary="use_rope")), BLOCK[1])
REACHING = replace(ATTENTION, q_norm=None, k_norm=None, reach=by_position)
MINISTRAL3 = like("ministral3", replace(BLOCK[0], core=REACHING), BLOCK[1])
