"""Blocks of known models, for which tests know FLOP, bytes and plans by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from petune.kernels.memory.block_cost import Keep
from petune.kernels.memory.shape import BlockShape, Ranks
from petune.models import gemma3
from petune.models.spec import Attention, SubLayer

# Llama-3.1-8B, LoRA r=16
LLAMA = BlockShape(width=4096, heads=32, kv_heads=8, head_dim=128, columns=14336, ranks=Ranks(*[16] * 7))
# Gemma 3 4B, LoRA r=16: a norm behind each sub-layer too, heads' norms, wide heads
GEMMA = BlockShape(
    width=2560,
    heads=8,
    kv_heads=4,
    head_dim=256,
    columns=10240,
    ranks=Ranks(*[16] * 7),
    described=tuple(
        SubLayer(
            replace(one.core, scale=1.0) if isinstance(one.core, Attention) else one.core,
            one.norm_in,
            one.norm_out,
        )
        for one in gemma3.BLOCK
    ),
)
BERT = BlockShape(1024, 16, 16, 64, 4096, gated=False, ranks=Ranks(q=8, v=8), norm="layer", causal=False)
DEPTH, VOCABULARY = 32, 128256  # of LLAMA
KEEPS: tuple[Keep, ...] = get_args(Keep)[::-1]  # from the most to the least
