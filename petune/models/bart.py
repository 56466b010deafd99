"""BART: post-norm encoder and decoder. The MLP is two linears of the block itself; the decoder has a second, crossing attention."""

from __future__ import annotations

from copy import deepcopy

from petune.models.spec import Config, Family, Region, Shape, StackName, StackRule

ATTENTION = Region(
    kind="attention",
    enter="self_attn",
    leave="self_attn.out_proj",
    sites={"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj"},
    head_counts=("num_heads",),
)
CROSS = Region(
    kind="attention",
    enter="encoder_attn",
    leave="encoder_attn.out_proj",
    sites={"q": "encoder_attn.q_proj", "k": "encoder_attn.k_proj", "v": "encoder_attn.v_proj", "o": "encoder_attn.out_proj"},
    inputs=("hidden_states", "key_value_states"),
    head_counts=("num_heads",),
    cross=True,
)
MLP = Region(kind="mlp", enter="fc1", leave="fc2", sites={"up": "fc1", "down": "fc2"})


def shape(config: Config) -> Shape:
    """Sizes of a BART config, by its encoder; the decoder has the same width."""
    heads, width = config.encoder_attention_heads, config.d_model
    return Shape(heads, heads, width // heads, config.encoder_ffn_dim, width)


def narrow(config: Config, reduction: int) -> Config:
    """`config` with model and MLP widths of both stacks divided by `reduction`."""
    small = deepcopy(config)
    small.d_model = config.d_model // reduction
    small.encoder_ffn_dim = config.encoder_ffn_dim // reduction
    small.decoder_ffn_dim = config.decoder_ffn_dim // reduction
    return small


def depth(config: Config) -> dict[StackName, int]:
    """Blocks of each stack."""
    return {"encoder": config.encoder_layers, "decoder": config.decoder_layers}


FAMILY = Family(
    name="bart",
    kind="encoder-decoder",
    stacks={
        "encoder": StackRule(blocks="encoder.layers", regions=(ATTENTION, MLP)),
        "decoder": StackRule(blocks="decoder.layers", regions=(ATTENTION, CROSS, MLP), causal=True),
    },
    heads=("classification_head",),
    shape=shape,
    narrow=narrow,
    depth=depth,
)
