"""A row: what one line of data means to a task, and where it came from.

Ten shapes cover every format: a labelled text or picture, tagged words, a source with its target, a sound
and what is said in it, a conversation, two answers to one prompt, an answer that is good or bad, a text with
one that belongs to it, a text. `where` is for people, never part of a row's content: the fingerprint of the
same rows is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from petune.tasks.media import Media


@dataclass(frozen=True)
class Labelled:
    """A text, or a pair of texts, and the name of its class."""

    where: str
    text: str
    pair: str | None
    label: str


@dataclass(frozen=True)
class Pictured:
    """A picture and the name of its class."""

    where: str
    picture: Media
    label: str


@dataclass(frozen=True)
class Pair:
    """What is given and what is to be written."""

    where: str
    source: str
    target: str


@dataclass(frozen=True)
class Spoken:
    """A sound and what is said in it."""

    where: str
    sound: Media
    target: str


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; role is system, user, assistant or tool.

    `more` are its other fields, for the chat template alone: tool_calls, tool_call_id, reasoning_content,
    name ... `trained` is False for an assistant's turn of weight 0, which is read and not learned.
    """

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = True


@dataclass(frozen=True)
class Conversation:
    """Turns in order, at least one of them the assistant's and trained, and the tools it may call, as JSON
    schemas."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, of which `chosen` is the better one."""

    where: str
    chosen: Pair | Conversation
    rejected: Pair | Conversation


@dataclass(frozen=True)
class Rated:
    """An answer to a prompt, whether it is a good one, and the answer to another prompt."""

    where: str
    answer: Pair
    good: bool
    other: str = ""


@dataclass(frozen=True)
class Anchored:
    """A text, one that should lie near it, and others that should not."""

    where: str
    anchor: str
    positive: str
    negatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Text:
    """Text to be continued."""

    where: str
    text: str


@dataclass(frozen=True)
class Tagged:
    """Words, and the name of each one's tag."""

    where: str
    tokens: tuple[str, ...]
    tags: tuple[str, ...]


Row = Labelled | Pictured | Spoken | Tagged | Pair | Conversation | Text | Preference | Rated | Anchored


@dataclass(frozen=True)
class RowFacts:
    """What a run must know of its rows once they are tokenized; see Rows."""

    labels: tuple[str, ...] | None
    format: str
    notes: tuple[str, ...]
    sha256: str


@dataclass(frozen=True)
class Rows:
    """Every row of a run.

    `labels` are the classes or tags in the order of their ids (classify and tokens); `notes` say what was
    detected and decided.
    """

    train: list[Row]
    eval: list[Row]
    labels: tuple[str, ...] | None
    format: str
    notes: tuple[str, ...]
    sha256: str

    @property
    def facts(self) -> RowFacts:
        """All but the rows themselves."""
        return RowFacts(self.labels, self.format, self.notes, self.sha256)


def content(row: Row) -> str:
    """The row without its place, as one canonical line. Fields at their default are left out: a new one
    changes no fingerprint."""
    return json.dumps(_plain(row), ensure_ascii=True, sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Media):  # the same wherever it lies
        return value.sha256
    if is_dataclass(value):
        told = ((entry, getattr(value, entry.name)) for entry in fields(value) if entry.name != "where")
        return {entry.name: _plain(part) for entry, part in told if part != _default(entry)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return value


def _default(entry: Any) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def identity(row: Row) -> str:
    """What makes two rows the same one when held-out rows must not be among the trained: what is read, where
    that is labelled or tagged; the prompt of a preference."""
    if isinstance(row, Labelled):
        return json.dumps([row.text, row.pair])
    if isinstance(row, Pictured):
        return row.picture.sha256
    if isinstance(row, Spoken):
        return row.sound.sha256
    if isinstance(row, Tagged):
        return json.dumps(row.tokens)
    if isinstance(row, Preference):
        one = row.chosen
        return json.dumps(
            one.source if isinstance(one, Pair) else [_plain(turn) for turn in one.messages[:-1]]
        )
    if isinstance(row, Rated):
        return json.dumps(row.answer.source)
    if isinstance(row, Anchored):
        return json.dumps([row.anchor, row.positive])
    return content(row)


def fingerprint(train: list[Row], eval_: list[Row]) -> str:
    """SHA-256 of the content of all rows in order."""
    digest = hashlib.sha256()
    for side, rows in (("train", train), ("eval", eval_)):
        digest.update(f"{side} {len(rows)}\n".encode())
        for row in rows:
            digest.update(content(row).encode() + b"\n")
    return digest.hexdigest()
