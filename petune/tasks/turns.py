"""Turns: a conversation as a file has it becomes messages, with every field of a turn kept for the chat
template or refused.

`weight` says which turns of the assistant are trained, tool calls are decoded, parts of text are joined. A
field that is null is no field: a table has every column in every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petune.tasks.cells import Bad, clean, decoded
from petune.tasks.read import kind_of
from petune.tasks.rows import Conversation, Message

SPEAKERS = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}
KEYS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}  # format -> who speaks, what is said


def conversation(where: str, turns: object, format_: str, system: str | None, tools: object) -> Conversation:
    """The row of a list of turns. Raises Bad where a turn cannot be used, and where none is trained.

    `system` is the text of a column beside the turns, and becomes the first of them; `tools` a list of
    schemas, or that as JSON text.
    """
    if not isinstance(turns, list) or not turns:
        raise Bad("the conversation has no turns", "a list of turns", kind_of(turns))
    messages = tuple(_message(number, turn, *KEYS[format_]) for number, turn in enumerate(turns, start=1))
    if system is not None and messages[0].role == "system":
        raise Bad(
            "the row has two system texts",
            None,
            "one in a column of its own, one in turn 1",
            "keep one of them",
        )
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(message.role for message in messages))
        raise Bad("no turn is the assistant's: nothing to train", "a turn of role assistant", roles)
    if not any(message.trained for message in answers):
        raise Bad("every turn of the assistant has weight 0: nothing to train", None, None, "drop the row")
    opening = () if system is None else (Message("system", system),)
    return Conversation(where, (*opening, *messages), schemas(tools))


def schemas(tools: object) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row, as the chat template takes them: a list of objects, or that as JSON text. Raises
    Bad."""
    if tools is None or tools == "":
        return ()
    found = decoded(tools, "tools") if isinstance(tools, str) else tools
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise Bad(
            "tools is not a list of objects", '[{"type": "function", "function": {...}}]', kind_of(found)
        )
    return tuple(found)


def _message(number: int, turn: object, who: str, says: str) -> Message:
    if not isinstance(turn, dict) or who not in turn:
        raise Bad(f"turn {number} is not a turn", f'{{"{who}": ..., "{says}": ...}}', kind_of(turn))
    given = {name: value for name, value in turn.items() if value is not None}
    role = SPEAKERS.get(str(turn[who]))
    if role is None:
        raise Bad(f"turn {number} has an unknown speaker", ", ".join(SPEAKERS), repr(turn[who]))
    more = {name: value for name, value in given.items() if name not in (who, says, "weight")}
    if "tool_calls" in more:
        more["tool_calls"] = _calls(more["tool_calls"], number)
    if says not in given and not more.get("tool_calls"):
        raise Bad(f"turn {number} has no {says}", f'{{"{who}": ..., "{says}": ...}}', ", ".join(turn))
    words = _joined(given.get(says, ""), number, says)
    clean(words, f"turn {number}", may_be_empty=role != "assistant" or bool(more.get("tool_calls")))
    return Message(role, words, more, _trained(given.get("weight"), role, number))


def _joined(said: object, number: int, name: str) -> str:
    """What is said: a text, or parts of text joined as they stand."""
    if isinstance(said, str):
        return said
    if not isinstance(said, list) or not said:
        raise Bad(
            f"turn {number}: {name} is {kind_of(said)}", "a string, or a list of text parts", kind_of(said)
        )
    texts = []
    for part in said:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
            what = f"of type {kind!r}" if kind not in (None, "text") else f"that is {kind_of(part)}"
            raise Bad(
                f"turn {number} has a part {what}",
                '{"type": "text", "text": ...}: petune tunes on text alone',
                None,
            )
        texts.append(part["text"])
    return "".join(texts)


def _trained(weight: object, role: str, number: int) -> bool:
    """Whether the turn is trained. OpenAI's weights are 0 and 1, and stand at the assistant's turns."""
    if weight is None:
        return True
    if not isinstance(weight, bool | int | float) or weight not in (0, 1):
        raise Bad(f"turn {number}: weight is neither 0 nor 1", "0 (read, not trained) or 1", repr(weight))
    if weight and role != "assistant":
        raise Bad(
            f"turn {number}: weight 1 on a turn of the {role}",
            "only what the assistant says is trained",
            None,
            "remove the weight",
        )
    return bool(weight) or role != "assistant"


def _calls(calls: object, number: int) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, which templates write as JSON; OpenAI gives them as JSON
    text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Bad(
            f"turn {number}: tool_calls is not a list of objects",
            '[{"function": {"name": ..., "arguments": {...}}}]',
            kind_of(calls),
        )
    return [_call(call, number) for call in calls]


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    if isinstance(function := call.get("function"), dict):
        return call | {"function": _call(function, number)}
    if not isinstance(call.get("name"), str):
        raise Bad(
            f"turn {number}: a tool call has no name", '{"name": ..., "arguments": {...}}', ", ".join(call)
        )
    if isinstance(arguments := call.get("arguments"), str):
        call = call | {
            "arguments": decoded(arguments, f"turn {number}: the arguments of {call['name']}")
            if arguments.strip()
            else {}
        }
    if not isinstance(call.get("arguments", {}), dict):
        raise Bad(
            f"turn {number}: the arguments of {call['name']} are {kind_of(call['arguments'])}", "an object"
        )
    return call
