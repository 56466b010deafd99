"""GLM-4: Llama's blocks with gate and up in one linear and a norm behind each sub-layer too; positions
turn columns side by side, not of all a head has."""

from __future__ import annotations

from dataclasses import replace

from petune.models import llama, phi3
from petune.models.spec import Norm, SubLayer

ATTENTION = replace(llama.ATTENTION, q_norm=None, k_norm=None, pairs="neighbours")
BLOCK = (
    SubLayer(ATTENTION, norm_in=Norm("input_layernorm"), norm_out=Norm("post_self_attn_layernorm")),
    SubLayer(phi3.MLP, norm_in=Norm("post_attention_layernorm"), norm_out=Norm("post_mlp_layernorm")),
)
FAMILY = llama.like("glm4", *BLOCK)
