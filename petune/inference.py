"""Asking a tuned model: one prompt, many, or a conversation, written to the model the way its training rows were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from petune.assemble import Place, positions_of
from petune.errors import UsageError
from petune.methods import is_wrapped, without_tuning
from petune.tasks import DataConfig, Message, Task, encode_prompt, make_coder, pad_token_id
from petune.tasks.examples import cut_on


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
        """The model's answer to one prompt; for classify the label.

        `options` are transformers' generation options (max_new_tokens, do_sample, temperature, num_beams, ...); greedy, 128 new tokens
        unless said. Raises UsageError for options given to a classifier, and for a prompt longer than the model's positions.
        """
        if self.task.name == "classify":
            if options:
                raise UsageError("a classifier has no generation options", found=", ".join(options))
            return self.classify(str(prompt))[0]
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
        limit = make_coder(self.tokenizer, self.data, max_positions=positions_of(self.model.config)).limit
        with cut_on(self.tokenizer, self.data.truncation):
            inputs = self.tokenizer(text, truncation=True, max_length=limit, return_tensors="pt").to(self.place.device)
        with torch.no_grad(), self.place.autocast():
            probabilities = self.model(**inputs).logits[0].float().softmax(-1)
        best = int(probabilities.argmax())
        return str(self.model.config.id2label[best]), float(probabilities[best])  # type: ignore[union-attr, index]


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
