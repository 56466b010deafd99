"""classify: a text, a pair of texts or a picture, and the number of its class. Over-long texts lose tokens,
never the tokenizer's special ones."""

from __future__ import annotations

from collections.abc import Sequence

from petune.errors import DataError, FileError
from petune.tasks.examples import Coder, Example, cut_on
from petune.tasks.media import Reader, Reading
from petune.tasks.rows import Labelled, Pictured, Row


def encode_classify(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Labelled row; of a pair the longer text is cut."""
    assert coder.labels is not None
    number = {label: index for index, label in enumerate(coder.labels)}
    labelled = [row for row in rows if isinstance(row, Labelled)]
    with cut_on(coder.tokenizer, coder.config.truncation):
        return [pair_example(row.text, row.pair, number[row.label], row.where, coder) for row in labelled]


def encode_pictures(rows: Sequence[Row], reader: Reader, labels: Sequence[str]) -> list[Example]:
    """One example per Pictured row, whose pixels are read when a batch asks for them."""
    number = {label: index for index, label in enumerate(labels)}
    return [
        Example([], number[row.label], row.where, reader.tokens, reading=Reading(row.picture, reader))
        for row in rows
        if isinstance(row, Pictured)
    ]


def pair_example(text: str, pair: str | None, label: int, where: str, coder: Coder) -> Example:
    """The example of a text, or of a pair, whose longer one is cut, on the side the tokenizer is set to."""
    whole = coder.tokenizer(text, pair, verbose=False)
    length = len(whole["input_ids"])
    if length > coder.limit:
        cut = {"truncation": "longest_first", "max_length": coder.limit}
        whole = coder.tokenizer(text, pair, verbose=False, **cut)
    types = whole.get("token_type_ids") if coder.segments else None
    return Example(whole["input_ids"], label, where, length, types)


# whose head reads the state of a text's last end token, and is called for texts of as many each
READ_AT_END = frozenset({"bart", "mbart", "t5", "mt5"})


def refuse_unended(examples: Sequence[Example], end: int) -> None:
    """Raise FileError for a text without the end token that such a head reads, DataError where some texts
    have more of them than others, which no batch may."""
    expected, first = 0, ""
    for example in examples:
        found = example.input_ids.count(end)
        if not found:
            what = "the tokenizer does not end a text with the end token that the head of classes reads"
            remedy = "take the tokenizer of this model, or add the token to its post-processor"
            raise FileError(what, where=example.where, expected=f"a token {end}", remedy=remedy)
        if not first:
            expected, first = found, example.where
        if found != expected:
            raise DataError(
                "the head of classes reads the last end token, and takes texts of as many in each",
                where=example.where,
                expected=f"{expected}, as in {first}",
                found=f"{found}",
                remedy="take the end token out of the text, and give all rows a pair or none",
            )
