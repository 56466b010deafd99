"""Blocks of known models, for which tests know FLOP, bytes and plans by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from petune.kernels.configs import Level
from petune.kernels.memory.shape import BlockShape, ExpertSizes, Ranks
from petune.models import gemma3, moe
from petune.models.spec import Attention, Mlp, Norm, RoutedMlp, SubLayer, linears


def sublayers(gated: bool, norm: Literal["rms", "layer"], causal: bool) -> tuple[SubLayer, SubLayer]:
    """Attention and MLP, RMS norms before each and rotary positions, or LayerNorms behind."""
    rms, up = norm == "rms", linears(gate="gate", up="up") if gated else linears(up="up")
    attention = Attention("", (linears(q="q", k="k", v="v"),), "o", rotary=rms, causal=causal, scale=1.0)
    before, after = (Norm("", "rms"), None) if rms else (None, Norm("", "layer"))
    first, second = (
        SubLayer(core, norm_in=before, norm_after_sum=after) for core in (attention, Mlp("", up, "down"))
    )
    return first, second


DECODER, ENCODER = sublayers(True, "rms", True), sublayers(False, "layer", False)  # a Llama's, a BERT's

# Llama-3.1-8B, LoRA r=16
LLAMA = BlockShape(4096, 32, 8, 128, 14336, ranks=Ranks(*[16] * 7), sublayers=DECODER)
# Gemma 3 4B, LoRA r=16: a norm behind each sub-layer too, heads' norms, wide heads
GEMMA = BlockShape(
    width=2560,
    heads=8,
    kv_heads=4,
    head_dim=256,
    columns=10240,
    ranks=Ranks(*[16] * 7),
    sublayers=tuple(
        SubLayer(
            replace(one.core, scale=1.0) if isinstance(one.core, Attention) else one.core,
            one.norm_in,
            one.norm_out,
        )
        for one in gemma3.BLOCK
    ),
)


# Qwen3-30B-A3B, LoRA r=16 on attention and experts, and a block of the same with a shared expert, as Qwen2's
def _routed(core: RoutedMlp, shape: BlockShape) -> BlockShape:
    attention, mlp = DECODER
    return replace(shape, sublayers=(attention, replace(mlp, core=replace(core, chosen=8))))


ROUTED = _routed(
    moe.ROUTED,
    BlockShape(
        width=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        columns=0,
        gated=False,
        ranks=Ranks(q=16, k=16, v=16, o=16),
        experts=ExpertSizes(number=128, chosen=8, columns=768, up=16, down=16),
        sublayers=DECODER,
    ),
)
SHARED = _routed(
    replace(moe.ROUTED, shared=moe.SHARED, gate="gate", normed=False),
    replace(
        ROUTED,
        columns=1536,
        gated=True,
        ranks=Ranks(*[16] * 7),
        experts=replace(ROUTED.routed, shared=True),
    ),
)
BERT = BlockShape(1024, 16, 16, 64, 4096, gated=False, ranks=Ranks(q=8, v=8), sublayers=ENCODER)
DEPTH, VOCABULARY = 32, 128256  # of LLAMA
KEEPS: tuple[Level, ...] = get_args(Level)[::-1]  # from the most to the least
