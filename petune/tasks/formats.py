"""Formats: which columns play which role, found from their names, and a record turned into a row.

Detection takes the most telling format that the task can use and says what it chose; where two readings are possible it is an error, never
a guess. Values are checked here: a cell that is null, empty, nan or of another type than before is named with its line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from petune.errors import DataError, Problem, UsageError, nearest
from petune.tasks.configs import FORMATS, ROLES
from petune.tasks.faults import Faults
from petune.tasks.read import Record, kind_of
from petune.tasks.rows import Conversation, Labelled, Message, Pair, Row, Text

USUAL: dict[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "content", "document", "review", "sentence1", "premise", "question1"),
    "text_pair": ("text_pair", "sentence2", "hypothesis", "question2", "text2"),
    "label": ("label", "labels", "class", "category", "kind", "sentiment"),
    "source": ("source", "prompt", "question", "src", "article", "dialogue", "input"),
    "target": ("target", "completion", "response", "answer", "tgt", "summary", "highlights", "output"),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output",),
    "messages": ("messages", "conversations", "conversation"),
}
NEEDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("messages",),
    "alpaca": ("instruction", "output"),
    "text-label": ("text", "label"),
    "pairs": ("source", "target"),
    "text": ("text",),
}
MAY: dict[str, tuple[str, ...]] = {"alpaca": ("input",), "text-label": ("text_pair",)}
TASK_FORMATS: dict[str, tuple[str, ...]] = {
    "classify": ("text-label",),
    "seq2seq": ("alpaca", "pairs"),
    "causal": ("alpaca", "pairs", "text"),
    "chat": ("messages", "sharegpt", "alpaca", "pairs"),
}
DEMO: dict[str, Mapping[str, str]] = {  # how each task reads the docstring corpus
    "classify": {"text": "text", "label": "kind"},
    "seq2seq": {"source": "body", "target": "summary"},
    "causal": {"text": "text"},
    "chat": {"source": "body", "target": "summary"},
}
ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}{input}\n\n### Response:"
)


@dataclass(frozen=True)
class Layout:
    """A format and the column that plays each of its roles."""

    format: str
    columns: Mapping[str, str]

    def __str__(self) -> str:
        return f"format {self.format}: " + ", ".join(f"{role} is column {name!r}" for role, name in self.columns.items())


def detect(record: Record, format_: str, columns: Mapping[str, str], task: str | None) -> Layout:
    """The layout of a record like this one, for `task` (None: whatever it is by itself).

    Raises UsageError for roles or formats that do not exist, DataError if a named column is missing or nothing fits.
    """
    for role in columns:
        if role not in ROLES:
            near = nearest(role, ROLES)
            remedy = f"did you mean: {near[0]}" if near else None
            raise UsageError(f"data.columns.{role} is not a role", expected=", ".join(ROLES), remedy=remedy)
    for role, name in columns.items():
        if name not in record.columns:
            raise DataError([_missing(record, name, f"data.columns.{role} names it")])
    wanted = TASK_FORMATS[task] if task else FORMATS
    if format_ != "auto":
        if format_ not in wanted:
            fits = ", ".join(TASK_FORMATS[task]) if task else ", ".join(FORMATS)
            raise UsageError(f"format {format_} does not fit task {task}", expected=fits)
        wanted = (format_,)
    fitting = [layout for name in NEEDS if name in wanted and (layout := _fit(name, record, columns, forced=format_ != "auto"))]
    if not fitting:
        raise DataError([_unfit(record, wanted, columns, task)])
    telling = [one for one in fitting if one.format != "text" and not (one.format == "pairs" and fitting[0].format == "alpaca")]
    if len(telling) > 1:
        names = ", ".join(one.format for one in telling)
        found = ", ".join(record.columns)
        raise DataError(f"the columns can be read as {names}", where=record.where, found=found, remedy="choose: data.format, or task")
    return (telling or fitting)[0]


def _fit(format_: str, record: Record, given: Mapping[str, str], *, forced: bool) -> Layout | None:
    found: dict[str, str] = {}
    for role in (*NEEDS[format_], *MAY.get(format_, ())):
        name = given.get(role) or next((usual for usual in USUAL[role] if usual in record.columns and usual not in given.values()), None)
        if name:
            found[role] = name
        elif role in NEEDS[format_]:
            return None
    if format_ in ("messages", "sharegpt") and not forced and _turn_style(record.columns[found["messages"]]) != format_:
        return None
    return Layout(format_, found)


def _turn_style(turns: object) -> str | None:
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(first, dict):
        return None
    return "messages" if "role" in first else "sharegpt" if "from" in first else None


def _missing(record: Record, name: str, why: str) -> Problem:
    near = nearest(name, record.columns)
    remedy = f"did you mean: {near[0]}" if near else None
    return Problem(f"there is no column {name!r} ({why})", record.where, found="columns " + ", ".join(record.columns), remedy=remedy)


def _unfit(record: Record, wanted: Sequence[str], given: Mapping[str, str], task: str | None) -> Problem:
    """Say which role has no column, nearest name first, when the task leaves one format; else what each format needs."""
    what = f"the columns do not fit task {task}" if task else "the columns fit no format"
    expected = "; or ".join(f"{name}: {' + '.join(NEEDS[name])}" for name in NEEDS if name in wanted)
    lacking = [role for name in wanted for role in NEEDS[name] if role not in given and not set(USUAL[role]) & set(record.columns)]
    near = next(((role, found[0]) for role in lacking for usual in USUAL[role] if (found := nearest(usual, record.columns, 1))), None)
    role = near[0] if near else lacking[0] if lacking else "messages"
    name = near[1] if near else "NAME"
    remedy = f"name the column of the {role}: data.columns.{role}={name}"
    return Problem(what, record.where, expected, "columns " + ", ".join(record.columns), remedy)


# --- rows ---


class Bad(Exception):
    """A cell that cannot be used: what is wrong with it, and perhaps a remedy."""


class RowMaker:
    """Turns records of one layout into rows of one task, remembering the type each column began with."""

    def __init__(self, layout: Layout, task: str, faults: Faults, *, drop_empty: bool = False) -> None:
        self.layout, self.task, self.faults, self.drop_empty = layout, task, faults, drop_empty
        self.began: dict[str, tuple[type, str]] = {}
        self.dropped = 0
        self.make: Callable[[Record], Row] = {
            "text-label": self._labelled,
            "pairs": self._pair,
            "alpaca": self._alpaca,
            "messages": self._conversation,
            "sharegpt": self._conversation,
            "text": lambda record: Text(record.where, self._text(record, "text")),
        }[layout.format]

    def __call__(self, record: Record) -> Row | None:
        """The row, or None for one that is bad (told to faults) or dropped (counted)."""
        names = self.layout.columns
        for role in NEEDS[self.layout.format]:
            if names[role] not in record.columns:
                self.faults.add(_missing(record, names[role], "the rows before have it"))
                return None
        if self.drop_empty and any(record.columns[name] in (None, "") for name in names.values()):
            self.dropped += 1
            return None
        try:
            return self.make(record)
        except Bad as bad:
            self.faults.add(Problem(str(bad.args[0]), record.where, *bad.args[1:]))
            return None

    def _cell(self, record: Record, role: str) -> Any:
        """The value, of the same JSON type as in the rows before."""
        name = self.layout.columns[role]
        value = record.columns[name]
        if value is None:
            raise Bad(f"column {name!r} is null or empty")
        if isinstance(value, float) and math.isnan(value):
            raise Bad(f"column {name!r} is nan", None, None, "a missing value? drop the row")
        kind, where = self.began.setdefault(name, (type(value), record.where))
        if type(value) is not kind:
            raise Bad(f"column {name!r} changes its type", f"{kind_of(kind())} as at {where}", kind_of(value))
        return value

    def _text(self, record: Record, role: str, *, may_be_empty: bool = False) -> str:
        return clean(self._cell(record, role), f"column {self.layout.columns[role]!r}", may_be_empty=may_be_empty)

    def _optional(self, record: Record, role: str) -> str | None:
        name = self.layout.columns.get(role)
        if name is None or record.columns.get(name) is None:
            return None
        return self._text(record, role, may_be_empty=True) or None

    def _labelled(self, record: Record) -> Row:
        value, name = self._cell(record, "label"), self.layout.columns["label"]
        if isinstance(value, float) and not value.is_integer():
            raise Bad(f"column {name!r} is a number with a fraction", "the name or number of a class", repr(value))
        if not isinstance(value, str | int | float):
            raise Bad(f"column {name!r} is {kind_of(value)}", "the name or number of a class", kind_of(value))
        label = str(value).lower() if isinstance(value, bool) else str(int(value)) if isinstance(value, float) else str(value).strip()
        if not label:
            raise Bad(f"column {name!r} is empty", "the name of a class")
        if label.lower() == "nan":
            raise Bad(f"column {name!r} is nan", "the name of a class", None, "a missing value? drop the row")
        return Labelled(record.where, self._text(record, "text"), self._optional(record, "text_pair"), label)

    def _pair(self, record: Record) -> Row:
        return self._paired(record.where, self._text(record, "source"), self._text(record, "target"))

    def _alpaca(self, record: Record) -> Row:
        instruction, given = self._text(record, "instruction"), self._optional(record, "input")
        source = alpaca_prompt(instruction, given) if self.task == "causal" else "\n\n".join(part for part in (instruction, given) if part)
        return self._paired(record.where, source, self._text(record, "output"))

    def _paired(self, where: str, source: str, target: str) -> Row:
        if self.task == "chat":
            return Conversation(where, (Message("user", source), Message("assistant", target)))
        return Pair(where, source, target)

    def _conversation(self, record: Record) -> Row:
        turns = self._cell(record, "messages")
        if not isinstance(turns, list) or not turns:
            raise Bad("the conversation has no turns", "a list of turns", kind_of(turns))
        messages = tuple(self._turn(number, turn) for number, turn in enumerate(turns, start=1))
        if not any(message.role == "assistant" for message in messages):
            roles = ", ".join(dict.fromkeys(message.role for message in messages))
            raise Bad("no turn is the assistant's: nothing to train", "a turn of role assistant", roles)
        return Conversation(record.where, messages)

    def _turn(self, number: int, turn: object) -> Message:
        who, says = ("from", "value") if self.layout.format == "sharegpt" else ("role", "content")
        if not isinstance(turn, dict) or who not in turn or says not in turn:
            raise Bad(f"turn {number} is not a turn", f'{{"{who}": ..., "{says}": ...}}', kind_of(turn))
        role = SPEAKERS.get(str(turn[who]))
        if role is None:
            raise Bad(f"turn {number} has an unknown speaker", ", ".join(SPEAKERS), repr(turn[who]))
        if not isinstance(turn[says], str):
            raise Bad(f"turn {number}: {says} is {kind_of(turn[says])}", "a string", kind_of(turn[says]))
        return Message(role, clean(turn[says], f"turn {number}", may_be_empty=role != "assistant"))


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


def clean(value: object, name: str, *, may_be_empty: bool = False) -> str:
    """A usable text: a string, not blank, and valid Unicode (JSON can smuggle in half of a surrogate pair)."""
    if not isinstance(value, str):
        raise Bad(f"{name} is {kind_of(value)}", "a string", kind_of(value))
    if not value.strip() and not may_be_empty:
        raise Bad(f"{name} is empty")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise Bad(f"{name} holds half of a surrogate pair, which is no character")
    return value


def alpaca_prompt(instruction: str, given: str | None) -> str:
    """The prompt of the Alpaca format, up to and with '### Response:'."""
    paired = ", paired with an input that provides further context" if given else ""
    return ALPACA.format(paired=paired, instruction=instruction, input=f"\n\n### Input:\n{given}" if given else "")
