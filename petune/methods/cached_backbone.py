"""The backbone of an activation cache: what it must be, and by what it is known."""

from __future__ import annotations

import hashlib
from typing import cast

import transformers
from torch import nn

from petune.errors import UsageError
from petune.methods.configs import method_of
from petune.methods.trainable import frozen_digest, frozen_tensors, moving
from petune.methods.wrapped import is_wrapped, tuning
from petune.models import FAMILIES, family_of
from petune.models.behind import behind_blocks
from petune.models.checksums import digest
from petune.models.contents import checksums_of
from petune.models.stack import stacks_in


def refuse_moving(model: nn.Module) -> None:
    """Raise UsageError unless what the blocks of `model` give depends on nothing that trains, and for a model
    of no family."""
    stacks = list(stacks_in(model).values())
    method = method_of(tuning(model).config) if is_wrapped(model) else None
    if method is not None and not method.still:
        what = "an activation cache is for ladders and frozen models: this method changes what blocks give"
        expected = "method side or head, or a frozen model that is not wrapped, with a head that trains"
        remedy = "leave the cache out"
        raise UsageError(what, where="cache", expected=expected, found=tuning(model).method, remedy=remedy)
    if (family := family_of(model)) is None:
        what = f"an activation cache needs a model family petune knows, not {type(model).__name__}"
        raise UsageError(what, where="cache", expected=", ".join(FAMILIES), remedy="leave the cache out")
    if method is not None and method.head_alone:
        return  # which takes nothing else
    ladders = [stack.ladder for stack in stacks if stack.ladder is not None]
    after = {id(value) for ladder in ladders for value in cast("nn.Module", ladder).parameters()}
    base = getattr(model, "base_model", model)
    before = {id(value) for value in base.parameters()} - after
    moved = {name: value for name, value in moving(model).items() if id(value) in before}
    behind = behind_blocks(model, family) if moved else set()
    for name, value in moved.items():
        if id(value) not in behind:
            what = "an activation cache is for a backbone that stays as it is, and this tensor of it trains"
            remedy = (
                "take it out of also_train, or freeze it (requires_grad_(False)) where the model is not"
                " wrapped; or leave the cache out"
            )
            raise UsageError(what, where=name, remedy=remedy)


def identity_of(model: nn.Module, frozen: str | None = None) -> str:
    """16 digits by which a backbone is known: every bit of what does not train, and the version of
    transformers. frozen: `frozen_digest` of the model, where it was taken already."""
    frozen = frozen or frozen_digest(model)
    text = f"transformers {transformers.__version__} {list(frozen_tensors(model))} {frozen}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class StillBase:
    """The frozen tensors of a model in a loop of one's own, where nobody else looks at them once more: rows
    that were computed with other values would be read in silence, and be written for these.

    Each pass asks torch's count of writes to a tensor, its dtype and whether it trains; values are compared
    where one of these is another, so state that is loaded again changes nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.tensors = model, frozen_tensors(model)
        self.sums = checksums_of(model, self.tensors)
        self.identity = identity_of(model, digest(self.sums))
        self._seen = self._stamps()

    def _stamps(self) -> list[tuple[object, ...]]:
        return [
            (value.requires_grad, value.dtype, None if value.is_inference() else value._version)
            for value in self.tensors.values()
        ]

    def refuse_changed(self) -> None:
        """Raise UsageError where blocks would give something else than when the cache was opened."""
        if self._stamps() == self._seen:
            return
        refuse_moving(self.model)
        self.tensors = {name: value for name, value in self.tensors.items() if not value.requires_grad}
        for name, found in checksums_of(self.model, self.tensors).items():
            if found != self.sums[name]:
                raise UsageError(
                    "a frozen tensor was changed while an activation cache was open, whose rows are of other"
                    " values",
                    where=name,
                    remedy="close the cache before the model is changed, and open it anew",
                )
        self._seen = self._stamps()
