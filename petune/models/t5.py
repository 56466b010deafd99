"""T5: pre-norm encoder and decoder with a learned relative position bias, made by block 0 and carried from block to block."""

from __future__ import annotations

from copy import deepcopy

from petune.models.spec import Config, Family, Region, Shape, StackName, StackRule

ATTENTION = Region(
    kind="attention",
    enter="layer.0.SelfAttention",
    leave="layer.0.SelfAttention.o",
    sites={role: f"layer.0.SelfAttention.{role}" for role in ("q", "k", "v", "o")},
    head_counts=("n_heads",),
    by_head={"relative_attention_bias.weight": 1},
)
CROSS = Region(
    kind="attention",
    enter="layer.1.EncDecAttention",
    leave="layer.1.EncDecAttention.o",
    sites={role: f"layer.1.EncDecAttention.{role}" for role in ("q", "k", "v", "o")},
    inputs=("hidden_states", "key_value_states"),
    head_counts=("n_heads",),
    cross=True,
)
CARRY = ("hidden_states", "position_bias", "encoder_decoder_position_bias")


def mlp(place: int) -> Region:
    """The feed-forward region, sub-layer `place` of a block; gated (wi_0, wi_1) and plain (wi) forms alike."""
    inner = f"layer.{place}.DenseReluDense"
    return Region(
        kind="mlp",
        enter=inner,
        leave=f"{inner}.wo",
        sites={"gate": f"{inner}.wi_0", "up": f"{inner}.wi_1|{inner}.wi", "down": f"{inner}.wo"},
    )


def shape(config: Config) -> Shape:
    """Sizes of a T5 config; `d_kv` is free of `d_model`."""
    return Shape(config.num_heads, config.num_heads, config.d_kv, config.d_ff, config.d_model)


def narrow(config: Config, reduction: int) -> Config:
    """`config` with model, MLP and head widths divided by `reduction`."""
    small = deepcopy(config)
    small.d_model = config.d_model // reduction
    small.d_ff = config.d_ff // reduction
    small.d_kv = config.d_kv // reduction
    return small


def depth(config: Config) -> dict[StackName, int]:
    """Blocks of each stack; a config that does not say has as many in the decoder as in the encoder."""
    return {"encoder": config.num_layers, "decoder": getattr(config, "num_decoder_layers", None) or config.num_layers}


FAMILY = Family(
    name="t5",
    kind="encoder-decoder",
    stacks={
        "encoder": StackRule(
            blocks="encoder.block", regions=(ATTENTION, mlp(1)), carry=CARRY, tail="final_layer_norm", bias="has_relative_attention_bias"
        ),
        "decoder": StackRule(
            blocks="decoder.block",
            regions=(ATTENTION, CROSS, mlp(2)),
            carry=CARRY,
            tail="final_layer_norm",
            bias="has_relative_attention_bias",
            causal=True,
        ),
    },
    heads=("classification_head", "classifier"),
    shape=shape,
    narrow=narrow,
    depth=depth,
)
