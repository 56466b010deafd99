"""Held-out rows asked of the untouched base and of the tuned model: what a person reads before any score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from petune.errors import UsageError
from petune.methods import without_tuning
from petune.run.build import prepare
from petune.run.finished import Run
from petune.tasks.rows import Conversation, Labelled, Message, Pair, Row, Tagged

_HALF = 2  # a text is asked to go on from its first half


def before_and_after(run: Run, count: int) -> list[dict[str, Any]]:
    """The first `count` held-out rows of a finished run: `prompt`, `expected`, and what `base` and `tuned`
    answer, greedily.

    Raises UsageError for a run whose rows cannot be asked as one text: masked words, and pairs of texts.
    """
    prepared = prepare(run.recipe, run.labels, run.objects)
    asked = [_question(row, prepared.task.name) for row in prepared.rows.eval[:count]]
    tuned = [run.speaker.ask(prompt) for prompt, _ in asked]
    if run.base is not None:
        base = [run.base.ask(prompt) for prompt, _ in asked]
    else:
        with without_tuning(run.speaker.model):
            base = [run.speaker.ask(prompt) for prompt, _ in asked]
    return [
        {"prompt": _text(prompt), "expected": expected, "base": before, "tuned": after}
        for (prompt, expected), before, after in zip(asked, base, tuned, strict=True)
    ]


def _question(row: Row, task: str) -> tuple[str | Sequence[Message], str]:
    """What to ask for a row, and the answer that it holds."""
    if isinstance(row, Labelled) and row.pair is None:
        return row.text, row.label
    if isinstance(row, Pair):
        return row.source, row.target
    if isinstance(row, Conversation):
        last = max(at for at, turn in enumerate(row.messages) if turn.role == "assistant" and turn.trained)
        return row.messages[:last], row.messages[last].content
    if isinstance(row, Tagged):
        tagged = zip(row.tokens, row.tags, strict=True)
        return " ".join(row.tokens), "\n".join(f"{word}\t{tag}" for word, tag in tagged)
    if isinstance(row, Labelled) or task == "mlm":
        what = "pairs of texts" if isinstance(row, Labelled) else "masked words"
        raise UsageError(
            f"rows of {what} cannot be asked as one text", where="--answers", remedy="leave it out"
        )
    words = row.text.split(" ")
    half = max(1, len(words) // _HALF)
    return " ".join(words[:half]), " ".join(words[half:])


def _text(prompt: str | Sequence[Message]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn.role}: {turn.content}" for turn in prompt)
