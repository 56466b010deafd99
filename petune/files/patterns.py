"""Regular expressions that come from a file: matched against names of modules in bounded time, whatever they
say.

They are matched by the package `regex`, which gives Python's answers and stops when its time is up; Python's
own matcher may need exponentially many steps, and nothing ends it. `regex` writes repetitions of a certain
number out, so that a pattern's size is counted before it is compiled. What it reads as a class of POSIX
([[:alpha:]]) or as leave to differ ((?:q){e<=1}), and Python as signs, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from re import _parser as parser  # type: ignore[attr-defined]  # the one grammar of patterns
from typing import Any

import regex

from petune.errors import PetuneError

LONGEST = 10_000  # characters of a pattern
MOST_ITEMS = 5_000  # of a pattern, its repetitions written out
MOST_S = 0.1  # of the processor, for a pattern and one name
USUAL = 128  # characters of a name that are shown
BRACE, BRACKET = ((parser.LITERAL, ord(sign)) for sign in "{[")
REMEDY = "write the modules as a list of names, or a simpler pattern"

Groups = tuple[str | None, ...]


class Refused(ValueError):
    """A pattern that cannot be matched in bounded time; the message says why."""


class Pattern:
    """A compiled pattern. Every method raises `kind`, the error of the file it stands in, where matching
    takes too long."""

    def __init__(self, text: str, kind: type[PetuneError], where: str | None) -> None:
        self.text, self.kind, self.where = text, kind, where
        try:
            self.compiled = _compiled(text)
        except (re.error, regex.error, OverflowError) as error:
            raise self._error(f"is not a regular expression: {error}") from None
        except (Refused, RecursionError) as error:
            what = str(error) if isinstance(error, Refused) else "is nested too deeply"
            raise self._error(what) from None

    def _error(self, what: str) -> PetuneError:
        shown = self.text if len(self.text) <= 80 else f"{self.text[:77]}..."
        return self.kind(f"{shown!r} {what}", where=self.where, remedy=REMEDY)

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches the whole of `name`."""
        return self._found(self.compiled.fullmatch, name) is not None

    def match(self, name: str) -> Groups | None:
        """The groups of a match at the beginning of `name`, from 1; None where there is none."""
        found = self._found(self.compiled.match, name)
        return None if found is None else found.groups()

    def _found(self, match: Callable[..., Any], name: str) -> Any:
        try:
            return match(name, timeout=MOST_S)
        except TimeoutError:
            raise self._error(f"takes more than {MOST_S:g} s, at {name[:USUAL]!r}") from None


@lru_cache(maxsize=4096)
def compile_pattern(text: str, kind: type[PetuneError], where: str | None = None) -> Pattern:
    """The pattern `text` of a recipe (`kind` UsageError) or of somebody's file (FileError). Raises `kind`
    where it is none, or too much."""
    return Pattern(text, kind, where)


def _compiled(text: str) -> Any:
    """The pattern as `regex` has it. Raises Refused for one that is too large or has flags."""
    if len(text) > LONGEST:
        raise Refused(f"is longer than {LONGEST:,} characters")
    tree = parser.parse(text)
    if tree.state.flags & ~re.UNICODE.value or any(_flags(tree)):
        raise Refused("has flags, which are not read")
    if _items(tree) > MOST_ITEMS:
        raise Refused("is too large, its repetitions counted")
    if _reads_otherwise(tree):
        raise Refused("has { as a sign, or [ within a set, which is not read")
    return regex.compile(text, regex.VERSION0)  # whatever a program has made regex's own default


def _inside(what: Any) -> Iterator[Any]:
    """The patterns that an item of a parsed pattern holds."""
    if isinstance(what, parser.SubPattern):
        yield what
    elif isinstance(what, tuple | list):
        for part in what:
            yield from _inside(part)


def _flags(tree: Any) -> Iterator[int]:
    """The flags of each group of a parsed pattern, 0 for none."""
    for operation, what in tree:
        yield from what[1:3] if operation is parser.SUBPATTERN else ()
        for inner in _inside(what):
            yield from _flags(inner)


def _reads_otherwise(tree: Any) -> bool:
    """Whether a parsed pattern has what may begin a class of POSIX or of fuzzy matching in `regex`."""
    return any(
        BRACKET in what
        if operation is parser.IN
        else (operation, what) == BRACE or any(map(_reads_otherwise, _inside(what)))
        for operation, what in tree
    )


def _items(tree: Any) -> int:
    """The items of a parsed pattern, those of a repetition as often as it may come, or, where that is without
    end, as it must."""
    found = 0
    for operation, what in tree:
        own = max(1, sum(map(_items, _inside(what))))
        if "REPEAT" in str(operation):
            own *= max(1, what[0] if what[1] is parser.MAXREPEAT else what[1])
        found += own
    return found
