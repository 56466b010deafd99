"""Asking a tuned model: one prompt, many, or a conversation, written to the model the way its training rows
were.

What is asked for is done or refused: an option of sampling samples, and one that is unknown, out of range or
against another is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from petune.errors import UsageError
from petune.methods import is_wrapped, without_tuning
from petune.models.languages import begun
from petune.run.build import ComputeSetting, positions_of
from petune.run.generation import refuse_cut, settle_options, within
from petune.run.readers import asked_with
from petune.tasks import DataConfig, Message, Task, encode_prompt, make_coder, pad_token_id
from petune.tasks.examples import Coder, cut_on
from petune.tasks.media import Reader
from petune.tasks.rerank_loss import passage_scores
from petune.tasks.tokens import encode_words

_PASSAGES = 32  # that are read at a time


@dataclass(frozen=True)
class Speaker:
    """A model with what is needed to talk to it. `format` is the format of the rows it was trained on;
    `words` its tokenizer, None for one that reads pictures, by `reader`."""

    model: nn.Module
    words: PreTrainedTokenizerBase | None
    reader: Reader | None
    task: Task
    data: DataConfig
    format: str
    place: ComputeSetting

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of a model of text."""
        assert self.words is not None, "a model that reads pictures has no tokenizer"
        return self.words

    def readable(self, prompt: object) -> str:
        """`prompt` itself. Raises UsageError for one that is no text, or holds what no tokenizer reads; the
        path of a picture or a sound may have any bytes."""
        text = text_of(prompt)
        if (
            self.reader is None
            and (at := next((at for at, one in enumerate(text) if "\ud800" <= one <= "\udfff"), -1)) >= 0
        ):
            what = "the prompt is not UTF-8"
            found = f"{text[max(0, at - 20) : at + 20]!r}, at character {at}"
            remedy = "convert it first: iconv -f ITS-ENCODING -t UTF-8"
            raise UsageError(what, where="generate", expected="a text", found=found, remedy=remedy)
        return text

    @property
    def talks(self) -> bool:
        """Whether it answers conversations, by the tokenizer's template."""
        return self.task.name == "chat" or self.format == "preference-turns"

    def settle(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` as they are meant for this model. Raises UsageError as `settle_options`, and for any
        where nothing is generated."""
        if self.task.name not in _ANSWERS:
            return settle_options(options)
        if options:
            what = f"task {self.task.name} has no generation options"
            raise UsageError(what, where="generate", found=", ".join(options), remedy="leave them out")
        return {}

    def ask(self, prompt: str | Sequence[Message], **options: Any) -> str:
        """The model's answer to one prompt, a text or, for chat, a conversation; for classify the label, for
        tokens a line `word<tab>tag` per word, for mlm the masks filled in, for rerank see `rank_lines`.

        `options` are transformers' generation options (max_new_tokens, temperature, top_p, num_beams, ...);
        greedy, 128 new tokens unless said or the model's positions end, and sampled where one of sampling is
        given. Raises UsageError for any other prompt, for options that are unknown or do not fit, and for a
        prompt or an answer longer than the model's positions.
        """
        settings = self.settle(options)
        if answer := _ANSWERS.get(self.task.name):
            return answer(self, self.readable(prompt))
        talk = (
            self.talks
            and isinstance(prompt, list | tuple)
            and all(isinstance(turn, Message) for turn in prompt)
        )
        prompt, limit = prompt if talk and prompt else self.readable(prompt), positions_of(self.model.config)
        if self.reader is not None:
            start, taken = 0, begun(self.tokenizer)
            given = asked_with(text_of(prompt), self.reader, self.place.device)
        else:
            ids = self._ids(prompt, limit)
            start = 0 if self.task.name == "seq2seq" else ids.shape[1]
            given, taken = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, start or 1
        room = math.inf if limit is None else max(1, limit - taken)
        found = self._generated(given, within(settings, room, taken), options)
        if options.keys() & {"max_new_tokens", "max_length"}:
            refuse_cut(found, settings, room, taken, self.tokenizer.eos_token_id)
        return str(self.tokenizer.decode(found[start:], skip_special_tokens=True)).strip()

    def _ids(self, prompt: str | Sequence[Message], limit: int | None) -> Tensor:
        """The tokens of a prompt, [1, length]. Raises UsageError where there are none, or more than the
        model's positions."""
        coded = encode_prompt(prompt, self.task.name, self.tokenizer, self.data, format=self.format)
        _refuse_empty(coded)
        if limit is not None and len(coded) > limit:
            raise UsageError(
                "the prompt is longer than the model's positions",
                expected=f"at most {limit} tokens",
                found=str(len(coded)),
                remedy="ask with a shorter text"
                if isinstance(prompt, str)
                else "say it shorter, or forget what was said before: /reset, in Python Chat.reset()",
            )
        return torch.tensor([coded], device=self.place.device)

    def _generated(
        self, given: Mapping[str, Tensor], settings: dict[str, Any], options: Mapping[str, Any]
    ) -> Tensor:
        """The tokens that the model writes, behind those of its prompt. Raises UsageError for options that
        transformers refuses."""
        settings = {"pad_token_id": pad_token_id(self.tokenizer)} | settings
        if "stop_strings" in settings:
            settings["tokenizer"] = self.tokenizer
        with torch.no_grad(), self.place.autocast():
            try:
                found: Tensor = cast("Any", self.model).generate(**given, **settings)[0]
            except ValueError as error:  # transformers' word for an option it cannot take
                what = (str(error).splitlines() or ["no reason is given"])[0]
                what, asked = f"transformers refuses: {what}", ", ".join(options)
                remedy = "change these options, or leave them out"
                raise UsageError(what, where="generate", found=asked, remedy=remedy) from error
        return found

    def classify(self, text: str) -> tuple[str, float]:
        """The most probable label of `text`, cut as in training, or of the picture at that path, and its
        probability. Raises UsageError for anything but a text, and for a path without a picture."""
        text = self.readable(text)
        given = self.reader
        inputs = self._coded(text) if given is None else asked_with(text, given, self.place.device)
        with torch.no_grad(), self.place.autocast():
            probabilities = self.model(**inputs).logits[0].float().softmax(-1)
        best = int(probabilities.argmax())
        return str(self.model.config.id2label[best]), float(probabilities[best])  # type: ignore[union-attr, index]  # of a classifier's config, a mapping

    def rank(self, query: str, passages: Sequence[str]) -> list[tuple[str, float]]:
        """The passages with how well each answers `query`, from 0 to 1, the best first; pairs are cut as in
        training. Raises UsageError for a task other than rerank, and for anything but texts."""
        if self.task.name != "rerank":
            what, remedy = f"a model of task {self.task.name} does not rank", "train one of task: rerank"
            raise UsageError(what, where="rank", remedy=remedy)
        pairs = [(self.readable(query), self.readable(passage)) for passage in passages]
        limit, found = self._coder().limit, []
        for at in range(0, len(pairs), _PASSAGES):
            with cut_on(self.tokenizer, self.data.truncation):
                inputs = self.tokenizer(
                    pairs[at : at + _PASSAGES],
                    padding=True,
                    truncation="longest_first",
                    max_length=limit,
                    return_tensors="pt",
                ).to(self.place.device)
            with torch.no_grad(), self.place.autocast():
                found += passage_scores(self.model(**inputs).logits).sigmoid().tolist()
        return sorted(zip(passages, found, strict=True), key=lambda one: -one[1])

    def rank_lines(self, text: str) -> str:
        """`rank` of a query in the first line and a passage in each line after it: lines
        `score<tab>passage`. Raises UsageError where no passage is given."""
        query, *passages = [line for line in text.splitlines() if line.strip()]
        if not passages:
            remedy = (
                r"""printf 'query\npassage\npassage' | petune generate RUN, or Run.rank(query, passages)"""
            )
            what = "the query has no passages to rank"
            raise UsageError(what, where="generate", expected="a line for each", remedy=remedy)
        return "\n".join(f"{score:.6f}\t{passage}" for passage, score in self.rank(query, passages))

    def tag(self, text: str) -> str:
        """Each word of `text`, as blanks part them, with its tag: lines `word<tab>tag`. Raises UsageError for
        one that is too long."""
        words = text.split()
        if not words:
            raise UsageError("the text has no words", where="tag", remedy="give a word at least")
        coded = encode_words(words, self._coder())
        self._refuse_long(coded.length)
        best = self._logits(coded.input_ids).argmax(-1).tolist()
        names: dict[int, str] = self.model.config.id2label  # type: ignore[union-attr, assignment]  # of a classifier's config, a mapping
        tags = ["-" if place is None else names[best[place]] for place in coded.firsts]
        return "\n".join(f"{word}\t{tag}" for word, tag in zip(words, tags, strict=True))

    def fill_masks(self, text: str) -> str:
        """`text` with the most probable token for each [MASK]. Raises UsageError for a text without one, and
        for one that is too long."""
        mask = str(self.tokenizer.mask_token)
        text = text.replace("[MASK]", mask)
        if mask not in text:
            raise UsageError("the text has no mask to fill in", expected=mask, found=text)
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        self._refuse_long(len(ids))
        best = self._logits(ids).argmax(-1).tolist()
        filled = [
            guess if token == self.tokenizer.mask_token_id else token
            for token, guess in zip(ids, best, strict=True)
        ]
        return str(self.tokenizer.decode(filled, skip_special_tokens=True)).strip()

    def _coded(self, text: str) -> Mapping[str, Tensor]:
        """The inputs of a text, a batch of one, cut as in training."""
        limit = self._coder().limit
        with cut_on(self.tokenizer, self.data.truncation):
            inputs = self.tokenizer(text, truncation=True, max_length=limit, return_tensors="pt").to(
                self.place.device
            )
        _refuse_empty(inputs["input_ids"][0].tolist())
        return dict(inputs)

    def _coder(self) -> Coder:
        return make_coder(self.tokenizer, self.data, max_positions=positions_of(self.model.config))

    def _refuse_long(self, length: int) -> None:
        if length > (limit := self._coder().limit):
            what = "the text is longer than what the model was trained on"
            expected = f"at most {limit} tokens"
            raise UsageError(what, expected=expected, found=str(length), remedy="ask with a shorter text")

    def _logits(self, ids: list[int]) -> Tensor:
        """What the model says of each token, [tokens, labels or vocabulary]."""
        inputs = torch.tensor([ids], device=self.place.device)
        with torch.no_grad(), self.place.autocast():
            logits: Tensor = self.model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0]
        return logits


_ANSWERS: dict[str, Callable[[Speaker, str], str]] = {  # of tasks that generate nothing
    "classify": lambda speaker, text: speaker.classify(text)[0],
    "tokens": Speaker.tag,
    "mlm": Speaker.fill_masks,
    "rerank": Speaker.rank_lines,
}


def text_of(prompt: object) -> str:
    """`prompt` itself. Raises UsageError for one that is no text."""
    if isinstance(prompt, str):
        return prompt
    remedy = "Run.generate takes a text or a list of texts, Run.chat() keeps a conversation"
    found = f"{type(prompt).__name__}: {prompt!r}"[:100]
    raise UsageError("a prompt is a text", where="generate", expected="str", found=found, remedy=remedy)


def _refuse_empty(ids: list[int]) -> None:
    """Raise UsageError where there is nothing to read: of an empty text many tokenizers make no token."""
    if not ids:
        raise UsageError("the prompt has no tokens", where="generate", remedy="ask with a text")


@dataclass
class Chat:
    """A conversation with a tuned model, and with its untouched base in between when asked for."""

    speaker: Speaker
    base: Callable[[], Speaker | None] = lambda: None  # found when it is first asked
    options: dict[str, Any] = field(default_factory=dict)
    turns: list[Message] = field(default_factory=list)
    on_base: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError now for options that no answer could be made with."""
        self.speaker.settle(self.options)

    def use_base(self, wanted: bool) -> None:
        """Answer with the untouched base model from now on, or with the tuned one again."""
        self.on_base = wanted

    def reset(self) -> None:
        """Forget the conversation."""
        self.turns.clear()

    def ask(self, text: str) -> Iterator[str]:
        """Say `text` and yield the answer, in one piece. Tasks other than chat see each prompt by itself."""
        conversation = self.speaker.talks
        turn = Message("user", self.speaker.readable(text))
        answer = self._answer([*self.turns, turn] if conversation else text)
        self.turns += [turn, Message("assistant", answer)]  # an answer that failed leaves no half turn
        yield answer

    def _answer(self, prompt: str | list[Message]) -> str:
        if not self.on_base:
            return self.speaker.ask(prompt, **self.options)
        if (base := self.base()) is not None:
            return base.ask(prompt, **self.options)
        assert is_wrapped(self.speaker.model)
        with without_tuning(self.speaker.model):
            return self.speaker.ask(prompt, **self.options)
