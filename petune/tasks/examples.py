"""An example: one row as token ids, with what is trained marked by position and never by token id.

Labels are -100 where nothing is trained; the first label of a causal example always is, since no token
predicts it. Hence the number of trained tokens is the number of labels, and packed examples cannot predict
one another's first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from petune.errors import FileError
from petune.tasks.configs import DataConfig
from petune.tasks.media import Reader, Reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASKED = -100
AT_A_TIME = 256  # texts in one call of the tokenizer


@dataclass(frozen=True)
class Example:
    """`labels`: one per input token, the target's tokens (seq2seq, which sets `has_target`), or the number of
    the class (classify), or whether a passage answers its query (rerank).

    `others`: the texts that it is compared with, each an example of its own (prefer: the rejected answer).
    `reference`: what the model before training says of each of its texts, see petune.tasks.prefer_loss.
    `token_types` for models with segments; `positions` (restarting at 0 for each sample) for packed ones.
    `reading`: the picture or sound that is read in the place of tokens.
    `good`: whether the answer is, where each has a label of its own.
    `length` counts the tokens before anything was cut.
    """

    input_ids: list[int]
    labels: list[int] | int
    where: str
    length: int
    token_types: list[int] | None = None
    positions: list[int] | None = None
    has_target: bool = False
    others: tuple[Example, ...] = ()
    reference: tuple[float, ...] | None = None
    good: bool | None = None
    reading: Reading | None = None

    @property
    def size(self) -> int:
        """Input tokens that the model reads for it."""
        return len(self.input_ids) if self.reading is None else self.reading.reader.tokens

    @property
    def texts(self) -> tuple[Example, ...]:
        """Every text of it, itself first: as many rows of the model."""
        return (replace(self, others=(), reference=None), *self.others) if self.others else (self,)

    @property
    def trained(self) -> int:
        """How many labels are trained; 1 for a class. 0 where nothing is read, and where one of several texts
        has none."""
        own = 1 if isinstance(self.labels, int) else sum(label != MASKED for label in self.labels)
        own = own if self.size else 0
        others = [other.trained for other in self.others]
        return own + sum(others) if own and all(others) else 0

    @property
    def tokens(self) -> int:
        """The tokens a model reads for it: the input's, and the target's where that is a text of its own
        (seq2seq)."""
        own = self.size + (self.trained if self.has_target else 0)
        return own + sum(other.tokens for other in self.others)

    @property
    def cut(self) -> bool:
        """Whether something was cut away."""
        return any(text.length > text.size for text in self.texts)


@dataclass(frozen=True)
class Coder:
    """What an encoding needs besides the rows. `limit` and `target_limit` are in tokens; `labels` the classes
    in the order of their ids.

    `segments`: the model takes token types (a generic tokenizer offers them to models that do not). `reader`:
    of a model that reads sounds.
    """

    tokenizer: PreTrainedTokenizerBase
    config: DataConfig
    limit: int
    target_limit: int
    labels: tuple[str, ...] | None
    segments: bool
    reader: Reader | None = None

    def ids(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Token ids of each text, with the tokenizer's own special tokens or none."""
        return self._all_ids(texts, add_special_tokens=special, return_attention_mask=False)

    def target_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text as the target of seq2seq."""
        return self._all_ids(texts, as_target=True)

    def _all_ids(self, texts: Sequence[str], *, as_target: bool = False, **options: Any) -> list[list[int]]:
        """Some texts at a time: between two calls of the tokenizer Python hears signals."""
        found: list[list[int]] = []
        for start in range(0, len(texts), AT_A_TIME):
            some = list(texts[start : start + AT_A_TIME])
            given = {"text_target": some} if as_target else {"text": some}
            found += self.tokenizer(**given, verbose=False, **options)["input_ids"]
        return found

    def eos(self) -> int:
        """The end token. FileError without one: a model that never sees an end never learns to stop."""
        eos = self.tokenizer.eos_token_id
        if not isinstance(eos, int):
            remedy = "set eos_token in the model's tokenizer_config.json"
            what = "the tokenizer has no end-of-sequence token, so the model could not learn to stop"
            raise FileError(what, remedy=remedy)
        return eos


def shorten(ids: list[int], labels: list[int], coder: Coder) -> tuple[list[int], list[int]]:
    """Cut a causal example to the limit on the side the config names; a beginning-of-sequence token stays."""
    if len(ids) <= coder.limit:
        return ids, labels
    if coder.config.truncation == "right":
        return ids[: coder.limit], labels[: coder.limit]
    first = ids[:1] if ids[0] == coder.tokenizer.bos_token_id else []
    keep = coder.limit - len(first)
    return first + ids[-keep:], [MASKED] * len(first) + labels[-keep:]


def causal_example(ids: list[int], labels: list[int], where: str, coder: Coder) -> Example:
    """An example of a decoder, cut to the limit, its first label masked."""
    kept, marked = shorten(ids, labels, coder)
    return Example(kept, [MASKED, *marked[1:]], where, len(ids))


@contextmanager
def cut_on(tokenizer: PreTrainedTokenizerBase, side: str) -> Iterator[None]:
    """The tokenizer truncates on `side` inside; what the user had set is put back."""
    before = tokenizer.truncation_side
    tokenizer.truncation_side = side
    try:
        yield
    finally:
        tokenizer.truncation_side = before


@contextmanager
def whole_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Raise FileError where the tokenizer's own program breaks down inside: a regular expression of its file
    without end, above all."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a BaseException of a module that cannot be imported
            raise
        name = tokenizer.name_or_path or "tokenizer"
        raise FileError(
            f"the tokenizer breaks down: {error}", where=name, remedy="take another copy of the model"
        ) from None
