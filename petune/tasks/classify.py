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
    examples = []
    with cut_on(coder.tokenizer, coder.config.truncation):
        for row in labelled:
            whole = coder.tokenizer(row.text, row.pair, verbose=False)
            length = len(whole["input_ids"])
            if length > coder.limit:
                whole = coder.tokenizer(
                    row.text, row.pair, truncation="longest_first", max_length=coder.limit, verbose=False
                )
            types = whole.get("token_type_ids") if coder.segments else None
            examples.append(Example(whole["input_ids"], number[row.label], row.where, length, types))
    return examples
