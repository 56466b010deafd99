"""Regular expressions that come from a file: matched against names of modules in bounded work, whatever they
say.

Python's own matcher tries ways one after the other and may need exponentially many. It is used where a
pattern cannot have many ways; any other pattern becomes a small program that is never at one place of the
text twice, as in the BitState matcher of RE2: the same answer in at most instructions times characters steps.
What has no such program (a reference to a group) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from re import _parser as parser  # type: ignore[attr-defined]  # the one grammar of patterns
from typing import Any

from petune.errors import PetuneError

LONGEST = 10_000  # characters of a pattern
MOST_INSTRUCTIONS = 5_000
MOST_STEPS = 20_000  # of the program on one text: some milliseconds
MOST_WAYS = 50_000  # that Python's matcher may try on one text: less than a millisecond
USUAL = 128  # characters of a text; on a longer one the program is run
FLAGS = "has flags, which are not read"
TOO_DEEP = "is nested too deeply"
REMEDY = "write the modules as a list of names, or a simpler pattern"

Groups = tuple[str | None, ...]
_CATEGORIES: Mapping[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda sign: sign.isalnum() or sign == "_",
}


class Refused(ValueError):
    """A pattern that cannot be matched in bounded work; the message says why."""


class Pattern:
    """A compiled pattern. Every method raises `kind`, the error of the file it stands in, where matching
    takes too many steps."""

    def __init__(self, text: str, kind: type[PetuneError], where: str | None) -> None:
        self.text, self.kind, self.where = text, kind, where
        try:
            if len(text) > LONGEST:
                raise Refused(f"is longer than {LONGEST:,} characters")
            tree = parser.parse(text)
            self.quick = re.compile(text) if _ways(tree) <= MOST_WAYS else None
            self.program = None if self.quick else _Program(tree)
        except (re.error, OverflowError) as error:
            raise self._error(f"is not a regular expression: {error}") from None
        except (Refused, RecursionError) as error:
            raise self._error(str(error) if isinstance(error, Refused) else TOO_DEEP) from None

    def _error(self, what: str) -> PetuneError:
        shown = self.text if len(self.text) <= 80 else f"{self.text[:77]}..."
        return self.kind(f"{shown!r} {what}", where=self.where, remedy=REMEDY)

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches the whole of `name`."""
        return self._groups(name, whole=True) is not None

    def match(self, name: str) -> Groups | None:
        """The groups of a match at the beginning of `name`, from 1; None where there is none."""
        return self._groups(name, whole=False)

    def _groups(self, name: str, *, whole: bool) -> Groups | None:
        if self.quick and len(name) <= USUAL:
            found = self.quick.fullmatch(name) if whole else self.quick.match(name)
            return None if found is None else found.groups()
        try:
            self.program = self.program or _Program(parser.parse(self.text))
            return self.program.run(name, whole)
        except (Refused, RecursionError) as error:
            raise self._error(
                f"{error if isinstance(error, Refused) else TOO_DEEP}, at {name[:USUAL]!r}"
            ) from None


@lru_cache(maxsize=4096)
def compile_pattern(text: str, kind: type[PetuneError], where: str | None = None) -> Pattern:
    """The pattern `text` of a recipe (`kind` UsageError) or of somebody's file (FileError). Raises `kind`
    where it is none, or too much."""
    return Pattern(text, kind, where)


def _ways(tree: Any) -> int:
    """At most how many ways Python's matcher can take through a text of USUAL characters; more than MOST_WAYS
    for a great many.

    Raises Refused for flags: to ignore case, Python expands every range of characters.
    """
    ways = 1
    if tree.state.flags & ~re.UNICODE.value:
        raise Refused(FLAGS)
    for operation, what in tree:
        kind = str(operation)
        if kind == "BRANCH":
            ways *= sum(map(_ways, what[1]))
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, body = what
            most, inner = min(int(most), USUAL), _ways(body)
            fewest, widest = body.getwidth()
            many = inner > 1 or fewest != widest or fewest == 0
            ways *= (
                MOST_WAYS + 1 if many and most > 1 else inner + 1 if most == 1 else max(1, most - least + 1)
            )
        elif kind in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            if kind == "SUBPATTERN" and (what[1] or what[2]):
                raise Refused(FLAGS)
            ways *= _ways(what[-1])
        elif kind not in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
            return MOST_WAYS + 1
        ways = min(ways, MOST_WAYS + 1)
    return ways


class _Program:
    """Instructions of a pattern: one character, one of two ways, a jump, the end of a group, a place, a look
    around, and the end."""

    def __init__(self, tree: Any) -> None:
        self.groups = tree.state.groups
        self.code: list[tuple[str, Any, Any]] = []
        self._add(tree)
        self._put("end")

    def _put(self, kind: str, first: Any = None, second: Any = None) -> int:
        if len(self.code) >= MOST_INSTRUCTIONS:
            raise Refused("is too large, its repetitions counted")
        self.code.append((kind, first, second))
        return len(self.code) - 1

    def _add(self, tree: Any) -> None:
        for operation, what in tree:
            kind = str(operation)
            if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
                self._put("one", kind, what)
            elif kind == "AT":
                self._put("at", str(what))
            elif kind == "BRANCH":
                self._branch(what[1])
            elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
                self._repeat(*what, greedy=kind == "MAX_REPEAT")
            elif kind == "SUBPATTERN":
                self._group(what[0], what[3])
            elif kind in ("ASSERT", "ASSERT_NOT"):
                self._look(kind == "ASSERT", *what)
            else:
                raise Refused(f"holds what cannot be matched in bounded work ({kind.lower()})")

    def _branch(self, ways: list[Any]) -> None:
        ends = []
        for way in ways[:-1]:
            split = self._put("split")
            self._add(way)
            ends.append(self._put("jump"))
            self.code[split] = ("split", split + 1, len(self.code))
        self._add(ways[-1])
        for end in ends:
            self.code[end] = ("jump", len(self.code), None)

    def _repeat(self, least: int, most: int, body: Any, *, greedy: bool) -> None:
        before = len(self.code)
        for _ in range(least):
            self._add(body)
            if len(self.code) == before:
                return  # nothing, however often
        if most == parser.MAXREPEAT:
            loop = self._put("split")
            self._add(body)
            self._put("jump", loop)
            self._choose(loop, greedy)
            return
        splits = []
        for _ in range(most - least):
            splits.append(self._put("split"))
            self._add(body)
        for split in splits:
            self._choose(split, greedy)

    def _choose(self, split: int, greedy: bool) -> None:
        """Enter what follows `split`, or go on behind all there is; the greedy one tries to enter first."""
        enter, leave = split + 1, len(self.code)
        self.code[split] = ("split", enter, leave) if greedy else ("split", leave, enter)

    def _group(self, number: int | None, body: Any) -> None:
        if number is not None:
            self._put("save", 2 * number)
        self._add(body)
        if number is not None:
            self._put("save", 2 * number + 1)

    def _look(self, wanted: bool, direction: int, body: Any) -> None:
        look = self._put("look")
        self._add(body)
        self._put("end")
        back = body.getwidth()[0] if direction < 0 else 0
        self.code[look] = ("look", (wanted, back), len(self.code))

    def run(self, text: str, whole: bool) -> Groups | None:
        """The groups of a match at the beginning of `text`; None without one. Raises Refused after
        MOST_STEPS."""
        self.left, self.seen = MOST_STEPS, dict[tuple[int, int], bool]()
        marks = self._run(text, 0, 0, whole)
        if marks is None:
            return None
        pairs = [(marks[2 * number], marks[2 * number + 1]) for number in range(1, self.groups)]
        return tuple(
            text[begin:end] if begin is not None and end is not None else None for begin, end in pairs
        )

    def _run(self, text: str, start: int, at: int, whole: bool) -> tuple[int | None, ...] | None:
        """Where each group begins and ends in the first match of the instructions from `start` on at `at`;
        None without one."""
        visited: set[tuple[int, int]] = set()
        waiting: list[tuple[int, int, tuple[int | None, ...]]] = [(start, at, (None,) * (2 * self.groups))]
        while waiting:
            place, at, marks = waiting.pop()
            if (place, at) in visited:
                continue
            visited.add((place, at))
            self.left -= 1
            if self.left < 0:
                raise Refused(f"takes more than {MOST_STEPS:,} steps")
            kind, first, second = self.code[place]
            if kind == "end":
                if not whole or at == len(text):
                    return marks
            elif kind == "split":
                waiting += ((second, at, marks), (first, at, marks))
            elif kind == "jump":
                waiting.append((first, at, marks))
            elif kind == "save":
                waiting.append((place + 1, at, (*marks[:first], at, *marks[first + 1 :])))
            elif kind == "one":
                if at < len(text) and _is_one(first, second, text[at]):
                    waiting.append((place + 1, at + 1, marks))
            elif kind == "at":
                if _is_at(first, text, at):
                    waiting.append((place + 1, at, marks))
            elif self._looks(text, place, at - first[1]) is first[0]:
                waiting.append((second, at, marks))
        return None

    def _looks(self, text: str, place: int, at: int) -> bool:
        """Whether what the look at `place` is for stands at `at`; looked for once."""
        if (place, at) not in self.seen:
            self.seen[place, at] = at >= 0 and self._run(text, place + 1, at, whole=False) is not None
        return self.seen[place, at]


def _is_one(kind: str, what: Any, sign: str) -> bool:
    """Whether a character is what one item of a pattern says."""
    if kind == "ANY":
        return sign != "\n"
    if kind != "IN":
        return (ord(sign) == what) is (kind == "LITERAL")
    negated = str(what[0][0]) == "NEGATE"
    return any(_in_class(sign, part) for part in what) is not negated


def _in_class(sign: str, part: tuple[Any, Any]) -> bool:
    kind, what = str(part[0]), part[1]
    if kind == "RANGE":
        return bool(what[0] <= ord(sign) <= what[1])
    if kind == "CATEGORY":
        words = str(what).removeprefix("CATEGORY_").split("_")  # DIGIT, NOT_DIGIT
        return bool(_CATEGORIES[words[-1]](sign)) is (words[0] != "NOT")
    return kind == "LITERAL" and ord(sign) == what


def _is_at(kind: str, text: str, at: int) -> bool:
    """Whether a place of the text is what an anchor says."""
    if "BEGINNING" in kind:
        return at == 0
    if "END" in kind:
        return at == len(text) or (kind == "AT_END" and text[at:] == "\n")
    before, here = (
        bool(sign) and _CATEGORIES["WORD"](sign) for sign in (text[max(0, at - 1) : at], text[at : at + 1])
    )
    return (before is not here) is ("NON" not in kind)
