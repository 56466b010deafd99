"""ModernBERT: pre-norm encoder with packed projections, whose first block has no norm before attention;
attention to all, or to a window both ways, each with rotary angles of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from petune.models import bert
from petune.models.spec import Attention, Config, Mlp, Norm, Pooling, StackRule, SubLayer, linears

BLOCK = (
    SubLayer(
        Attention(
            at="attn",
            groups=(linears(qkv="attn.Wqkv"),),
            out="attn.Wo",
            rotary=True,
            scale="head_dim",
            drop="attn.attention_dropout",
        ),
        norm_in=Norm("attn_norm", "layer"),
        drop="attn.out_drop",
    ),
    SubLayer(
        Mlp(at="mlp", up=linears(gate_up="mlp.Wi"), down="mlp.Wo", drop="mlp.drop"),
        norm_in=Norm("mlp_norm", "layer"),
    ),
)
RULE = StackRule("layers", BLOCK, tail="final_norm", rotary="rotary_emb")


def pools(config: Config) -> Pooling:
    """By the config; what is averaged behind a head, as EuroBERT's "late", needs every token."""
    kinds: Mapping[str, Pooling] = {"cls": "first", "bos": "first", "mean": "mean"}
    return kinds.get(config.classifier_pooling, "every")


FAMILY = replace(bert.FAMILY, name="modernbert", stacks={"encoder": RULE}, fresh=("head",), pools=pools)
