"""Which rows are held out: a rule that depends on the rows alone, so that it is the same everywhere and said
in one line.

The rank of a row is the SHA-256 of what identifies it; the lowest ranks are held out. Equal rows have equal
ranks and so fall on one side.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from petune.errors import DataError
from petune.tasks.rows import Labelled, Pictured, Row, Text, identity


class Split(NamedTuple):
    """Two sides that share no row, and the rule in words."""

    train: list[Row]
    eval: list[Row]
    rule: str


def rank(row: Row, salt: str) -> str:
    """A number without pattern, fixed by the row and the salt."""
    return hashlib.sha256(f"{salt}\n{identity(row)}".encode()).hexdigest()


def split_off(rows: list[Row], share: float, salt: str = "") -> Split:
    """Hold out `share` of the distinct rows, per class where there are classes. Raises DataError below two
    distinct rows."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[rank(row, salt)].append(index)
    if len(groups) < 2:
        found = f"{len(rows)} row{'s' if len(rows) > 1 else ''}, {len(groups)} distinct"
        remedy = "add rows, or give the held-out rows: data.eval"
        raise DataError(
            "too few rows to hold some out",
            where=rows[0].where,
            expected="2 distinct rows or more",
            found=found,
            remedy=remedy,
        )
    strata: dict[str | None, list[str]] = defaultdict(list)
    for key in sorted(groups):
        first = rows[groups[key][0]]
        strata[first.label if isinstance(first, Labelled | Pictured) else None].append(key)
    held: set[str] = set()
    for keys in strata.values():
        held.update(keys[: min(round(share * len(keys)), len(keys) - 1)])
    if not held:
        largest = max(strata.values(), key=len)
        if len(largest) < 2:
            remedy = "add rows, or give the held-out rows: data.eval; is data.columns.label the right column?"
            raise DataError(
                "every row has a label of its own, so that none can be held out",
                where=rows[0].where,
                expected="2 distinct rows of a class or more",
                found=f"{len(strata)} labels in {len(rows)} rows",
                remedy=remedy,
            )
        held.add(largest[0])
    out = {index for key in held for index in groups[key]}
    train = [row for index, row in enumerate(rows) if index not in out]
    by = "seed and content hash" if salt else "content hash"
    rule = f"held out {len(out)} of {len(rows)} rows ({share:.0%} of the distinct ones, chosen by {by})"
    return Split(train, [rows[index] for index in sorted(out)], rule)


def split_documents(rows: list[Row], share: float) -> Split:
    """Hold out the end of every document: for too few of them to hold out some whole. Raises DataError for
    one of a single word."""
    kept: list[Row] = []
    held: list[Row] = []
    for row in rows:
        assert isinstance(row, Text)
        at = row.text.find(" ", round(len(row.text) * (1 - share)))
        place = at if at > 0 else row.text.rfind(" ")
        if place < 1 or not (row.text[:place].strip() and row.text[place:].strip()):
            raise DataError(
                "the document has one word, so that none of it can be held out",
                where=row.where,
                remedy="give data.eval",
            )
        kept.append(replace(row, text=row.text[:place]))
        held.append(replace(row, text=row.text[place:].lstrip()))
    return Split(
        kept, held, f"held out the last {share:.0%} of {'each document' if len(rows) > 1 else 'the document'}"
    )


def keep_apart(train: list[Row], held_out: list[Row], rule: str) -> Split:
    """Given held-out rows stay; trained rows equal to one of them go. Raises DataError if none are left.
    `rule` says whence they are."""
    held = {identity(row) for row in held_out}
    kept = [row for row in train if identity(row) not in held]
    if not kept:
        raise DataError(
            "every row to train on is also held out",
            where=train[0].where,
            remedy="are path and eval the same file?",
        )
    gone = len(train) - len(kept)
    return Split(
        kept, held_out, rule + (f"; {gone} rows of train that are among them dropped" if gone else "")
    )


def sample(rows: list[Row], limit: int | None) -> list[Row]:
    """At most `limit` rows, the lowest ranks, in their order."""
    if limit is None or len(rows) <= limit:
        return rows
    chosen = sorted(sorted(range(len(rows)), key=lambda index: (rank(rows[index], "sample"), index))[:limit])
    return [rows[index] for index in chosen]
