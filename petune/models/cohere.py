"""Cohere: attention and MLP beside one another, which read one norm and are added in one sum; positions turn
columns side by side. In Command R+ heads of queries and keys are normed, each with weights of its own. In
Cohere 2 blocks with full attention have no positions."""

from __future__ import annotations

from dataclasses import replace

from petune.models import llama
from petune.models.spec import Norm, SubLayer

NORM = Norm("input_layernorm", "layer")
ATTENTION = replace(
    llama.ATTENTION,
    pairs="twins",
    q_norm=Norm("self_attn.q_norm", "layer", over="each"),  # Command R+'s
    k_norm=Norm("self_attn.k_norm", "layer", over="each"),
)
BLOCK = (SubLayer(ATTENTION, norm_in=NORM), SubLayer(llama.MLP, norm_in=NORM, parallel=True))
FAMILY = llama.like("cohere", *BLOCK)
COHERE2 = llama.like("cohere2", replace(BLOCK[0], core=replace(ATTENTION, rotary="sliding_window")), BLOCK[1])
