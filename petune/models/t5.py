"""T5: pre-norm encoder and decoder with a learned relative position bias, made by block 0 and carried from
block to block."""

from __future__ import annotations

from petune.models.by_fields import narrowing
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

CARRY = ("hidden_states", "position_bias", "encoder_decoder_position_bias")


def attention(
    place: int, name: str, *, causal: bool = False, bias: str | None = None, memory: str | None = None
) -> SubLayer:
    """Attention `name`, sub-layer `place` of a block; its scores are not scaled."""
    at = f"layer.{place}.{name}"
    q, k, v = (f"{at}.{role}" for role in ("q", "k", "v"))
    core = Attention(
        at=at,
        groups=(linears(q=q, k=k, v=v),) if memory is None else (linears(q=q), linears(k=k, v=v)),
        out=f"{at}.o",
        memory=memory,
        causal=causal,
        scale=1.0,
        bias=bias,
        drop=f"{at}.dropout",
        head_counts=("n_heads",),
    )
    return SubLayer(core, norm_in=Norm(f"layer.{place}.layer_norm"), drop=f"layer.{place}.dropout")


def mlp(place: int) -> SubLayer:
    """The feed-forward sub-layer `place` of a block; gated (wi_0, wi_1) and plain (wi) forms alike."""
    at = f"layer.{place}.DenseReluDense"
    core = Mlp(
        at=at, up=linears(gate=f"{at}.wi_0", up=f"{at}.wi_1|{at}.wi"), down=f"{at}.wo", drop=f"{at}.dropout"
    )
    return SubLayer(core, norm_in=Norm(f"layer.{place}.layer_norm"), drop=f"layer.{place}.dropout")


ENCODER = (attention(0, "SelfAttention", bias="relative_attention_bias"), mlp(1))
DECODER = (
    attention(0, "SelfAttention", causal=True, bias="relative_attention_bias"),
    attention(1, "EncDecAttention", memory="key_value_states"),
    mlp(2),
)


def shape(config: Config) -> Shape:
    """Sizes of a T5 config; `d_kv` is free of `d_model`."""
    return Shape(config.num_heads, config.num_heads, config.d_kv, config.d_ff, config.d_model)


def depth(config: Config) -> dict[StackName, int]:
    """Blocks of each stack; a config that does not say has as many in the decoder as in the encoder."""
    return {
        "encoder": config.num_layers,
        "decoder": getattr(config, "num_decoder_layers", None) or config.num_layers,
    }


def rule(blocks: str, sublayers: tuple[SubLayer, ...]) -> StackRule:
    """One of the two stacks."""
    return StackRule(
        blocks, sublayers, CARRY, tail="final_layer_norm", bias="has_relative_attention_bias", clamps=True
    )


FAMILY = Family(
    name="t5",
    kind="encoder-decoder",
    stacks={"encoder": rule("encoder.block", ENCODER), "decoder": rule("decoder.block", DECODER)},
    heads=("classification_head", "classifier"),
    shape=shape,
    narrow=narrowing("d_model", "d_ff", "d_kv"),
    depth=depth,
    bounded=False,
)
