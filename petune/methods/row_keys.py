"""Which rows of tokens a call of a model is about, each under a key: what an activation cache knows them by.

A row is known by its tokens without padding, their types and positions and the place of the first; one of a
decoder by its encoder's too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from petune.models import INPUTS, family_of, input_of, tokens_of

# Tensors a row is known by: of an encoder or a lone decoder, and of a decoder behind an encoder.
MASKED = -100  # a label that is not trained
_OF_INPUT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_OF_TARGET = ("decoder_input_ids", "decoder_attention_mask")
_HARMLESS = {*INPUTS, *_OF_INPUT, *_OF_TARGET, "labels", "logits_to_keep", "return_dict", "use_cache"}


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch: its key, the place of its first token, the number of its tokens."""

    key: bytes
    first: int
    tokens: int


Numbers = NDArray[Any]  # [batch, seq]
Source = tuple[list[BatchRow], Tensor]  # rows, and the tensor [batch, seq] that they are of


def sources_of(model: nn.Module, call: Mapping[str, Any], cast_to: str = "") -> dict[str, Source] | None:
    """The rows of a call of `model`: "input" and, of a decoder with tokens of its own, "decoder"; None where
    something else is asked than the hidden states of whole rows of tokens. cast_to: see cast_of."""
    family = family_of(model)
    asked = {name for name, value in call.items() if value is not None and value is not False}
    tokens = [call[name] for name in (*_OF_INPUT, *_OF_TARGET) if call.get(name) is not None]
    config = cast("Any", model).config
    fills_cache = call.get("use_cache") is not False and not torch.is_grad_enabled()
    if (
        family is None
        or not asked <= _HARMLESS
        or any(getattr(config, one, False) for one in ("output_hidden_states", "output_attentions"))
        or all(call.get(name) is None for name in INPUTS)
        or (family.caches and fills_cache)
        or any(value.dim() != 2 for value in tokens)
    ):
        return None
    pad = getattr(config, "pad_token_id", None)
    if family.reads == "text":
        inputs = _rows([call.get(name) for name in _OF_INPUT], pad), call["input_ids"]
    else:
        inputs = _whole_rows(input_of(call), model)
    inputs = _under(cast_to, inputs[0]), inputs[1]
    own, mask, labels = (call.get(name) for name in (*_OF_TARGET, "labels"))
    if own is None and (labels is None or labels.dim() != 2 or family.kind != "encoder-decoder"):
        return {"input": inputs}  # a decoder that is given nothing reads the input
    ids, padding = (labels, MASKED) if own is None else (own, pad)
    targets = _rows([ids, mask], padding, padded=True)
    behind = [
        BatchRow(_key(row.key, one.key), row.first, row.tokens)
        for row, one in zip(targets, inputs[0], strict=True)
    ]
    return {"input": inputs, "decoder": (behind, ids)}


def cast_of(kind: str) -> str:
    """What autocast on this kind of device computes in now, "" where it is off."""
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""


def _under(cast_to: str, rows: list[BatchRow]) -> list[BatchRow]:
    return [replace(row, key=_key(row.key, cast_to.encode())) for row in rows] if cast_to else rows


def alike(sources: Mapping[str, Source] | None) -> object:
    """What two calls have alike that ask for the same rows, padded alike."""
    return sources and {kind: (rows, tuple(ids.shape)) for kind, (rows, ids) in sources.items()}


def _whole_rows(given: Tensor, model: nn.Module) -> Source:
    """Rows of pictures or sounds [batch, ...], which are known by all their values."""
    tokens = tokens_of(model, given)
    values = given.detach().cpu().contiguous().view(torch.uint8)  # numpy has no bfloat16
    rows = [BatchRow(_key(row.numpy().tobytes()), 0, tokens) for row in values]
    return rows, given.new_empty((len(rows), tokens))


def _rows(values: Sequence[Tensor | None], pad: int | None, padded: bool = False) -> list[BatchRow]:
    """Rows of [batch, seq] tensors: ids, a mask or None, and what else rows are known by. padded: ids of
    `pad` at the end are padding where no mask says so."""
    tokens, mask, *rest = (None if value is None else value.cpu() for value in values)
    assert tokens is not None
    ids, others = tokens.numpy(), [None if value is None else value.numpy() for value in rest]
    while others and others[-1] is None:  # types that are not there keep their place before positions
        others.pop()
    real = None if mask is None else mask.bool().numpy()
    if real is None:
        found = _ends(tokens, rest[-1] if rest else None, pad, padded)
        firsts, ends = [0] * len(ids), found.tolist()
    else:
        firsts, ends = _inside(real)
    rows = []
    for at, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        parts = [ids[at], *(None if value is None else value[at % len(value)] for value in others)]
        parts += [] if real is None else [real[at]]
        pieces = (b"" if part is None else part[first:end].tobytes() for part in parts)
        rows.append(BatchRow(_key(b"%d" % first, *pieces), first, end - first))
    return rows


def _inside(real: Numbers) -> tuple[list[int], list[int]]:
    """The first token of each row that is no padding, and the end of the last; one token where all are."""
    some = real.any(1)
    ends = np.where(some, real.shape[1] - real[:, ::-1].argmax(1), 1)
    return real.argmax(1).tolist(), ends.tolist()


def _ends(ids: Tensor, positions: Tensor | None, pad: int | None, padded: bool) -> Tensor:
    """The same where no mask says it; what a packed row is filled up with is no token of it."""
    if padded and pad is not None:
        last = _behind_last(ids != pad)
        return torch.where(last > 0, last, ids.shape[1])
    if padded or positions is None or pad is None:
        return torch.full((len(ids),), ids.shape[1])
    return packed_ends(ids, positions, pad)


def packed_ends(ids: Tensor, positions: Tensor, pad: int) -> Tensor:
    """Where the tokens of packed rows end, int64 [batch], for ids [batch, seq], positions [batch | 1, seq]: a
    last sample of nothing but padding fills a row up; where the end token pads, one is of its sample."""
    last, start = _behind_last(ids != pad), (_behind_last(positions == 0) - 1).clamp(min=0)
    return torch.where((last > 0) & (last <= start), start, ids.shape[1])


def _behind_last(some: Tensor) -> Tensor:
    """The place behind the last True of each row [batch, seq], 0 where there is none. Waits for no GPU."""
    places = torch.arange(1, some.shape[1] + 1, device=some.device)
    return (some * places).amax(1)


def _key(*parts: bytes) -> bytes:
    """16 bytes that no other parts have."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()
