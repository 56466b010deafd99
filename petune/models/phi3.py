"""Phi-3 and 4: Llama's blocks with q, k and v in one linear and gate and up in another, and a dropout behind
each sub-layer; positions turn the first columns of a head, by the config not all."""

from __future__ import annotations

from dataclasses import replace

from petune.models import llama
from petune.models.spec import Norm, SubLayer, linears

ATTENTION = replace(
    llama.ATTENTION,
    groups=(linears(qkv="self_attn.qkv_proj"),),
    q_norm=None,
    k_norm=None,
    pairs="leading",
    head_counts=("config.num_attention_heads",),
    kv_counts=("num_key_value_heads",),
)
MLP = replace(llama.MLP, up=linears(gate_up="mlp.gate_up_proj"))
BLOCK = (
    SubLayer(ATTENTION, norm_in=Norm("input_layernorm"), drop="resid_attn_dropout"),
    SubLayer(MLP, norm_in=Norm("post_attention_layernorm"), drop="resid_mlp_dropout"),
)
FAMILY = llama.like("phi3", *BLOCK)
