"""classify: a text, or a pair of texts, and the number of its class. Over-long texts lose tokens, never the
tokenizer's special ones."""

from __future__ import annotations

from collections.abc import Sequence

from petune.tasks.examples import Coder, Example, cut_on
from petune.tasks.rows import Labelled, Row


def encode_classify(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Labelled row; of a pair the longer text is cut."""
    assert coder.labels is not None
    number = {label: index for index, label in enumerate(coder.labels)}
    labelled = [row for row in rows if isinstance(row, Labelled)]
    with cut_on(coder.tokenizer, coder.config.truncation):
        return [pair_example(row.text, row.pair, number[row.label], row.where, coder) for row in labelled]


def pair_example(text: str, pair: str | None, label: int, where: str, coder: Coder) -> Example:
    """The example of a text, or of a pair, whose longer one is cut, on the side the tokenizer is set to."""
    whole = coder.tokenizer(text, pair, verbose=False)
    length = len(whole["input_ids"])
    if length > coder.limit:
        cut = {"truncation": "longest_first", "max_length": coder.limit}
        whole = coder.tokenizer(text, pair, verbose=False, **cut)
    types = whole.get("token_type_ids") if coder.segments else None
    return Example(whole["input_ids"], label, where, length, types)
