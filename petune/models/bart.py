"""BART: post-norm encoder and decoder. The MLP is two linears of the block itself; the decoder has a second,
crossing attention."""

from __future__ import annotations

from dataclasses import replace

from petune.models.by_fields import deep, narrowing, sized
from petune.models.spec import Attention, Family, Mlp, Norm, StackRule, SubLayer, linears


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


FAMILY = Family(
    name="bart",
    kind="encoder-decoder",
    stacks={
        "encoder": StackRule(blocks="encoder.layers", sublayers=ENCODER, clamps=True),
        "decoder": StackRule(blocks="decoder.layers", sublayers=DECODER),
    },
    heads=("classification_head",),
    unread=("shared.weight",),  # each stack may have a table of its own, and the head too
    shape=sized("encoder_attention_heads", "d_model", "encoder_ffn_dim"),
    narrow=narrowing("d_model", "encoder_ffn_dim", "decoder_ffn_dim"),
    depth=deep({"encoder": "encoder_layers", "decoder": "decoder_layers"}),
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
