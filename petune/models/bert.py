"""BERT: post-norm encoder. The MLP is two modules, `intermediate` and `output`, so the region is entered by
one and left by the other."""

from __future__ import annotations

from dataclasses import replace

from petune.models.by_fields import deep, narrowing, sized
from petune.models.spec import Attention, Family, Mlp, Norm, StackRule, SubLayer, linears


def attention(at: str, memory: str | None = None) -> SubLayer:
    """Attention of the module `at`, which is "attention", or "crossattention" of a BERT used as a decoder."""
    q, k, v = (f"{at}.self.{name}" for name in ("query", "key", "value"))
    core = Attention(
        at=f"{at}.self",
        groups=(linears(q=q, k=k, v=v),) if memory is None else (linears(q=q), linears(k=k, v=v)),
        out=f"{at}.output.dense",
        memory=memory,
        drop=f"{at}.self.dropout",
        head_counts=("num_attention_heads",),
    )
    return SubLayer(core, norm_after_sum=Norm(f"{at}.output.LayerNorm", "layer"), drop=f"{at}.output.dropout")


MLP = Mlp(at="intermediate", up=linears(up="intermediate.dense"), down="output.dense")
BLOCK = (
    attention("attention"),
    attention("crossattention", memory="encoder_hidden_states"),
    SubLayer(MLP, norm_after_sum=Norm("output.LayerNorm", "layer"), drop="output.dropout"),
)


FAMILY = Family(
    name="bert",
    kind="encoder",
    stacks={"encoder": StackRule(blocks="encoder.layer", sublayers=BLOCK)},
    heads=("classifier",),
    shape=sized("num_attention_heads", "hidden_size", "intermediate_size"),
    narrow=narrowing("hidden_size", "intermediate_size"),
    depth=deep({"encoder": "num_hidden_layers"}),
    caches=False,
    # the second of the head of masked words, whose table of words is the embedding
    fresh=("pooler", "transform"),
)
# RoBERTa, XLM-R and CamemBERT are BERT with other positions and heads
ROBERTA = replace(FAMILY, name="roberta", fresh=("pooler",))
