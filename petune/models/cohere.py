"""Cohere: attention and MLP beside one another, which read one norm and are added in one sum; positions turn
columns side by side. In Cohere 2 blocks with full attention have no positions."""

from __future__ import annotations

from dataclasses import replace

from petune.models import llama
from petune.models.spec import Norm, SubLayer

NORM = Norm("input_layernorm", "layer")
ATTENTION = replace(llama.ATTENTION, pairs="twins")
BLOCK = (SubLayer(ATTENTION, norm_in=NORM), SubLayer(llama.MLP, norm_in=NORM, parallel=True))
FAMILY = llama.like("cohere", *BLOCK)
COHERE2 = llama.like("cohere2", replace(BLOCK[0], core=replace(ATTENTION, rotary="sliding_window")), BLOCK[1])
