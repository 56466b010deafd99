"""Asking a tuned model: one prompt, many, or a conversation, written to the model the way its training rows were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from petune.assemble import Place, positions_of
from petune.errors import UsageError
from petune.methods import is_wrapped, without_tuning
from petune.tasks import DataConfig, Message, Task, encode_prompt, make_coder, pad_token_id
from petune.tasks.examples import Coder, cut_on
from petune.tasks.tokens import encode_words


@dataclass(frozen=True)
class Speaker:
    """A model with what is needed to talk to it. `format` is the format of the rows it was trained on."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    task: Task
    data: DataConfig
    format: str
    place: Place

    def ask(self, prompt: str | Sequence[Message], **options: Any) -> str:
        """The model's answer to one prompt; for classify the label, for tokens a line `word<tab>tag` per word, for mlm the masks filled in.

        `options` are transformers' generation options (max_new_tokens, do_sample, temperature, num_beams, ...); greedy, 128 new tokens
        unless said. Raises UsageError for options where nothing is generated, and for a prompt longer than the model's positions.
        """
        answers = {"classify": lambda text: self.classify(text)[0], "tokens": self.tag, "mlm": self.fill_masks}
        if answer := answers.get(self.task.name):
            if options:
                raise UsageError(f"task {self.task.name} has no generation options", found=", ".join(options))
            return answer(str(prompt))
        ids = torch.tensor([encode_prompt(prompt, self.task.name, self.tokenizer, self.data, format=self.format)], device=self.place.device)
        limit = positions_of(self.model.config)
        if limit is not None and ids.shape[1] > limit:
            raise UsageError("the prompt is longer than the model's positions", expected=f"at most {limit} tokens", found=str(ids.shape[1]))
        settings = {"max_new_tokens": 128, "do_sample": False, "pad_token_id": pad_token_id(self.tokenizer)} | options
        with torch.no_grad(), self.place.autocast():
            found = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)[0]  # type: ignore[operator]
        start = 0 if self.task.name == "seq2seq" else ids.shape[1]
        return str(self.tokenizer.decode(found[start:], skip_special_tokens=True)).strip()

    def classify(self, text: str) -> tuple[str, float]:
        """The most probable label of `text`, cut as in training, and its probability."""
        limit = self._coder().limit
        with cut_on(self.tokenizer, self.data.truncation):
            inputs = self.tokenizer(text, truncation=True, max_length=limit, return_tensors="pt").to(self.place.device)
        with torch.no_grad(), self.place.autocast():
            probabilities = self.model(**inputs).logits[0].float().softmax(-1)
        best = int(probabilities.argmax())
        return str(self.model.config.id2label[best]), float(probabilities[best])  # type: ignore[union-attr, index]

    def tag(self, text: str) -> str:
        """Each word of `text`, as blanks part them, with its tag: lines `word<tab>tag`. Raises UsageError for one that is too long."""
        words = text.split()
        if not words:
            raise UsageError("the text has no words")
        coded = encode_words(words, self._coder())
        self._refuse_long(coded.length)
        best = self._logits(coded.input_ids).argmax(-1).tolist()
        names: dict[int, str] = self.model.config.id2label  # type: ignore[union-attr, assignment]
        tags = ["-" if place is None else names[best[place]] for place in coded.firsts]
        return "\n".join(f"{word}\t{tag}" for word, tag in zip(words, tags, strict=True))

    def fill_masks(self, text: str) -> str:
        """`text` with the most probable token for each [MASK]. Raises UsageError for a text without one, and for one that is too long."""
        mask = str(self.tokenizer.mask_token)
        text = text.replace("[MASK]", mask)
        if mask not in text:
            raise UsageError("the text has no mask to fill in", expected=mask, found=text)
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        self._refuse_long(len(ids))
        best = self._logits(ids).argmax(-1).tolist()
        filled = [guess if token == self.tokenizer.mask_token_id else token for token, guess in zip(ids, best, strict=True)]
        return str(self.tokenizer.decode(filled, skip_special_tokens=True)).strip()

    def _coder(self) -> Coder:
        return make_coder(self.tokenizer, self.data, max_positions=positions_of(self.model.config))

    def _refuse_long(self, length: int) -> None:
        if length > (limit := self._coder().limit):
            raise UsageError("the text is longer than what the model was trained on", expected=f"at most {limit} tokens", found=str(length))

    def _logits(self, ids: list[int]) -> Tensor:
        """What the model says of each token, [tokens, labels or vocabulary]."""
        inputs = torch.tensor([ids], device=self.place.device)
        with torch.no_grad(), self.place.autocast():
            logits: Tensor = self.model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0]
        return logits


@dataclass
class Chat:
    """A conversation with a tuned model, and with its untouched base in between when asked for."""

    speaker: Speaker
    base: Speaker | None = None
    options: dict[str, Any] = field(default_factory=dict)
    turns: list[Message] = field(default_factory=list)
    on_base: bool = False

    def use_base(self, wanted: bool) -> None:
        """Answer with the untouched base model from now on, or with the tuned one again."""
        self.on_base = wanted

    def reset(self) -> None:
        """Forget the conversation."""
        self.turns.clear()

    def ask(self, text: str) -> Iterator[str]:
        """Say `text` and yield the answer, in one piece. Tasks other than chat see each prompt by itself."""
        conversation = self.speaker.task.name == "chat"
        turn = Message("user", text)
        answer = self._answer([*self.turns, turn] if conversation else text)
        self.turns += [turn, Message("assistant", answer)]  # an answer that failed leaves no half turn
        yield answer

    def _answer(self, prompt: str | list[Message]) -> str:
        if not self.on_base:
            return self.speaker.ask(prompt, **self.options)
        if self.base is not None:
            return self.base.ask(prompt, **self.options)
        assert is_wrapped(self.speaker.model)
        with without_tuning(self.speaker.model):
            return self.speaker.ask(prompt, **self.options)
