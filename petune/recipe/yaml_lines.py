"""Strict YAML in which every value knows its line.

Read from parser events, so depth and size are bounded before anything is built and no Python object is ever
made from a tag. Plain words mean what YAML 1.2 says (`1e-4` is a number; `no`, `on` and `12:30` are text).
Anchors, aliases, tags and repeated keys are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from petune.errors import Problem, RecipeError

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 10_000  # keeps the slowest file under a second or two; a recipe holds about fifty
MAX_PROBLEMS = 100

KeyPath = tuple[str, ...]  # a list item is named by its index, written as text

_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# more digits are read as a float: no setting takes them, and int() may refuse
_INT = re.compile(r"[-+]?[0-9]{1,300}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
# printable ASCII in lines, without ?, which only one of them ends a word of a list at, and block texts
_ALIKE = re.compile(r"([\n -=@-{}~]|(?<=[!-~])[|>])*")
_Fast = getattr(yaml, "CSafeLoader", None)
_HINTS = {
    "mapping values are not allowed here": (
        "a ': ' inside a text? put the text in quotes. Else check the indentation"
    ),
    "could not find expected ':'": "write 'key: value', with a space after the colon",
    "found unexpected end of stream": "a quote or bracket is not closed",
}


@dataclass
class YamlDocument:
    """What a file says. `lines` and `problems` count lines from 1; `refused` are the paths whose value could
    not be taken."""

    tree: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    refused: set[KeyPath] = field(default_factory=set)


def scalar(text: str) -> bool | int | float | str | None:
    """What an unquoted word means: the YAML 1.2 core rules, decimal numbers only."""
    if text in _NULLS:
        return None
    if text in _TRUTH:
        return _TRUTH[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def dotted(path: KeyPath) -> str:
    """`("method", "targets", "1")` as a reader writes it: `method.targets[1]`."""
    shown = [short(part, 60) for part in path]
    return "".join(
        f"[{part}]" if part.isdigit() and index else ("." if index else "") + part
        for index, part in enumerate(shown)
    )


def short(text: str, limit: int = 80) -> str:
    """`text` on one printable line of at most `limit` characters."""
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def decode(data: bytes, name: str) -> str:
    """The text of a recipe file: UTF-8 with or without BOM, any line ends.

    Raises RecipeError, with line and column, for UTF-16, NUL bytes, other encodings and files over MAX_BYTES.
    """

    def refuse(what: str, offset: int, remedy: str) -> RecipeError:
        line, column = data.count(b"\n", 0, offset) + 1, offset - data.rfind(b"\n", 0, offset)
        return RecipeError(what, where=f"{name}:{line}:{column}", remedy=remedy)

    if len(data) > MAX_BYTES:
        what, expected = "the file is too large for a recipe", f"at most {MAX_BYTES} bytes"
        raise RecipeError(what, where=f"{name}:1:1", expected=expected, remedy="is it a data file?")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise refuse("the file is UTF-16 text", 0, "save it as UTF-8")
    if b"\0" in data:
        what = "a NUL byte: this is not a text file, or it is UTF-16"
        raise refuse(what, data.index(b"\0"), "save the recipe as UTF-8 text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts from after the BOM
        offset = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        what = f"byte 0x{data[offset]:02x} is not UTF-8 text"
        raise refuse(what, offset, "save the file as UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read(data: bytes | str, name: str) -> YamlDocument:
    """Read one YAML document. `name` stands for the file in messages.

    Raises RecipeError for what leaves no structure to look at (encoding, syntax, depth, size); what can be
    passed over (a repeated key, an anchor, a tag) is collected in `problems`, so that a reader of the tree
    can report everything at once.
    """
    text = decode(data, name) if isinstance(data, bytes) else data
    return _read_fast(text, name) or _read(text, name)


def _read_fast(text: str, name: str) -> YamlDocument | None:
    """What libyaml reads in a tenth of the time; None where it is not there, or where it may not read or
    place a text as PyYAML's own parser does, which alone tells of problems."""
    if _Fast is None or not _ALIKE.fullmatch(text):
        return None
    builder = _Builder(name)
    try:
        for event in _events(_Fast(text)):
            builder.take(event)
    except (yaml.YAMLError, RecipeError, ValueError, OverflowError):
        return None
    return None if builder.document.problems else builder.document


def _read(text: str, name: str) -> YamlDocument:
    builder = _Builder(name)
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"{name}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        what = f"the character U+{ord(text[error.position]):04X} is not allowed"
        raise RecipeError(what, where=where, remedy="delete it") from None
    try:
        for event in _events(loader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        raise RecipeError([_syntax(error, mark, text, name), *builder.document.problems]) from None
    except RecipeError:
        raise
    except (ValueError, OverflowError):  # an escape beyond Unicode, a directive with an endless number
        what = "an escape or directive YAML does not have"
        raise RecipeError(what, where=_at(name, loader.get_mark())) from None
    return builder.document


def _events(loader: Any) -> Iterator[Any]:
    while loader.check_event():
        yield loader.get_event()


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _at(name: str, mark: Any) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


def _syntax(error: yaml.MarkedYAMLError, mark: Any, text: str, name: str) -> Problem:
    line = text.split("\n")[mark.line] if mark.line <= text.count("\n") else ""
    if "\t" in line[: mark.column + 1]:
        column = line.index("\t") + 1
        return Problem(
            "a tab where YAML allows only spaces",
            f"{name}:{mark.line + 1}:{column}",
            remedy="replace the tab by spaces",
        )
    what = error.problem or error.context or "not YAML"
    return Problem(f"not YAML: {short(what)}", _at(name, mark), remedy=_HINTS.get(what))


class _Builder:
    """Turns parser events into dicts, tuples and scalars without recursion."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.document = YamlDocument()
        self.open: list[_Open] = []
        self.documents = self.values = 0

    def take(self, event: Any) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise self.stop("a second document ('---')", event, "one recipe per file")
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = self.open.pop()
            self.put(tuple(done.items) if done.mapping is None else done.mapping, done.path)
        elif isinstance(event, yaml.NodeEvent):
            self.node(event)

    def node(self, event: Any) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            raise self.stop(f"more than {MAX_VALUES} values", event, "is it a data file?")
        awaits_key = bool(self.open) and self.open[-1].mapping is not None and self.open[-1].key is None
        if awaits_key:
            self.key(event)
            return
        path = self.path(event)
        self.refuse_extras(event, path)
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if len(self.open) >= MAX_DEPTH:
                raise self.stop(f"nested deeper than {MAX_DEPTH} levels", event, "a recipe needs three")
            self.open.append(_Open(path, {} if isinstance(event, yaml.MappingStartEvent) else None))
        elif isinstance(event, yaml.ScalarEvent):
            self.text_is_storable(event, path)
            self.put(event.value if event.style else scalar(event.value), path)
        else:
            self.put(None, path)

    def key(self, event: Any) -> None:
        if not isinstance(event, yaml.ScalarEvent):
            raise self.stop("a key must be plain text", event, "write 'key: value'")
        frame = self.open[-1]
        assert frame.mapping is not None
        path = (*frame.path, event.value)
        frame.key = event.value
        self.refuse_extras(event, path)
        self.text_is_storable(event, path)
        if event.value in frame.seen:
            self.soft(
                f"{dotted(path)} is set twice",
                event,
                f"first set on line {self.document.lines.get(path, 0)}; keep one of them",
            )
            frame.repeated = True
        else:
            frame.seen.add(event.value)
            self.document.lines.setdefault(path, _line(event))

    def path(self, event: Any) -> KeyPath:
        """Where the value that starts here belongs; notes the line of a list item."""
        if not self.open:
            return ()
        frame = self.open[-1]
        if frame.mapping is None:
            path = (*frame.path, str(len(frame.items)))
            self.document.lines.setdefault(path, _line(event))
            return path
        assert frame.key is not None
        return (*frame.path, frame.key)

    def put(self, value: Any, path: KeyPath) -> None:
        if not self.open:
            self.document.tree = value
            return
        frame = self.open[-1]
        if frame.mapping is None:
            frame.items.append(value)
            return
        assert frame.key is not None
        # of a repeated key the first value stands, so that its own errors are reported too
        if not frame.repeated:
            frame.mapping[frame.key] = value
        frame.key, frame.repeated = None, False

    def refuse_extras(self, event: Any, path: KeyPath) -> None:
        if isinstance(event, yaml.AliasEvent):
            self.soft(
                f"the alias *{short(str(event.anchor), 40)}",
                event,
                "write the value out; recipes have no anchors and aliases",
                path,
            )
        elif event.anchor is not None:
            self.soft(
                f"the anchor &{short(str(event.anchor), 40)}",
                event,
                "write the value out; recipes have no anchors and aliases",
                path,
            )
        if getattr(event, "tag", None) is not None:
            self.soft(
                f"the tag {short(event.tag, 60)}",
                event,
                "a recipe holds plain values only; remove the tag",
                path,
            )

    def text_is_storable(self, event: Any, path: KeyPath) -> None:
        if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in event.value):
            self.soft(
                "an escape that is no character (NUL or half a surrogate pair)",
                event,
                "write the character itself",
                path,
            )

    def soft(self, what: str, event: Any, remedy: str, path: KeyPath | None = None) -> None:
        if len(self.document.problems) >= MAX_PROBLEMS:
            raise self.stop(f"more than {MAX_PROBLEMS} problems", event, "is it a recipe?")
        self.document.problems.append(Problem(what, _at(self.name, event.start_mark), remedy=remedy))
        if path is not None:
            self.document.refused.add(path)

    def stop(self, what: str, event: Any, remedy: str) -> RecipeError:
        return RecipeError(
            [*self.document.problems, Problem(what, _at(self.name, event.start_mark), remedy=remedy)]
        )


@dataclass
class _Open:
    """A mapping or list whose end has not been read; `mapping` is None for a list."""

    path: KeyPath
    mapping: dict[str, Any] | None
    items: list[Any] = field(default_factory=list)
    key: str | None = None
    seen: set[str] = field(default_factory=set)
    repeated: bool = False


def write_scalar(value: object) -> str:
    """One value in YAML that `read` gives back unchanged."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(write_scalar(item) for item in value) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{write_text(str(key))}: {write_scalar(item)}" for key, item in value.items())
            + "}"
        )
    return write_text(str(value))


_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
_PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./~@+-]*([ :][A-Za-z0-9_./~@+-]+)*")


def write_text(text: str) -> str:
    """`text` bare where it reads back as itself, else in double quotes."""
    if _PLAIN.fullmatch(text) and isinstance(scalar(text), str) and text not in ("---", "..."):
        return text
    return '"' + "".join(_escape(letter) for letter in text) + '"'


def _escape(letter: str) -> str:
    if letter in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[letter]
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
