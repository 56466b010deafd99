"""DeBERTa 2 and 3: BERT's blocks, whose attention adds scores of relative positions to those of content. It
makes them of a table that all rows share, put through q and k or through linears of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.models import bert
from petune.models.narrowed import narrowing
from petune.models.spec import Attention, Config, Norm, Positions, Shape, StackRule, SubLayer, linears
from petune.rng.context import bound, running
from petune.rng.dropout import drop_attention


@contextmanager
def shared() -> Iterator[None]:
    """What is computed inside is of no row: dropout of it is drawn alike wherever it is made."""
    now = running()
    with bound(rows=None, token=0, feature=0, segments=None) as inside:
        yield
    now.drawn = inside.drawn


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


def attended(
    module: Any,
    attend: Callable[..., Tensor],
    hidden_states: Tensor,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """What transformers' attention of DeBERTa makes of hidden states [..., width], by `attend`
    (petune.kernels.block.scored); drawn in the same order."""
    kinds, count = module.pos_att_type, module.num_attention_heads

    def heads(linear: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = linear(x)
        return made.reshape(-1, count, made.shape[-1] // count)

    q, k, v = (heads(one, hidden_states) for one in (module.query_proj, module.key_proj, module.value_proj))
    terms = 1 + ("c2p" in kinds) + ("p2c" in kinds)
    scale = 1 / torch.tensor(float(q.shape[-1] * terms)).sqrt().item()  # of float32 digits, as the base's
    q_pos = k_pos = far = None
    if module.relative_attention and relative_pos is not None and rel_embeddings is not None:
        columns = 2 * module.pos_ebd_size
        # which depends on the distance alone
        far = relative_pos.reshape(-1, *relative_pos.shape[-2:])[0] + module.pos_ebd_size
        far = far.clamp(0, columns - 1)
        with shared():
            table = module.pos_dropout(rel_embeddings)[None, :columns]
            if module.share_att_key:
                q_pos, k_pos = heads(module.query_proj, table), heads(module.key_proj, table)
            else:
                k_pos = heads(module.pos_key_proj, table) if "c2p" in kinds else None
                q_pos = heads(module.pos_query_proj, table) if "p2c" in kinds else None
        q_pos, k_pos = q_pos if "p2c" in kinds else None, k_pos if "c2p" in kinds else None
    p = module.dropout.p if module.training else 0.0
    out = attend((q, k, v, q_pos, k_pos), far, scale, p, getattr(module, "first_head", 0))
    return out.view(*hidden_states.shape[:-1], -1)


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
