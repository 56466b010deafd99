"""What the model before training says of every text of preferences: asked once, before the first step.

The reference is the same model with its tuning switched off, so there is no second copy of weights, and it
never changes: its answer for a row is two numbers. Asking once costs a forward pass of each row, where asking
in every step would cost one an epoch, and makes the loss a function of outputs and batch under every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from petune.errors import UsageError
from petune.methods.configs import method_of
from petune.methods.wrapped import tuning
from petune.parallel import Batch
from petune.run.evaluate import Ask, SumOverAll, answered
from petune.tasks import Example
from petune.tasks.prefer_loss import text_scores, token_losses

if TYPE_CHECKING:
    from petune.run.build import Prepared


def referred(
    units: Sequence[Example],
    ask: Ask,
    rows: Iterable[Batch | None],
    add: SumOverAll = list,
    check: Callable[[], None] = lambda: None,
) -> list[Example]:
    """The examples with what `ask` says of each of their texts. rows: all of them, in batches with or without
    the numbers of their texts; `add` and `check` as in `evaluate.scored`."""
    found = [0.0] * sum(len(unit.texts) for unit in units)
    begun = 0
    for logits, batch in answered(ask, rows, check):
        scores, _ = text_scores(token_losses(logits, batch), batch["labels"])
        places = batch["rows"].tolist() if "rows" in batch else range(begun, begun + len(scores))
        begun += len(scores)
        for place, score in zip(places, scores.tolist(), strict=True):
            found[place] = score
    values = iter(add(found))
    return [replace(unit, reference=tuple(next(values) for _ in unit.texts)) for unit in units]


def refuse_unreferable(model: nn.Module, prepared: Prepared) -> None:
    """Raise UsageError for a run on preferences whose reference, the model before training, is not there any
    more once it trains."""
    recipe = prepared.recipe
    if prepared.task.name != "prefer" or not recipe.prefer.refers:
        return
    what = f"prefer.loss: {recipe.prefer.loss} compares with the model before training"
    other = "set prefer.loss: orpo, which compares with none"
    if method_of(recipe.method).trains_base:
        remedy = f"{other}, or method: lora"
        raise UsageError(
            f"{what}, which full fine-tuning overwrites", where=recipe.where("method"), remedy=remedy
        )
    if recipe.init_adapter is not None:
        where, remedy = recipe.where("init_adapter"), "merge that folder (petune merge) and train the result"
        raise UsageError(f"{what}, and init_adapter is not part of its base", where=where, remedy=remedy)
    if also := tuning(model).also_train:
        remedy = f"{other}, or leave it out of method.also_train"
        raise UsageError(
            f"{what}, and {also[0]} is trained whole", where=recipe.where("method"), remedy=remedy
        )
