"""Good and bad answers: each gets the answer to another prompt beside it, by which it is estimated how far a
model has moved (see prefer_loss)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petune.errors import DataError, UsageError
from petune.tasks.configs import PreferConfig
from petune.tasks.rows import Rated, Row


def with_others(train: Sequence[Row], held_out: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of both sides, each with the next answer of its side that is another; a held-out row that is
    alone has one that is trained on. Raises DataError for rows that are all good or all bad, and where all
    answers are alike."""
    sides = [[row for row in side if isinstance(row, Rated)] for side in (train, held_out)]
    if len({row.good for row in sides[0]}) < 2:
        what = "every row has the same label"
        found = f"label {str(sides[0][0].good).lower()} in {len(sides[0])} rows"
        raise DataError(what, where=sides[0][0].where, expected="good answers and bad ones", found=found)
    return _beside(sides[0], []), _beside(sides[1], sides[0])


def _beside(rows: Sequence[Rated], more: Sequence[Rated]) -> list[Row]:
    answers = [row.answer.target for row in (*rows, *more)]
    found: list[Row] = []
    for at, row in enumerate(rows):
        after = (answers[(at + step) % len(answers)] for step in range(1, len(answers)))
        other = next((one for one in after if one != row.answer.target), None)
        if other is None:
            what = "no row has another answer, by which kto could tell how far the model has moved"
            raise DataError(
                what, where=row.where, expected="two answers that differ", found=f"{len(rows)} rows"
            )
        found.append(replace(row, other=other))
    return found


def refuse_other_rows(config: PreferConfig, format_: str, where: str) -> None:
    """Raise UsageError for rows of another format than the loss is of."""
    if (config.loss == "kto") != (format_ == "judgements"):
        what = f"prefer: {config.loss} does not learn from rows of format {format_}"
        judged = "prompt, completion, label (format judgements)"
        expected = judged if config.loss == "kto" else "prompt, chosen, rejected (format preferences)"
        remedy = "set prefer: kto" if format_ == "judgements" else "set prefer: dpo, ipo or orpo"
        raise UsageError(what, where=where, expected=expected, remedy=remedy)
