"""What DeBERTa's attention computes of tokens and of the positions that it scores (He et al. 2021,
arXiv:2006.03654), but for scores and what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from petune.rng.context import bound, running


@contextmanager
def shared() -> Iterator[None]:
    """What is computed inside is of no row: dropout of it is drawn alike wherever it is made."""
    now = running()
    with bound(rows=None, numbers=None, token=0, feature=0, segments=None) as inside:
        yield
    now.drawn = inside.drawn


def by_distance(relative: Tensor) -> Tensor:
    """What pairs of tokens [..., t, t] are numbered by, which depends on key - query alone, for each of
    these, [2 t - 1]; one that is that already."""
    if relative.dim() == 1:
        return relative
    pairs = relative.reshape(-1, *relative.shape[-2:])[0]
    return torch.cat([pairs[:, 0].flip(0)[:-1], pairs[0]])


def attended(
    module: Any,
    attend: Callable[..., Tensor],
    hidden_states: Tensor,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """What transformers' attention of DeBERTa makes of hidden states [..., width], by `attend`
    (petune.kernels.block.scored); drawn in the same order. relative_pos: [1, t, t], or `by_distance`."""
    kinds, count = module.pos_att_type, module.num_attention_heads

    def heads(linear: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = linear(x)
        return made.reshape(-1, count, made.shape[-1] // count)

    q, k, v = (heads(one, hidden_states) for one in (module.query_proj, module.key_proj, module.value_proj))
    terms = 1 + ("c2p" in kinds) + ("p2c" in kinds)
    scale = 1 / torch.tensor(float(q.shape[-1] * terms)).sqrt().item()  # of float32 digits, as the base's
    q_pos = k_pos = buckets = None
    if module.relative_attention and relative_pos is not None and rel_embeddings is not None:
        columns = 2 * module.pos_ebd_size
        buckets = (by_distance(relative_pos) + module.pos_ebd_size).clamp(0, columns - 1).to(torch.int32)
        with shared():
            table = module.pos_dropout(rel_embeddings)[None, :columns]
            if module.share_att_key:
                q_pos, k_pos = heads(module.query_proj, table), heads(module.key_proj, table)
            else:
                k_pos = heads(module.pos_key_proj, table) if "c2p" in kinds else None
                q_pos = heads(module.pos_query_proj, table) if "p2c" in kinds else None
        q_pos, k_pos = q_pos if "p2c" in kinds else None, k_pos if "c2p" in kinds else None
    p = module.dropout.p if module.training else 0.0
    out = attend((q, k, v, q_pos, k_pos), buckets, scale, p, getattr(module, "first_head", 0))
    return out.view(*hidden_states.shape[:-1], -1)
