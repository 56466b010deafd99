"""Formats: which columns play which role, found from their names, whose case does not matter.

Detection takes the most telling format that the task can use and says what it chose; where two readings are
possible it is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from petune.errors import DataError, Problem, UsageError, did_you_mean, nearest
from petune.tasks.configs import FORMATS, ROLES
from petune.tasks.lines import RowRecord
from petune.tasks.media import FORMAT_OF
from petune.tasks.read import kind_of

USUAL: dict[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "content", "document", "review", "sentence1", "premise", "question1"),
    "text_pair": ("text_pair", "sentence2", "hypothesis", "question2", "text2"),
    "label": ("label", "labels", "class", "category", "kind", "sentiment"),
    "tokens": ("tokens", "words"),
    "tags": ("ner_tags", "tags", "labels", "pos_tags", "chunk_tags"),
    "source": ("source", "prompt", "question", "src", "article", "dialogue", "input", "document"),
    "target": ("target", "completion", "response", "answer", "tgt", "summary", "highlights", "output"),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output",),
    "messages": ("messages", "conversations", "conversation"),
    "system": ("system", "system_prompt"),
    "history": ("history",),
    "tools": ("tools",),
    "prompt": ("prompt", "question", "query", "instruction", "input"),
    "chosen": ("chosen", "chosen_response", "preferred", "better"),
    "rejected": ("rejected", "rejected_response", "dispreferred", "worse"),
    "completion": ("completion", "response", "answer", "output"),
    "anchor": ("anchor", "query", "text1", "sentence1", "question"),
    "positive": ("positive", "pos", "text2", "sentence2", "document", "answer", "passage"),
    "negative": ("negative", "neg", "negatives", "hard_negative"),
    "query": ("query", "question", "text1", "sentence1"),
    "passage": ("passage", "document", "text2", "sentence2", "answer", "text"),
    "image": ("image", "picture", "photo", "img", "file_name"),
    "audio": ("audio", "sound", "speech", "recording"),
    "transcript": ("transcript", "transcription", "text", "sentence"),
}
NEEDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("messages",),
    "alpaca": ("instruction", "output"),
    "text-label": ("text", "label"),
    "tokens": ("tokens", "tags"),
    "pairs": ("source", "target"),
    "preferences": ("prompt", "chosen", "rejected"),
    "preference-turns": ("chosen", "rejected"),
    "judgements": ("prompt", "completion", "label"),
    "passages": ("query", "passage", "label"),
    "anchors": ("anchor", "positive"),
    "image-label": ("image", "label"),
    "audio-text": ("audio", "transcript"),
    "text": ("text",),
}
OF_CHAT = ("system", "history", "tools")  # what only a conversation has a place for
MAY: dict[str, tuple[str, ...]] = {
    "messages": ("system", "tools"),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", *OF_CHAT),
    "text-label": ("text_pair",),
    "pairs": OF_CHAT,
    "preferences": ("system",),
    "anchors": ("negative",),
    "preference-turns": ("prompt", "system", "tools"),
}
TASK_FORMATS: dict[str, tuple[str, ...]] = {
    "classify": ("text-label", "image-label"),
    "tokens": ("tokens",),
    "mlm": ("text",),
    "seq2seq": ("alpaca", "pairs", "audio-text"),
    "causal": ("alpaca", "pairs", "text"),
    "chat": ("messages", "sharegpt", "alpaca", "pairs"),
    "prefer": ("preferences", "preference-turns", "judgements"),
    "embed": ("anchors",),
    "rerank": ("passages", "anchors"),
}
# formats whose columns could be others', and which a task must ask for
ASKED = ("anchors", "passages", "judgements")
DEMO: dict[str, Mapping[str, str]] = {  # how each task reads the docstring corpus
    "classify": {"text": "text", "label": "kind"},
    "tokens": {"tokens": "tokens", "tags": "tags"},  # which load makes of the text
    "mlm": {"text": "text"},
    "seq2seq": {"source": "body", "target": "summary"},
    "causal": {"text": "text"},
    "chat": {"source": "body", "target": "summary"},
    "prefer": {"prompt": "body", "chosen": "summary", "rejected": "rejected"},  # which load makes of summary
    "embed": {"anchor": "summary", "positive": "body"},
    "rerank": {"anchor": "summary", "positive": "body", "negative": "others"},  # which load finds
}


@dataclass(frozen=True)
class ColumnLayout:
    """A format and the column that plays each of its roles."""

    format: str
    columns: Mapping[str, str]

    def __str__(self) -> str:
        return f"format {self.format}: " + ", ".join(
            f"{role} is column {name!r}" for role, name in self.columns.items()
        )


def detect(record: RowRecord, format_: str, columns: Mapping[str, str], task: str | None) -> ColumnLayout:
    """The layout of a record like this one, for `task` (None: whatever it is by itself).

    Raises UsageError for roles or formats that do not exist, DataError if a named column is missing or
    nothing fits.
    """
    for role in columns:
        if role not in ROLES:
            remedy = did_you_mean(role, ROLES)
            raise UsageError(f"data.columns.{role} is not a role", expected=", ".join(ROLES), remedy=remedy)
    for role, name in columns.items():
        if name not in record.columns:
            raise DataError([missing(record, name, f"data.columns.{role} names it")])
    wanted = TASK_FORMATS[task] if task else tuple(name for name in FORMATS if name not in ASKED)
    if format_ != "auto":
        if format_ not in wanted:
            fits = ", ".join(TASK_FORMATS[task]) if task else ", ".join(wanted)
            what, remedy = f"format {format_} does not fit task {task}", "set data.format to one of these"
            raise UsageError(what, where="data.format", expected=fits, remedy=remedy)
        wanted = (format_,)
    if preference := _preference(record, columns, task):
        raise DataError([preference])
    fitting = [
        layout
        for name in NEEDS
        if name in wanted and (layout := _fit(name, record, columns, forced=format_ != "auto"))
    ]
    if not fitting:
        raise DataError([_unfit(record, wanted, columns, task)])
    telling = [
        one
        for one in fitting
        if (one.format, fitting[0].format) not in (("pairs", "alpaca"), ("anchors", "passages"))
        and one.format != "text"
        and (one.format not in FORMAT_OF.values() or one is fitting[0])
    ]
    if len(telling) > 1:
        names = ", ".join(one.format for one in telling)
        found = ", ".join(record.columns)
        raise DataError(
            f"the columns can be read as {names}",
            where=record.where,
            found=found,
            remedy="choose: data.format, or task",
        )
    return (telling or fitting)[0]


def _fit(format_: str, record: RowRecord, given: Mapping[str, str], *, forced: bool) -> ColumnLayout | None:
    found: dict[str, str] = {}
    for role in (*NEEDS[format_], *MAY.get(format_, ())):
        if name := column_of(role, record, given):
            found[role] = name
        elif role in NEEDS[format_]:
            return None
    if not forced and any(
        isinstance(record.columns[found[role]], list) == (role == "label")
        for role in ("label", "tags")
        if role in found
    ):
        return None
    if format_.startswith("preference") and not forced:
        turns = [_turn_style(record.columns[found[role]]) is not None for role in ("chosen", "rejected")]
        if not all(turn == (format_ == "preference-turns") for turn in turns):
            return None
    if (
        format_ in ("messages", "sharegpt")
        and not forced
        and _turn_style(record.columns[found["messages"]]) != format_
    ):
        return None
    return ColumnLayout(format_, found)


def column_of(role: str, record: RowRecord, given: Mapping[str, str]) -> str | None:
    """The column of `record` that plays `role`: the one given, or one of a usual name, in any case, that is
    given no other role."""
    if role in given:
        return given[role]
    free = [name for name in record.columns if name not in given.values()]
    known = {name.casefold(): name for name in free} | {name: name for name in free}
    return next((known[usual] for usual in USUAL[role] if usual in known), None)


def _turn_style(turns: object) -> str | None:
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(first, dict):
        return None
    return "messages" if "role" in first else "sharegpt" if "from" in first else None


def missing(record: RowRecord, name: str, why: str) -> Problem:
    """The problem of a record without the column `name`, which `why` asks for."""
    found = "columns " + ", ".join(record.columns)
    remedy = did_you_mean(name, record.columns)
    return Problem(f"there is no column {name!r} ({why})", record.where, found=found, remedy=remedy)


def _preference(record: RowRecord, given: Mapping[str, str], task: str | None) -> Problem | None:
    """Refuse what says which answer is better, for tasks that would learn it as if it were one answer."""
    columns = {name.casefold(): value for name, value in record.columns.items()}
    used = {name.casefold() for name in given.values()}
    what = "these rows are preferences between answers"
    if (
        {"chosen", "rejected"} <= columns.keys()
        and not {"chosen", "rejected"} & used
        and "messages" not in columns
    ):
        if task in (None, "prefer"):
            return None
        role = "messages" if isinstance(columns["chosen"], list) else "target"
        chosen = next(name for name in record.columns if name.casefold() == "chosen")
        what = f"{what}, and task {task} learns one answer"
        remedy = f"set task: prefer; to learn the preferred answers alone: data.columns.{role}={chosen}"
    elif (
        {"prompt", "completion"} <= columns.keys()
        and str(columns.get("label")).lower() in ("true", "false")
        and not given
        and task != "prefer"
    ):
        what = f"{what} to different prompts, bad ones among them, and would be learned as if all were good"
        remedy = (
            "set task: prefer and prefer: kto; for the good answers alone keep the rows whose label is true"
        )
    else:
        return None
    return Problem(what, record.where, found="columns " + ", ".join(record.columns), remedy=remedy)


def refuse_left_label(layout: ColumnLayout, records: Sequence[RowRecord]) -> None:
    """Raise DataError for rows read as text alone that have another column with few distinct short values,
    which looks like their label."""
    text = layout.columns["text"]
    names = dict.fromkeys(name for record in records for name in record.columns if name != text)
    values = {
        name: [cell for record in records if (cell := record.columns.get(name)) not in (None, "")]
        for name in names
    }
    labels = [name for name in names if _few_and_short(values[name])]
    if not labels:
        return
    label = next((found[0] for usual in USUAL["label"] if (found := nearest(usual, labels, 1))), labels[0])
    raise DataError(
        f"the rows can be read as texts with a label or as texts alone: column {label!r} looks like a label",
        where=records[0].where,
        found=f"{len(set(values[label]))} different values in {len(records)} rows",
        remedy=(
            f"for the label: data.columns.text={text} data.columns.label={label}; for texts alone: task=mlm,"
            " or causal with a decoder"
        ),
    )


def _few_and_short(values: Sequence[object]) -> bool:
    if not all(
        isinstance(one, int) or (isinstance(one, str) and len(one) <= 40 and "\n" not in one)
        for one in values
    ):
        return False
    number = len(set(values))
    return number < len(values) and (number <= 20 or 2 * number <= len(values))


def _unfit(record: RowRecord, wanted: Sequence[str], given: Mapping[str, str], task: str | None) -> Problem:
    """What each format needs, and which column might play a role that is missing."""
    what = f"the columns do not fit task {task}" if task else "the columns fit no format"
    fits = [f"{name}: {' + '.join(NEEDS[name])}" for name in NEEDS if name in wanted]
    expected = "\n".join(["one of these", *fits]) if len(fits) > 2 else "; or ".join(fits)
    lacking = {
        name: [role for role in NEEDS[name] if column_of(role, record, given) is None] for name in wanted
    }
    taken = {column_of(role, record, given) for name in wanted for role in NEEDS[name]}
    guesses = {
        role: name for roles in lacking.values() for role in roles if (name := _like(role, record, taken))
    }
    if odd := [
        role
        for name, roles in lacking.items()
        if not roles
        for role in NEEDS[name]
        if role in ("label", "tags", "messages")
    ]:
        name = str(column_of(odd[0], record, given))
        wants = {
            "label": "the name or number of a class",
            "tags": "a list, a tag for every word",
            "messages": "a list of turns",
        }[odd[0]]
        remedy = f"write {wants} into it, or name another: data.columns.{odd[0]}=COLUMN"
        return Problem(
            f"{what}: column {name!r} is {kind_of(record.columns[name])}", record.where, wants, None, remedy
        )
    fewest = min(lacking.values(), key=lambda roles: (len(set(roles) - guesses.keys()), len(roles)))
    named = ", ".join(f"data.columns.{role}={guesses.get(role, 'NAME')}" for role in fewest)
    remedy = f"name the column of the {' and the '.join(fewest)}: {named}"
    if not all(role in guesses for role in fewest):
        remedy = (
            "say which column plays which role, as in: data.columns.text=COLUMN data.columns.label=COLUMN"
        )
    return Problem(what, record.where, expected, "columns " + ", ".join(record.columns), remedy)


def _like(role: str, record: RowRecord, taken: Collection[str | None]) -> str | None:
    """The column with values for `role` whose name is most like its usual ones, or the only column left with
    such values."""
    able = [name for name, value in record.columns.items() if name not in taken and _suits(role, value)]
    near = next((found[0] for usual in USUAL[role] if (found := nearest(usual, able, 1))), None)
    return near or (able[0] if len(able) == 1 else None)


def _suits(role: str, value: object) -> bool:
    """Whether a cell could be of the role, by its type."""
    if role == "messages":
        return isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if role in ("tokens", "tags"):
        return isinstance(value, list) and not any(isinstance(one, list | dict) for one in value)
    if role in ("image", "audio"):
        return isinstance(value, dict | bytes) or (isinstance(value, str) and "." in value)
    return isinstance(value, str | int) if role == "label" else isinstance(value, str)
