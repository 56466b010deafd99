"""T5Gemma: an encoder and a decoder of Gemma 2's blocks, the decoder's with cross-attention between attention
and MLP. Each stack has a config of its own."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from petune.errors import UsageError
from petune.models import gemma3, llama
from petune.models.gemma3 import NORM
from petune.models.spec import Attention, Config, Family, Shape, StackName, StackRule, SubLayer, linears

STACKS: tuple[StackName, ...] = ("encoder", "decoder")


def sublayer(core: Attention, name: str) -> SubLayer:
    """Attention with a norm before it and one behind it, which go by this name."""
    before, behind = NORM(f"pre_{name}_layernorm"), NORM(f"post_{name}_layernorm")
    return SubLayer(core, norm_in=before, norm_out=behind, drop="dropout")


SELF = replace(llama.ATTENTION, q_norm=None, k_norm=None)
CROSS = Attention(
    at="cross_attn",
    groups=(linears(q="cross_attn.q_proj"), linears(k="cross_attn.k_proj", v="cross_attn.v_proj")),
    out="cross_attn.o_proj",
    memory="encoder_hidden_states",
    drop="cross_attn.attention_dropout",
)
MLP = replace(gemma3.BLOCK[1], core=replace(llama.MLP, drop="mlp.dropout"), drop="dropout")
ENCODER = (sublayer(replace(SELF, causal=False), "self_attn"), MLP)
DECODER = (sublayer(SELF, "self_attn"), sublayer(CROSS, "cross_attn"), MLP)


def part(config: Config, stack: StackName) -> Config:
    """The config of a stack; one of a stack is its own."""
    return getattr(config, stack, config)


def shape(config: Config) -> Shape:
    """Sizes of a stack, by its own config or by that of both. Raises UsageError where these differ."""
    encoder, decoder = (llama.shape(part(config, stack)) for stack in STACKS)
    if encoder != decoder:
        what = "encoder and decoder of this model differ in sizes, and one description holds for both"
        remedy = "use full, lora or adapter on whole blocks, or stacks that are alike, as t5gemma-2b-2b's"
        raise UsageError(what, where="model", expected=str(encoder), found=str(decoder), remedy=remedy)
    return decoder


def narrow(config: Config, reduction: int) -> Config:
    """`config` with the widths of both stacks divided by `reduction`."""
    small = deepcopy(config)
    for stack in STACKS:
        setattr(small, stack, gemma3.narrow(part(config, stack), reduction))
    small.decoder.cross_attention_hidden_size = small.encoder.hidden_size
    return small


def depth(config: Config) -> dict[StackName, int]:
    """Blocks of each stack."""
    return {stack: part(config, stack).num_hidden_layers for stack in STACKS}


def rule(stack: StackName, sublayers: tuple[SubLayer, ...]) -> StackRule:
    """One of the two stacks."""
    return StackRule(f"{stack}.layers", sublayers, tail="norm", rotary="rotary_emb", hides=True)


FAMILY = Family(
    name="t5gemma",
    kind="encoder-decoder",
    stacks={"encoder": rule("encoder", ENCODER), "decoder": rule("decoder", DECODER)},
    heads=("score",),
    shape=shape,
    narrow=narrow,
    depth=depth,
    part=part,
    packs=False,
    pools=lambda config: "every",  # the place that its head reads depends on the rows beside
)
