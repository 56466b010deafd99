"""Held-out rows asked of the untouched base and of the tuned model: what a person reads before any score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from petune.errors import UsageError
from petune.files.safetensors import write_json
from petune.methods import without_tuning
from petune.run.build import prepare
from petune.run.finished import Run
from petune.run.rows import texts_of
from petune.tasks.answer_metrics import metric_named, scores
from petune.tasks.media import Media
from petune.tasks.rows import (
    Anchored,
    Conversation,
    Labelled,
    Message,
    Pair,
    Pictured,
    Preference,
    Rated,
    Row,
    Spoken,
    Tagged,
)

_HALF = 2  # a text is asked to go on from its first half


def keep_answers(folder: Path, run: Run, count: int, metrics: Sequence[str] = ()) -> dict[str, Any]:
    """What `before_and_after` finds, kept in the run's folder as answers.json, which its page shows."""
    found = before_and_after(run, count, metrics)
    write_json(folder / "answers.json", found)
    return found


def before_and_after(run: Run, count: int, metrics: Sequence[str] = ()) -> dict[str, Any]:
    """The first `count` held-out rows of a finished run, asked greedily. `rows`: of each `prompt`,
    `expected`, and what `base` and `tuned` answer; `scores`: of base and tuned, the metrics of their answers.

    metrics: see petune.tasks.answer_metrics; none: exact_match, and rouge_l where the task generates text.
    Raises UsageError for a run whose rows cannot be asked as one text (masked words, and pairs of texts), a
    run without held-out rows, and a metric that does not work.
    """
    for name in metrics:
        metric_named(name)  # before the models are asked, which takes longer
    prepared = prepare(run.recipe, run.labels, run.objects)
    labels, reader = prepared.rows.labels, prepared.reader
    rows = texts_of(run.recipe, prepared.task.name, labels, run.objects, reader).eval
    asked = [_question(row, prepared.task.name) for row in rows[:count]]
    if not asked:
        raise UsageError("the run has no held-out rows", where="--answers", remedy="give data.eval")
    answers = {"tuned": [run.speaker.ask(prompt) for prompt, _ in asked]}
    if run.base is not None:
        answers["base"] = [run.base.ask(prompt) for prompt, _ in asked]
    else:
        with without_tuning(run.speaker.model):
            answers["base"] = [run.speaker.ask(prompt) for prompt, _ in asked]
    wanted = [expected for _, expected in asked]
    usual = ("exact_match", "rouge_l") if prepared.task.over_vocabulary else ("exact_match",)
    answered = zip(asked, answers["base"], answers["tuned"], strict=True)
    return {
        "rows": [
            {"prompt": _text(prompt), "expected": expected, "base": before, "tuned": after}
            for (prompt, expected), before, after in answered
        ],
        "scores": {name: scores(answers[name], wanted, metrics or usual) for name in ("base", "tuned")},
    }


def _question(row: Row, task: str) -> tuple[str | Sequence[Message], str]:
    """What to ask for a row, and the answer that it holds."""
    if isinstance(row, Labelled) and row.pair is None:
        return row.text, row.label
    if isinstance(row, Pictured):
        return _path_of(row.picture), row.label
    if isinstance(row, Spoken):
        return _path_of(row.sound), row.target
    if isinstance(row, Preference):
        return _question(row.chosen, task)
    if isinstance(row, Rated):
        return _question(row.answer, task)
    if isinstance(row, Pair):
        return row.source, row.target
    if isinstance(row, Conversation):
        last = max(at for at, turn in enumerate(row.messages) if turn.role == "assistant" and turn.trained)
        return row.messages[:last], row.messages[last].content
    if isinstance(row, Tagged):
        tagged = zip(row.tokens, row.tags, strict=True)
        return " ".join(row.tokens), "\n".join(f"{word}\t{tag}" for word, tag in tagged)
    if isinstance(row, Labelled | Anchored) or task == "mlm":
        what = "masked words" if task == "mlm" else "pairs of texts"
        raise UsageError(
            f"rows of {what} cannot be asked as one text", where="--answers", remedy="leave it out"
        )
    words = row.text.split(" ")
    half = max(1, len(words) // _HALF)
    return " ".join(words[:half]), " ".join(words[half:])


def _path_of(media: Media) -> str:
    """Where a picture or a sound lies. Raises UsageError for one that a row holds itself."""
    if media.file is None:
        what = "pictures and sounds that rows hold themselves have no path to be asked by"
        raise UsageError(what, where="--answers", remedy="leave it out")
    return str(media.file)


def _text(prompt: str | Sequence[Message]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn.role}: {turn.content}" for turn in prompt)
