"""DistilBERT: BERT's post-norm encoder with half as many blocks, under names of its own."""

from __future__ import annotations

from dataclasses import replace

from petune.models import bert
from petune.models.by_fields import narrowing, sized
from petune.models.spec import Attention, Mlp, Norm, StackRule, SubLayer, linears

ATTENTION = Attention(
    at="attention",
    groups=(linears(q="attention.q_lin", k="attention.k_lin", v="attention.v_lin"),),
    out="attention.out_lin",
    drop="attention.dropout",
)
BLOCK = (
    SubLayer(ATTENTION, norm_after_sum=Norm("sa_layer_norm", "layer")),
    SubLayer(
        Mlp(at="ffn", up=linears(up="ffn.lin1"), down="ffn.lin2"),
        norm_after_sum=Norm("output_layer_norm", "layer"),
        drop="ffn.dropout",
    ),
)


FAMILY = replace(
    bert.FAMILY,
    name="distilbert",
    stacks={"encoder": StackRule(blocks="transformer.layer", sublayers=BLOCK)},
    heads=("pre_classifier", "classifier"),
    shape=sized("n_heads", "dim", "hidden_dim"),
    narrow=narrowing("dim", "hidden_dim"),
    # of the head of masked words, whose table of words is the embedding
    fresh=("vocab_transform", "vocab_layer_norm"),
)
