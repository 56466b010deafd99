"""OLMo 2 and 3: norms behind attention and MLP, before the sum, and one over all heads of q and k."""

from __future__ import annotations

from dataclasses import replace

from petune.models import llama
from petune.models.spec import Norm, SubLayer

ATTENTION = replace(llama.ATTENTION, q_norm=Norm("self_attn.q_norm"), k_norm=Norm("self_attn.k_norm"))
BLOCK = (
    SubLayer(ATTENTION, norm_out=Norm("post_attention_layernorm")),
    SubLayer(llama.MLP, norm_out=Norm("post_feedforward_layernorm")),
)
FAMILY = llama.like("olmo2", *BLOCK, uncut="its norms of queries and keys see all heads, and a rank has some")
