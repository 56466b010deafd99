"""The attention function that cut models use: Hugging Face's own SDPA, with a place to see the tokens of
other ranks and dropout by index.

It is registered under NAME as an attention and as a mask function: a name that has no mask function gets no
mask at all. A module with an attribute `exchange` holds only some tokens of a sequence and attends through it
(petune/parallel/sequence/exchange.py); any other attends to what it is given. Shapes are those of Hugging
Face: query [b, heads, q, head_dim], key and value [b, kv_heads, k, head_dim], mask [b, 1 | heads, 1 | q, k]
that is bool (True: attend) or added to the scores, `position_bias` [1 | b, heads, q, k] that is added before
the mask acts; out comes [b, q, heads, head_dim], contiguous.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from petune.errors import UsageError
from petune.models.extension import extend, restore
from petune.models.spec import Attention, Family, Positions, StackRule, child_of
from petune.rng.dropout import drop_attention

NAME = "petune"
CAPPING = (NAME, "eager")  # what caps scores where a model asks for it
_BEFORE = "petune_attention_before"  # attribute of a model: the name of the function that it used before

# output [b, q, heads, head_dim], and probabilities, which SDPA never has
Attended = tuple[Tensor, Tensor | None]


class AttentionCall(Protocol):
    """Attention over the tensors it is given; see `attend`."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kw: Any
    ) -> Attended: ...


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kw: Any
) -> Attended:
    """What is registered: `attend`, through `module.exchange` where there is one."""
    exchange = getattr(module, "exchange", None)
    if exchange is not None and kw.get("s_aux") is not None:
        raise UsageError("attention with sinks does not see tokens of other ranks", remedy="use no sp")
    if exchange is None:
        return attend(module, query, key, value, attention_mask, **kw)
    if kw.get("softcap") and exchange.kind == "ring":
        raise UsageError(
            "a ring does not cap attention scores", found=f"softcap {kw['softcap']}", remedy="use gather"
        )
    found: Attended = exchange(attend, module, query, key, value, attention_mask, **kw)
    return found


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float = 0.0,
    first_head: int | None = None,
    first_query: int = 0,
    **kw: Any,
) -> Attended:
    """Attention on this device alone.

    first_head, first_query: the numbers in the whole model and sequence of the first head and query here,
    from which dropout is drawn; `module.first_head`, or 0, is the head unless it is given. Other keywords are
    those of Hugging Face's attention functions.
    """
    # no kernel promises a graph for a rank without tokens, which must take part in the backward pass; torch's
    # know nothing of sinks
    if dropout or not query.shape[2] or kw.get("softcap") or kw.get("s_aux") is not None:
        head = getattr(module, "first_head", 0) if first_head is None else first_head
        return _explicit(module, query, key, value, mask, dropout, (head, first_query), **kw)
    found: Attended = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, dropout=0.0, **kw)
    return found


def causal(module: nn.Module, mask: Tensor | None, given: bool | None) -> bool:
    """Whether no query sees a later key although no mask says so, as Hugging Face's SDPA decides; `given` is
    its keyword is_causal."""
    return mask is None and bool(getattr(module, "is_causal", True) if given is None else given)


def no_later(first: int, end: int, device: torch.device) -> Tensor | None:
    """The mask [1, 1, q, end] by which queries [first, end) do not see later keys of [0, end); None where
    none is later."""
    if end - first <= 1:
        return None
    return torch.ones(end - first, end, dtype=torch.bool, device=device).tril(first)[None, None]


def use(model: PreTrainedModel, family: Family | None = None) -> None:
    """Make `model`, and every model inside that has a config of its own, attend through `attention`; where it
    scores positions itself (`Positions`), tell its own attention where in the whole it is. `leave` undoes it.

    Raises UsageError for a model whose attention cannot be chosen.
    """
    for rule in family.stacks.values() if family is not None else ():
        if rule.positions is not None:
            _extend(model, rule, rule.positions)
            return
    before = model.config._attn_implementation
    _choose(model, NAME)
    if model.config._attn_implementation != NAME:
        what, remedy = "this model does not take an attention function", "use another plan, or parallel: none"
        raise UsageError(what, where=type(model).__name__, remedy=remedy)
    if before != NAME:
        model.__dict__[_BEFORE] = before


def leave(model: nn.Module) -> None:
    """Make `model` attend as it did before `use`; nothing where that was not called."""
    restore(model)
    if (before := model.__dict__.pop(_BEFORE, None)) is not None:
        _choose(cast("PreTrainedModel", model), before)


def _extend(model: nn.Module, rule: StackRule, positions: Positions) -> None:
    """Extend the attention of every block by `rule`, and of blocks of a side network, which are of the same
    class."""
    attends = (one.core for one in rule.sublayers if isinstance(one.core, Attention))
    places = tuple(f".{core.at}" for core in attends if core.positions)
    for own in [module for name, module in model.named_modules() if name.endswith(places)]:
        for path, by in positions.own.items():
            if (found := child_of(own, path)) is not None:
                extend(found[1], by)


def _choose(model: PreTrainedModel, name: str) -> None:
    """Set the attention function of every config: an encoder or a side network may have a copy, which
    releases differ in following."""
    model.set_attn_implementation(name)
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = model.config._attn_implementation


def _explicit(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    first: tuple[int, int],
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Attended:
    """softmax(cap(q k^T scaling) + mask) v, with the probabilities at hand; `first` as `drop_attention` takes
    it. s_aux [heads]: sinks, the score of a key without a value that every query sees."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if query.shape[2] > 1 and causal(module, mask, is_causal):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()[None, None]
    found = probabilities(scores, mask, position_bias, s_aux).to(value.dtype)
    if dropout:
        found = drop_attention(found, dropout, *first)
    return (found @ value).transpose(1, 2).contiguous(), None


def probabilities(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """Softmax of scores [b, heads, q, k] over the keys, float32 or wider; mask and bias as `attention` takes
    them. sinks [heads]: the score of one more key, which every query sees.

    A query that may attend to nothing gets zeros, as in SDPA; with both a bias and a bool mask it attends to
    all keys alike, as in Hugging Face.
    """
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        mask = None if mask is None else F.pad(mask, (0, 1), value=True if mask.dtype is torch.bool else 0.0)
        bias = None if bias is None else F.pad(bias, (0, 1))
        return probabilities(torch.cat([scores, sink], -1), mask, bias)[..., :-1]
    none = None
    if mask is not None and mask.dtype is torch.bool and bias is not None:
        mask, bias = torch.where(mask, bias, torch.finfo(bias.dtype).min), None
    if bias is not None:
        scores = scores + bias
    if mask is not None and mask.dtype is torch.bool:
        none = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        none = (mask == -torch.inf).all(-1, keepdim=True)
        scores = scores + mask
    if none is not None:
        scores = scores.masked_fill(none, 0.0)
    found = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return found if none is None else found.masked_fill(none, 0.0)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
