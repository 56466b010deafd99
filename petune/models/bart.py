"""BART: post-norm encoder and decoder. The MLP is two linears of the block itself; the decoder has a second,
crossing attention."""

from __future__ import annotations

from dataclasses import replace

from petune.models.narrowed import narrowing
from petune.models.spec import (
    Attention,
    Config,
    Family,
    Mlp,
    Norm,
    Shape,
    StackName,
    StackRule,
    SubLayer,
    linears,
)


def attention(at: str, *, causal: bool = False, memory: str | None = None) -> SubLayer:
    """Attention of the module `at`, "self_attn" or "encoder_attn"."""
    q, k, v = (f"{at}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
    core = Attention(
        at=at,
        groups=(linears(q=q, k=k, v=v),) if memory is None else (linears(q=q), linears(k=k, v=v)),
        out=f"{at}.out_proj",
        memory=memory,
        causal=causal,
        drop=f"{at}.dropout",
        head_counts=("num_heads",),
    )
    return SubLayer(core, norm_after_sum=Norm(f"{at}_layer_norm", "layer"), drop="dropout")


PLAIN = Mlp(at="fc1", up=linears(up="fc1"), down="fc2", drop="activation_dropout")
MLP = SubLayer(PLAIN, norm_after_sum=Norm("final_layer_norm", "layer"), drop="dropout")
ENCODER = (attention("self_attn"), MLP)
DECODER = (attention("self_attn", causal=True), attention("encoder_attn", memory="key_value_states"), MLP)


def shape(config: Config) -> Shape:
    """Sizes of a BART config, by its encoder; the decoder has the same width."""
    heads, width = config.encoder_attention_heads, config.d_model
    return Shape(heads, heads, width // heads, config.encoder_ffn_dim, width)


def depth(config: Config) -> dict[StackName, int]:
    """Blocks of each stack."""
    return {"encoder": config.encoder_layers, "decoder": config.decoder_layers}


FAMILY = Family(
    name="bart",
    kind="encoder-decoder",
    stacks={
        "encoder": StackRule(blocks="encoder.layers", sublayers=ENCODER, clamps=True),
        "decoder": StackRule(blocks="decoder.layers", sublayers=DECODER),
    },
    heads=("classification_head",),
    unread=("shared.weight",),  # each stack may have a table of its own, and the head too
    shape=shape,
    narrow=narrowing("d_model", "encoder_ffn_dim", "decoder_ffn_dim"),
    depth=depth,
)


def normed_first(*block: SubLayer) -> tuple[SubLayer, ...]:
    """The sub-layers with their norms before them."""
    return tuple(replace(one, norm_in=one.norm_after_sum, norm_after_sum=None) for one in block)


MBART = replace(
    FAMILY,
    name="mbart",
    stacks={
        "encoder": StackRule("encoder.layers", normed_first(*ENCODER), tail="layer_norm", clamps=True),
        "decoder": StackRule("decoder.layers", normed_first(*DECODER), tail="layer_norm"),
    },
)
