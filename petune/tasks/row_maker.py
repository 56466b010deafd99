"""Rows: a record of a known layout becomes a row of a task.

Values are checked here: a cell that is null, empty, nan or of another type than before is named with its
line. A column that only some records have is found in the first that has it, and one that plays no role is
remembered, for the run to say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from petune.errors import Problem
from petune.tasks.bad_rows import Faults
from petune.tasks.cells import FILL, Bad, clean
from petune.tasks.formats import MAY, NEEDS, OF_CHAT, ColumnLayout, column_of, missing
from petune.tasks.lines import RowRecord
from petune.tasks.media import Media, other_rate, refuse_other
from petune.tasks.preferences import answered, preference
from petune.tasks.read import kind_of
from petune.tasks.rows import (
    Anchored,
    Conversation,
    Labelled,
    Message,
    Pair,
    Pictured,
    Rated,
    Row,
    Spoken,
    Tagged,
    Text,
)
from petune.tasks.turns import conversation, schemas

ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the"
    " request.\n\n### Instruction:\n{instruction}{input}\n\n### Response:"
)

RELEVANCE = {  # what a label may be, as Python writes it
    **dict.fromkeys(("1", "1.0", "True", "true"), "1"),
    **dict.fromkeys(("0", "0.0", "False", "false"), "0"),
}


class RowMaker:
    """Turns records of one layout into rows of one task, remembering the type each column began with.

    rate: samples a second that sounds must have; None: any."""

    def __init__(
        self,
        layout: ColumnLayout,
        task: str,
        faults: Faults,
        *,
        drop_empty: bool = False,
        rate: int | None = None,
    ) -> None:
        self.format, self.task, self.faults, self.drop_empty = layout.format, task, faults, drop_empty
        self.rate = rate
        self.columns = dict(layout.columns)
        self.seen: dict[str, None] = {}
        self.began: dict[str, tuple[str, str]] = {}
        self.dropped = 0
        self.make: Callable[[RowRecord], Row] = {
            "text-label": self._labelled,
            "image-label": self._pictured,
            "audio-text": self._spoken,
            "tokens": self._tagged,
            "pairs": self._pair,
            "alpaca": self._alpaca,
            "messages": self._conversation,
            "sharegpt": self._conversation,
            "preferences": self._preference,
            "preference-turns": self._preferred_turns,
            "judgements": self._rated,
            "anchors": self._anchored,
            "passages": self._judged,
            "text": lambda record: Text(record.where, self._text(record, "text")),
        }[layout.format]

    @property
    def layout(self) -> ColumnLayout:
        """The layout with what later records had besides the first."""
        return ColumnLayout(self.format, self.columns)

    @property
    def unused(self) -> list[str]:
        """The columns that play no role."""
        return [name for name in self.seen if name not in self.columns.values()]

    def __call__(self, record: RowRecord) -> Row | None:
        """The row, or None for one that is bad (told to faults) or dropped (counted)."""
        self.seen |= dict.fromkeys(record.columns)
        needed = [self.columns[role] for role in NEEDS[self.format]]
        for name in needed:
            if name not in record.columns:
                self.faults.add(missing(record, name, "the rows before have it"))
                return None
        if self.drop_empty and any(record.columns[name] in (None, "") for name in needed):
            self.dropped += 1
            return None
        for role in MAY.get(self.format, ()):
            if role not in self.columns and (found := column_of(role, record, self.columns)):
                self.columns[role] = found
        try:
            return self.make(record)
        except Bad as bad:
            self.faults.add(Problem(str(bad.args[0]), record.where, *bad.args[1:]))
            return None

    def _cell(self, record: RowRecord, role: str) -> Any:
        """The value, of the same JSON type as in the rows before."""
        name = self.columns[role]
        value = record.columns[name]
        if value is None:
            raise Bad(f"column {name!r} is null or empty", None, None, FILL)
        if isinstance(value, float) and math.isnan(value):
            raise Bad(f"column {name!r} is nan", None, None, FILL)
        found = kind_of(value)
        kind, where = self.began.setdefault(name, (found, record.where))
        if found != kind:
            raise Bad(f"column {name!r} changes its type", f"{kind} as at {where}", found)
        return value

    def _text(self, record: RowRecord, role: str, *, may_be_empty: bool = False) -> str:
        return clean(self._cell(record, role), f"column {self.columns[role]!r}", may_be_empty=may_be_empty)

    def _given(self, record: RowRecord, role: str) -> bool:
        """Whether the record says anything in an optional role."""
        return record.columns.get(self.columns.get(role, "")) not in (None, "", [])

    def _optional(self, record: RowRecord, role: str) -> str | None:
        return self._text(record, role, may_be_empty=True) or None if self._given(record, role) else None

    def _labelled(self, record: RowRecord) -> Row:
        label = self._label(record)
        return Labelled(record.where, self._text(record, "text"), self._optional(record, "text_pair"), label)

    def _pictured(self, record: RowRecord) -> Row:
        return Pictured(record.where, self._media(record, "image", "picture"), self._label(record))

    def _spoken(self, record: RowRecord) -> Row:
        return Spoken(record.where, self._media(record, "audio", "sound"), self._text(record, "transcript"))

    def _media(self, record: RowRecord, role: Literal["image", "audio"], called: str) -> Media:
        """The picture or sound that a cell is, or whose path it holds, from the folder of the row's file, or
        from the working directory."""
        name, base = self.columns[role], record.folder or Path()
        value, what = record.columns[name], f"column {name!r}"
        if isinstance(value, dict):  # as datasets writes it
            value = value.get("bytes") or value.get("path")
        if value in (None, "", b""):
            raise Bad(f"{what} is null or empty", None, None, FILL)
        if not isinstance(value, str | bytes):
            raise Bad(f"{what} is {kind_of(value)}", f"the path of a {called}, or its bytes", kind_of(value))
        try:
            media = Media.of(value) if isinstance(value, bytes) else Media.at(base / Path(value).expanduser())
            sound = refuse_other(media, role)
        except OSError as error:
            raise Bad(f"{what}: {error.strerror or error}", f"the path of a {called}", str(value)) from error
        except ValueError as error:
            raise Bad(
                f"{what} is no {called}: {error}", None, str(media), "mend the file, or delete the row"
            ) from error
        if sound is not None and self.rate not in (None, sound.rate):
            (other,) = other_rate(sound.rate, self.rate or 0, record.where).problems
            raise Bad(other.what, other.expected, other.found, other.remedy)
        return media

    def _label(self, record: RowRecord) -> str:
        """The name of the class."""
        value, name = self._cell(record, "label"), self.columns["label"]
        if isinstance(value, float) and not value.is_integer():
            raise Bad(
                f"column {name!r} is a number with a fraction", "the name or number of a class", repr(value)
            )
        if not isinstance(value, str | int | float):
            raise Bad(f"column {name!r} is {kind_of(value)}", "the name or number of a class", kind_of(value))
        label = str(int(value) if isinstance(value, float) else value).strip()
        label = label.lower() if isinstance(value, bool) else label
        if not label:
            raise Bad(f"column {name!r} is empty", "the name of a class", None, FILL)
        if label.lower() == "nan":
            raise Bad(f"column {name!r} is nan", "the name of a class", None, FILL)
        return label

    def _tagged(self, record: RowRecord) -> Row:
        sides = {role: self._cell(record, role) for role in ("tokens", "tags")}
        for role, kind, known in (
            ("tokens", "strings", (str,)),
            ("tags", "the names or numbers of tags", (str, int)),
        ):
            name, values = self.columns[role], sides[role]
            if not isinstance(values, list) or not values:
                raise Bad(
                    f"column {name!r} has no words" if values == [] else f"column {name!r} is no list",
                    "a list",
                    kind_of(values),
                )
            if wrong := [value for value in values if type(value) not in known or value == ""]:
                raise Bad(
                    f"column {name!r} is not a list of {kind}", f"{kind}, none of them empty", repr(wrong[0])
                )
        tokens, tags = sides["tokens"], sides["tags"]
        if len(tokens) != len(tags):
            raise Bad("not as many tags as words", f"{len(tokens)} tags, one a word", str(len(tags)))
        return Tagged(
            record.where,
            tuple(clean(word, "a word", may_be_empty=True) for word in tokens),
            tuple(map(str, tags)),
        )

    def _pair(self, record: RowRecord) -> Row:
        return self._paired(record, self._text(record, "source"), self._text(record, "target"))

    def _alpaca(self, record: RowRecord) -> Row:
        instruction, given = self._text(record, "instruction"), self._optional(record, "input")
        source = (
            alpaca_prompt(instruction, given)
            if self.task == "causal"
            else "\n\n".join(part for part in (instruction, given) if part)
        )
        return self._paired(record, source, self._text(record, "output"))

    def _paired(self, record: RowRecord, source: str, target: str) -> Row:
        said = [role for role in OF_CHAT if self._given(record, role)]
        if self.task == "chat":
            turns = [*self._earlier(record), Message("user", source), Message("assistant", target)]
            opening = [Message("system", self._text(record, "system"))] if "system" in said else []
            tools = self._cell(record, "tools") if "tools" in said else None
            return Conversation(record.where, (*opening, *turns), schemas(tools))
        if said:
            name = self.columns[said[0]]
            raise Bad(
                f"task {self.task} has no place for column {name!r}",
                None,
                None,
                "set task: chat, or remove the column",
            )
        return Pair(record.where, source, target)

    def _earlier(self, record: RowRecord) -> list[Message]:
        """The turns of `history`: pairs of a question and its answer."""
        if not self._given(record, "history"):
            return []
        pairs, name = self._cell(record, "history"), f"column {self.columns['history']!r}"
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):
            raise Bad(f"{name} is not a list of pairs", '[["question", "answer"], ...]', kind_of(pairs))
        return [
            Message(role, clean(text, name))
            for pair in pairs
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]

    def _anchored(self, record: RowRecord) -> Row:
        anchor, positive = (self._text(record, role) for role in ("anchor", "positive"))
        given = self._cell(record, "negative") if self._given(record, "negative") else []
        name = f"column {self.columns['negative']!r}" if given else ""
        negatives = tuple(clean(one, name) for one in (given if isinstance(given, list) else [given]))
        if anchor == positive:
            raise Bad("anchor and positive are equal", "two texts", None, "drop the row")
        if positive in negatives:
            raise Bad("a negative is the positive", "another text", None, "drop it")
        return Anchored(record.where, anchor, positive, negatives)

    def _judged(self, record: RowRecord) -> Row:
        query, passage = (self._text(record, role) for role in ("query", "passage"))
        label = self._yes_or_no(record, "write 1 for a passage that answers its query, else 0")
        return Labelled(record.where, query, passage, label)

    def _rated(self, record: RowRecord) -> Row:
        answer = Pair(record.where, self._text(record, "prompt"), self._text(record, "completion"))
        label = self._yes_or_no(record, "write true for a good answer, else false")
        return Rated(record.where, answer, label == "1")

    def _yes_or_no(self, record: RowRecord, remedy: str) -> str:
        """The label, "1" or "0"."""
        value, name = self._cell(record, "label"), self.columns["label"]
        if str(value) not in RELEVANCE:
            raise Bad(f"column {name!r} says neither yes nor no", "0, 1, true or false", repr(value), remedy)
        return RELEVANCE[str(value)]

    def _preference(self, record: RowRecord) -> Row:
        if self._given(record, "system"):
            remedy = "write rows of turns, or remove the column"
            raise Bad(f"column {self.columns['system']!r} has no place beside texts", None, None, remedy)
        prompt = self._text(record, "prompt")
        answers = [Pair(record.where, prompt, self._text(record, role)) for role in ("chosen", "rejected")]
        return preference(*answers)

    def _preferred_turns(self, record: RowRecord) -> Row:
        prompt = self._cell(record, "prompt") if self._given(record, "prompt") else None
        system = self._optional(record, "system")
        tools = record.columns[self.columns["tools"]] if self._given(record, "tools") else None
        sides = [self._cell(record, role) for role in ("chosen", "rejected")]
        return preference(*(answered(record.where, prompt, side, system, tools) for side in sides))

    def _conversation(self, record: RowRecord) -> Row:
        tools = record.columns[self.columns["tools"]] if self._given(record, "tools") else None
        return conversation(
            record.where, self._cell(record, "messages"), self.format, self._optional(record, "system"), tools
        )


def alpaca_prompt(instruction: str, given: str | None) -> str:
    """The prompt of the Alpaca format, up to and with '### Response:'."""
    paired = ", paired with an input that provides further context" if given else ""
    return ALPACA.format(
        paired=paired, instruction=instruction, input=f"\n\n### Input:\n{given}" if given else ""
    )
