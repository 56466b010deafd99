"""What a head of classes reads of the last block's hidden states, which is all that an activation cache keeps
below a head alone: one token of a row, or a sum over its tokens.

Transformers' own classes are known by the table of their family. A decoder's head reads the last token that
is no padding, an encoder-decoder's the last end of a text, an encoder's the first token; some take the mean
over tokens, and what is kept then is the sum that the mean is of, taken behind the final norm. In a row that
is read these stand where they were, a sum at the first real token, and zeros elsewhere: the head, called as
ever, finds the values that it found before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.methods.configs import method_of
from petune.methods.row_keys import BatchRow
from petune.methods.trainable import moving
from petune.methods.wrapped import is_wrapped, tuning
from petune.models.heads import model_class
from petune.models.spec import Family, ModelKind, Pooling
from petune.models.stack import Stack

_OF_KIND: Mapping[ModelKind, Pooling] = {"encoder": "first", "decoder": "last", "encoder-decoder": "end"}

# of a module of somebody else's, a pooler say, nobody knows what it reads
_KNOWN = ("transformers.", "torch.", "petune.")


@dataclass(frozen=True)
class HeadRows:
    """What of a row is kept. token: the id that padding, or the end of a text, has; None where that is not
    asked, or where nothing pads."""

    kind: Pooling
    token: int | None

    @property
    def name(self) -> str:
        """What files of such rows are called behind the stack: no two kinds share rows."""
        return "-" + self.kind.replace(" ", "-") + ("" if self.token is None else str(self.token))

    @property
    def summed(self) -> bool:
        """Whether it is taken of what the base gives, behind the final norm, and not of the last block."""
        return "mean" in self.kind

    @property
    def count(self) -> int:
        """Vectors that are kept of a row."""
        return 2 if self.kind == "first and mean" else 1

    def rows(self, rows: Sequence[BatchRow]) -> list[BatchRow]:
        """The same rows, of as many tokens as are kept."""
        return [BatchRow(row.key, 0, self.count) for row in rows]

    def of(self, call: Mapping[str, Any], shape: tuple[int, int], device: torch.device) -> Picked:
        """Where they are in the rows of a call of the model, [batch, seq] = `shape`. Waits for no GPU."""
        mask, ids = call.get("attention_mask"), call.get("input_ids")
        places = torch.zeros(shape[0], dtype=torch.long, device=device)
        if self.kind == "mean" and mask is not None:
            places = mask.to(device, torch.int32).argmax(1)
        elif self.kind == "last" and self.token is None:
            places += shape[1] - 1
        elif self.kind in ("last", "end"):
            assert ids is not None, "a call without tokens has no rows"
            wanted = (ids != self.token) if self.kind == "last" else (ids == self.token)
            found = wanted.to(device, torch.int32) * torch.arange(ids.shape[1], device=device)
            places = found.argmax(1)
        return Picked(self, places, mask if self.kind == "mean" else None, shape[1])


@dataclass(frozen=True)
class Picked:
    """What is kept of the rows of one pass. places: of the first vector, int64 [batch]; mask: [batch, seq],
    by which a mean is taken, None for all tokens."""

    rows: HeadRows
    places: Tensor
    mask: Tensor | None
    tokens: int

    def taken(self, hidden: Tensor) -> Tensor:
        """[batch, count, width] of hidden states [batch, seq, width]."""
        if self.rows.kind == "mean":
            masked = hidden if self.mask is None else hidden * self.mask.unsqueeze(-1)
            return masked.sum(1, keepdim=True).to(hidden.dtype)
        if self.rows.kind == "first and mean":
            return torch.cat([hidden[:, :1], hidden[:, 1:].sum(1, keepdim=True)], 1)
        return hidden[self._each, self.places].unsqueeze(1)

    def spread(self, kept: Tensor) -> Tensor:
        """Hidden states [..., batch, seq, width] that hold what was kept, [..., batch, count, width]."""
        whole = kept.new_zeros((*kept.shape[:-2], self.tokens, kept.shape[-1]))
        for at in range(self.rows.count):
            whole[..., self._each, self.places + at, :] = kept[..., at, :]
        return whole

    @property
    def _each(self) -> Tensor:
        return torch.arange(len(self.places), device=self.places.device)


def head_rows(model: nn.Module, family: Family) -> HeadRows | None:
    """What the head behind the last block of `model` reads, a head alone on a frozen model; None where it is
    every token or nobody knows: of a class or with modules that are not transformers' own, under ladders, or
    where something trains between the blocks and a mean."""
    if is_wrapped(model) and not method_of(tuning(model).config).head_alone:
        return None
    config = cast("Any", model).config
    made = model_class(config, "classify")
    theirs = made is not None and type(model).forward is made._model_mapping[type(config)].forward
    if not theirs or not all(type(module).__module__.startswith(_KNOWN) for module in model.modules()):
        return None
    base = cast("nn.Module", cast("Any", model).base_model)
    kind = _OF_KIND[family.kind] if family.pools is None else family.pools(config)
    inside = {id(value) for value in base.parameters()}
    if kind == "every" or ("mean" in kind and any(id(value) in inside for value in moving(model).values())):
        return None
    known = {"last": "pad_token_id", "end": "eos_token_id"}
    token = getattr(config.get_text_config(), known[kind]) if kind in known else None
    return None if kind == "end" and not isinstance(token, int) else HeadRows(kind, token)


def ends_here(stack: Stack, family: Family) -> bool:
    """Whether the last block of the model is in this stack, and here."""
    return stack.name == list(family.stacks)[-1] and (stack.wire is None or stack.wire.ends)


def reads_one_stack(model: nn.Module, family: Family) -> bool:
    """Whether what trains reads the last stack alone: a head on a frozen model, whose encoder, where it has
    one before, need not be asked again. Of a model that is not wrapped somebody may read more."""
    if is_wrapped(model):
        return method_of(tuning(model).config).head_alone
    return head_rows(model, family) is not None
