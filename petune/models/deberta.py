"""DeBERTa 2 and 3: BERT's blocks, whose attention adds scores of relative positions to those of content. It
makes them of a table that all rows share, put through q and k or through linears of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from petune.models import bert
from petune.models.by_fields import narrowing
from petune.models.disentangled import attended, shared
from petune.models.spec import Attention, Config, Norm, Positions, Shape, StackRule, SubLayer, linears
from petune.rng.dropout import drop_attention


class TableDropout(nn.Module):
    """Extends the dropout of the table."""

    def forward(self, table: Tensor) -> Tensor:
        """As the base."""
        with shared():
            return cast("Tensor", super().forward(table))


class ProbabilityDropout(nn.Module):
    """Extends the dropout of attention probabilities [rows, heads, queries, keys]."""

    p: float
    first_head = 0  # the number in the whole model of the first head that is here

    def forward(self, probabilities: Tensor) -> Tensor:
        """As the base."""
        if not self.training or not self.p:
            return probabilities
        return drop_attention(probabilities, self.p, self.first_head, 0)


class Disentangled(nn.Module):
    """Extends transformers' attention of DeBERTa."""

    dropout: Any

    def forward(self, *args: Any, attend: Callable[..., Tensor] | None = None, **kwargs: Any) -> Any:
        """As the base, or by `attend`."""
        if attend is not None:
            return attended(self, attend, **kwargs), None
        if first := getattr(self, "first_head", 0):  # on ranks alone, as it would stay in a merged model
            self.dropout.first_head = first
        return super().forward(*args, **kwargs)

    def disentangled_attention_bias(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the base."""
        with shared():
            return cast("Tensor", cast("Any", super()).disentangled_attention_bias(*args, **kwargs))


AT = "attention.self"
ATTENTION = Attention(
    at=AT,
    groups=(linears(q=f"{AT}.query_proj", k=f"{AT}.key_proj", v=f"{AT}.value_proj"),),
    out="attention.output.dense",
    positions=Positions(
        "rel_embeddings",
        linears(q_pos=f"{AT}.pos_query_proj", k_pos=f"{AT}.pos_key_proj"),
        makers=("rel_embeddings", "LayerNorm"),
        half="pos_ebd_size",
        own={"": Disentangled, "dropout": ProbabilityDropout, "pos_dropout": TableDropout},
        asked="relative_attention",
        twice="share_att_key",
        handed=("attention_mask", "relative_pos"),
        distances="relative_pos",
        queries="query_states",
        drops=("dropout", "pos_dropout"),
    ),
    drop=f"{AT}.dropout",
    head_counts=("num_attention_heads",),
)
BLOCK = (
    SubLayer(
        ATTENTION, norm_after_sum=Norm("attention.output.LayerNorm", "layer"), drop="attention.output.dropout"
    ),
    SubLayer(bert.MLP, norm_after_sum=Norm("output.LayerNorm", "layer"), drop="output.dropout"),
)


def shape(config: Config) -> Shape:
    """Sizes of a DeBERTa config, which may say the width of a head."""
    heads, width = config.num_attention_heads, config.hidden_size
    head = getattr(config, "attention_head_size", width // heads)
    return Shape(heads, heads, head, config.intermediate_size, width)


RULE = StackRule(
    "encoder.layer",
    BLOCK,
    besides=1,  # attention probabilities, which are None where nobody asks for them
    between="conv_kernel_size",
)
FAMILY = replace(
    bert.FAMILY,
    name="deberta-v2",
    stacks={"encoder": RULE},
    shape=shape,
    narrow=narrowing("hidden_size", "intermediate_size", "attention_head_size"),
    # the third of the head of masked words that is not the legacy one
    fresh=("pooler", "transform", "lm_head"),
    tied="legacy",
)
