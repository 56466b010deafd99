"""tokens: every word has a tag. The first token of a word carries its tag; other tokens of it, and special
ones, are not trained.

A text is its words joined by spaces, and a token belongs to the word its characters lie in. So every fast
tokenizer will do, and a text is cut into tokens as it is anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from petune.errors import FileError
from petune.tasks.examples import MASKED, Coder, Example, cut_on
from petune.tasks.rows import Row, Tagged


@dataclass(frozen=True)
class CodedWords:
    """A text of words as token ids, cut to the limit. `firsts[i]` is the place of the first token of word i,
    None if it has none left.

    `length` counts the tokens before the cut.
    """

    input_ids: list[int]
    firsts: list[int | None]
    length: int


def encode_tokens(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Tagged row. FileError for a tokenizer that cannot say where its tokens lie."""
    assert coder.labels is not None
    number = {label: index for index, label in enumerate(coder.labels)}
    examples = []
    for row in rows:
        if not isinstance(row, Tagged):
            continue
        found = encode_words(row.tokens, coder)
        labels = [MASKED] * len(found.input_ids)
        for place, tag in zip(found.firsts, row.tags, strict=True):
            if place is not None:
                labels[place] = number[tag]
        examples.append(Example(found.input_ids, labels, row.where, found.length))
    return examples


def encode_words(words: Sequence[str], coder: Coder) -> CodedWords:
    """The tokens of `words`, and which of them stand for a word."""
    if not coder.tokenizer.is_fast:
        what = "the tokenizer cannot tell which word its tokens belong to"
        raise FileError(what, expected="tokenizer.json", remedy="take a model with one")
    text, ends, end = " ".join(words), [], -1
    for each in words:
        end += 1 + len(each)
        ends.append(end)
    asked: dict[str, Any] = {"return_offsets_mapping": True, "verbose": False}
    with cut_on(coder.tokenizer, coder.config.truncation):
        coded = coder.tokenizer(text, **asked)
        length = len(coded["input_ids"])
        if length > coder.limit:
            coded = coder.tokenizer(text, truncation=True, max_length=coder.limit, **asked)
    firsts: list[int | None] = [None] * len(words)
    # a cut may leave the rest of a word first
    word, opens = 0, coder.config.truncation == "left" and length > coder.limit
    for place, (begin, stop) in enumerate(coded["offset_mapping"]):
        begin += len(text[begin:stop]) - len(text[begin:stop].lstrip())
        while word < len(words) and ends[word] <= begin:
            word += 1
        if begin < stop and word < len(words) and firsts[word] is None:
            rest = opens and begin > ends[word] - len(words[word])
            firsts[word] = None if rest else place
            opens = rest
    return CodedWords(list(coded["input_ids"]), firsts, length)
