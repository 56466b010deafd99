"""What a JSON file of petune's or of peft's must hold, as tables: a field, its kind, its range, and whether
it may be left out; each kind is a `Kind`.

A table is checked before a value is used, so a file that somebody edited or damaged is an error that names
file and field.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from petune.errors import FileError, Problem

MOST = 10  # problems that are named
_REMEDY = "the file was edited or damaged: use another copy"


class Kind(Protocol):
    """What a value must be. `faults` yields (path below the value, what is expected, the value found)."""

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        """Everything in `value` that is not of this kind."""


@dataclass(frozen=True)
class IntegerValue:
    """An integer from `least` to `most`; true and false are none."""

    least: int = 0
    most: int = 2**53

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        if type(value) is not int or not self.least <= value <= self.most:
            yield "", f"a whole number from {self.least} to {self.most}", value


@dataclass(frozen=True)
class Number:
    """A finite number from `least` to `most`."""

    least: float = -1e300
    most: float = 1e300

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        good = type(value) in (int, float) and self.least <= value <= self.most  # NaN is in no range
        if not good:
            bounds = (
                "" if (self.least, self.most) == (-1e300, 1e300) else f" from {self.least:g} to {self.most:g}"
            )
            yield "", f"a finite number{bounds}", value


@dataclass(frozen=True)
class Truth:
    """true or false."""

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        if type(value) is not bool:
            yield "", "true or false", value


@dataclass(frozen=True)
class TextValue:
    """A text, one of `words` if any are given."""

    words: Collection[str] = ()

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        if not isinstance(value, str) or (self.words and value not in self.words):
            yield "", f"one of {', '.join(self.words)}" if self.words else "a text", value


@dataclass(frozen=True)
class Digest:
    """A SHA-256 in hexadecimal."""

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
            yield "", "a SHA-256, 64 hexadecimal digits", value


@dataclass(frozen=True)
class Anything:
    """A value that is checked elsewhere, or read by nobody."""

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        yield from ()


@dataclass(frozen=True)
class ListOf:
    """A list of values of one kind."""

    kind: Kind

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        if not isinstance(value, list):
            yield "", "a list", value
            return
        for at, item in enumerate(value):
            yield from _below(f"[{at}]", self.kind, item)


@dataclass(frozen=True)
class TupleValue:
    """A list with one value of each of these kinds, in their order."""

    kinds: tuple[Kind, ...]

    def __init__(self, *kinds: Kind) -> None:
        object.__setattr__(self, "kinds", kinds)

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        if not isinstance(value, list) or len(value) != len(self.kinds):
            yield "", f"a list of {len(self.kinds)}", value
            return
        for at, (kind, item) in enumerate(zip(self.kinds, value, strict=True)):
            yield from _below(f"[{at}]", kind, item)


@dataclass(frozen=True)
class MapOf:
    """An object whose values are of one kind, at least `least` of them, whatever their names; or `numbered`
    from 0."""

    kind: Kind
    least: int = 0
    numbered: bool = False

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        if not isinstance(value, dict) or len(value) < self.least:
            yield "", "an object" if not self.least else f"an object of at least {self.least}", value
            return
        if self.numbered and value.keys() != {str(at) for at in range(len(value))}:
            yield "", f"the names 0 to {len(value) - 1}", value
        for name, item in value.items():
            yield from _below(f".{name}", self.kind, item)


@dataclass(frozen=True)
class OneOf:
    """A value of the first kind that fits; None stands for null."""

    kinds: tuple[Kind | None, ...]

    def __init__(self, *kinds: Kind | None) -> None:
        object.__setattr__(self, "kinds", kinds)

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        found = [
            []
            if kind is None and value is None
            else [("", "null", value)]
            if kind is None
            else [*kind.faults(value)]
            for kind in self.kinds
        ]
        if all(found):
            # the kind that fits furthest into the value
            deepest = max(found, key=lambda faults: len(faults[0][0]))
            expected = " or ".join(faults[0][1] for faults in found)
            yield from deepest if deepest[0][0] else [("", expected, value)]


@dataclass(frozen=True)
class Fields:
    """An object with these fields, each of its own kind; those in `optional` may be absent. Others are a
    fault unless `others`."""

    fields: Mapping[str, Kind]
    optional: Mapping[str, Kind] = field(default_factory=dict)
    others: bool = False

    def faults(self, value: Any) -> Iterator[tuple[str, str, Any]]:
        if not isinstance(value, dict):
            yield "", "an object", value
            return
        for name in self.fields:
            if name not in value:
                yield f".{name}", "this field", _Absent()
        for name, item in value.items():
            kind = self.fields.get(name) or self.optional.get(name)
            if kind is not None:
                yield from _below(f".{name}", kind, item)
            elif not self.others:
                yield f".{name}", "no such field", item


def _below(place: str, kind: Kind, item: Any) -> Iterator[tuple[str, str, Any]]:
    return ((f"{place}{path}", expected, found) for path, expected, found in kind.faults(item))


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


def check_fields(value: Any, fields: Mapping[str, Kind] | Kind, file: Path, under: str = "") -> None:
    """Raise FileError naming the first ten fields of the JSON `value` of `file` that do not fit the table;
    `under`: where it stands."""
    kind = Fields(fields) if isinstance(fields, Mapping) else fields
    problems = []
    for path, expected, found in kind.faults(value):
        where = f"{file}  {(under + path).removeprefix('.') or 'the whole'}"
        problems.append(Problem("does not fit", where[:1000], expected, reprlib.repr(found), _REMEDY))
        if len(problems) == MOST:
            break
    if problems:
        raise FileError(problems)


def check_version(value: Mapping[str, Any], key: str, known: int, file: Path) -> None:
    """Raise FileError unless the version under `key` is the `known` one; that it is of a newer petune is
    said."""
    found = value.get(key)
    if type(found) is int and found == known:
        return
    if type(found) is int and found > known:
        what, remedy = "was written by a newer petune: another version", "use that petune, or a newer one"
    else:
        what, remedy = "another version", _REMEDY
    raise FileError(
        what,
        where=f"{file}  {key}",
        expected=str(known),
        found=reprlib.repr(found) if key in value else "nothing",
        remedy=remedy,
    )


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` with the SHA-256 of itself as "seal", which finds accidents and edits by hand; it is not a
    signature."""
    return {**value, "seal": _seal(value)}


def check_seal(value: Mapping[str, Any], file: Path) -> None:
    """Raise FileError for a `value` that was changed since it was sealed; one without a seal is of an older
    petune."""
    if "seal" in value and value["seal"] != _seal(
        {name: item for name, item in value.items() if name != "seal"}
    ):
        raise FileError("has been changed: its own SHA-256 does not fit", where=str(file), remedy=_REMEDY)


def _seal(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
