"""GPT-2: pre-norm decoder with learned positions, whose linears are Conv1D, their weights transposed."""

from __future__ import annotations

from dataclasses import replace

from petune.models import llama
from petune.models.by_fields import narrowing
from petune.models.spec import Attention, Config, Mlp, Norm, Shape, StackRule, SubLayer, linears

TRANSPOSED = "its linears are Conv1D, whose weights are transposed"
BLOCK = (
    SubLayer(
        Attention(
            at="attn",
            groups=(linears(qkv="attn.c_attn"),),
            out="attn.c_proj",
            causal=True,
            drop="attn.attn_dropout",
        ),
        norm_in=Norm("ln_1", "layer"),
        drop="attn.resid_dropout",
    ),
    SubLayer(
        Mlp(at="mlp", up=linears(up="mlp.c_fc"), down="mlp.c_proj"),
        norm_in=Norm("ln_2", "layer"),
        drop="mlp.dropout",
    ),
)


def shape(config: Config) -> Shape:
    """Sizes of a GPT-2 config; every head has its own keys and values."""
    heads, width = config.n_head, config.n_embd
    return Shape(heads, heads, width // heads, config.n_inner or 4 * width, width)


FAMILY = replace(
    llama.FAMILY,
    name="gpt2",
    stacks={"decoder": StackRule("h", BLOCK, tail="ln_f", uncut=TRANSPOSED)},
    heads=("score", "classifier"),
    shape=shape,
    narrow=narrowing("n_embd", "n_inner"),
)
