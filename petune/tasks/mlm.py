"""mlm: an encoder fills in words that are hidden from it (Devlin et al. 2019, arXiv:1810.04805, section 3.1).

15 % of the tokens of a row are chosen, one at least; 8 in 10 of these become the mask token, 1 in 10 another
token, 1 in 10 stays. The choice is a pure function of seed, step and the row's number in the step, so that it
is the same under every plan and after a resume; held-out rows have one choice for ever.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from petune.errors import FileError
from petune.tasks.examples import MASKED, Coder, Example, cut_on
from petune.tasks.rows import Row, Text
from petune.tasks.windows import Document, cut_documents

SHARE = 0.15
HIDDEN, EXCHANGED = 0.8, 0.1  # of the chosen tokens; the rest stays


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden: the mask token, the number of tokens to exchange with, and those that are never
    put in."""

    mask: int
    vocabulary: int
    special: frozenset[int]

    def draw(self, example: Example, key: str) -> Example:
        """`example`, whose labels are all that may be hidden, with a choice of it hidden and only that
        trained. `key` decides."""
        assert isinstance(example.labels, list)
        drawn, ids = random.Random(key), list(example.input_ids)
        places = [place for place, label in enumerate(example.labels) if label != MASKED]
        labels = [MASKED] * len(ids)
        for place in drawn.sample(places, max(1, round(SHARE * len(places)))):
            labels[place] = ids[place]
            how = drawn.random()
            if how < HIDDEN:
                ids[place] = self.mask
            elif how < HIDDEN + EXCHANGED:
                ids[place] = self._other(drawn)
        return replace(example, input_ids=ids, labels=labels)

    def _other(self, drawn: random.Random) -> int:
        while (token := drawn.randrange(self.vocabulary)) in self.special:
            pass
        return token


def masking_of(coder: Coder) -> Masking:
    """How this tokenizer's tokens are hidden. FileError if it has no mask token."""
    tokenizer = coder.tokenizer
    if not isinstance(tokenizer.mask_token_id, int):
        what = "the tokenizer has no mask token"
        raise FileError(what, expected="mask_token", remedy="take a model that was trained with masks")
    return Masking(tokenizer.mask_token_id, len(tokenizer), frozenset(tokenizer.all_special_ids))


def encode_mlm(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Text, or per window of joined texts, its labels everything that may be hidden."""
    texts = [row for row in rows if isinstance(row, Text)]
    if coder.config.chunk:
        before, after = _frame(coder)
        bare = coder.ids([text.text for text in texts], special=False)
        documents = [Document([*ids, *after[:1]], text.where) for ids, text in zip(bare, texts, strict=True)]
        pieces = cut_documents(documents, coder.limit - len(before) - len(after))
        coded = [([*before, *_without_end(ids, after), *after], where, "") for ids, where in pieces]
    else:
        whole = coder.ids([text.text for text in texts])
        coded = [(ids, text.where, text.text) for ids, text in zip(whole, texts, strict=True)]
    special = set(coder.tokenizer.all_special_ids)
    examples = []
    with cut_on(coder.tokenizer, coder.config.truncation):
        for ids, where, given in coded:
            length = len(ids)
            if given and length > coder.limit:
                ids = coder.tokenizer(given, truncation=True, max_length=coder.limit, verbose=False)[
                    "input_ids"
                ]
            labels = [MASKED if token in special else token for token in ids]
            examples.append(Example(ids, labels, where, length))
    return examples


def _frame(coder: Coder) -> tuple[list[int], list[int]]:
    """The special tokens that stand before and after a text."""
    whole, bare = coder.ids(["a"])[0], coder.ids(["a"], special=False)[0]
    start = next(index for index in range(len(whole)) if whole[index : index + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def _without_end(ids: list[int], after: list[int]) -> list[int]:
    """A window without the separator it may end in, which it gets anyway."""
    return ids[:-1] if after and ids[-1] == after[0] else ids
