"""Preferences: two answers to one prompt become a row, as texts or as turns.

Of turns, a file has the prompt in a column of its own (a text or turns), or the whole conversation twice, or
both. What is compared is the last turn of the assistant; everything before it is read and must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petune.tasks.cells import Bad
from petune.tasks.read import kind_of
from petune.tasks.rows import Conversation, Message, Pair, Preference
from petune.tasks.turns import KEYS, conversation


def answered(where: str, prompt: object, answer: object, system: str | None, tools: object) -> Conversation:
    """The conversation of one answer: the turns of `prompt`, a text, turns or None, where `answer` does not
    begin with them itself; only its last turn is trained. Raises Bad where that is not the assistant's."""
    said = list(answer) if isinstance(answer, list | tuple) else []
    style = "sharegpt" if said and isinstance(said[0], dict) and "from" in said[0] else "messages"
    who, says = KEYS[style]
    if prompt is not None and not isinstance(prompt, str | list):
        raise Bad("the prompt is neither a text nor a list of turns", "a text, or turns", kind_of(prompt))
    before = [{who: "user", says: prompt}] if isinstance(prompt, str) else prompt or []
    heard = [turn.get(says) if isinstance(turn, dict) else None for turn in said]
    opening = (
        heard[: len(before)] if isinstance(prompt, list) else [one for one in heard if one == prompt][:1]
    )
    if opening != [turn.get(says) if isinstance(turn, dict) else None for turn in before]:
        said = [*before, *said]
    row = conversation(where, said, style, system, tools)
    if row.messages[-1].role != "assistant":
        raise Bad("an answer does not end with a turn of the assistant", "assistant", row.messages[-1].role)
    if len(row.messages) < 2:
        raise Bad(
            "an answer follows no prompt", "a column of the prompt, or its turns before the answer", None
        )
    read = (replace(turn, trained=False) for turn in row.messages[:-1])
    return replace(row, messages=(*read, row.messages[-1]))


def preference(chosen: Pair | Conversation, rejected: Pair | Conversation) -> Preference:
    """The row of two answers. Raises Bad for answers to different prompts, and for equal ones."""
    if _prompt(chosen) != _prompt(rejected):
        remedy = "make the turns before the last ones equal"
        raise Bad(
            "the two answers follow different turns", "one conversation up to its last turn", None, remedy
        )
    if _answer(chosen) == _answer(rejected):
        raise Bad("the chosen and the rejected answer are equal", "two answers", None, "drop the row")
    return Preference(chosen.where, chosen, rejected)


def _prompt(one: Pair | Conversation) -> str | Sequence[Message]:
    return one.source if isinstance(one, Pair) else one.messages[:-1]


def _answer(one: Pair | Conversation) -> str | Message:
    return one.target if isinstance(one, Pair) else one.messages[-1]
