"""Cohere: attention and MLP beside one another, which read one norm and are added in one sum."""

from __future__ import annotations

from petune.models import glm4, llama
from petune.models.spec import Norm, SubLayer

NORM = Norm("input_layernorm", "layer")
BLOCK = (SubLayer(llama.ATTENTION, norm_in=NORM), SubLayer(llama.MLP, norm_in=NORM))
FAMILY = llama.like("cohere", *BLOCK, unfused=f"its MLP stands beside its attention, and {glm4.PAIRS}")
