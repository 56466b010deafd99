"""What can go wrong, said so that the reader knows what to do.

Every error a user can cause is a `PetuneError`: one or more problems, each saying what is wrong, where, what
was expected against what was found, and the remedy. The class decides the exit code, so a shell script can
tell a bad recipe from a bad file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `where` is a file:line, a key path or a tensor name; what is expected may be a
    list, a line each."""

    what: str
    where: str | None = None
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.where}  {self.what}" if self.where else self.what]
        expected, found = (
            f"{label} {value}" if value else None
            for label, value in (("expected", self.expected), ("found", self.found))
        )
        if expected and "\n" in expected:
            lines += [f"   {side}" for side in (found, expected.replace("\n", "\n      ")) if side]
        elif sides := [side for side in (expected, found) if side]:
            lines.append("   " + ", ".join(sides))
        if self.remedy:
            lines.append("   " + self.remedy)
        return "\n".join(lines)


class PetuneError(Exception):
    """The base of every error petune raises on purpose; `code` is the process exit code.

        >>> try:
        ...     petune.load_recipe({"model": "my-model", "data": "rows.jsonl", "method": "lorra"})
        ... except petune.PetuneError as error:
        ...     error.code, error.problems[0].what
        (2, 'method: no such method')

    Its text is that of its problems, a line or more each.
    """

    code: ClassVar[int] = 1

    def __init__(
        self,
        what: str | Sequence[Problem],
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        remedy: str | None = None,
    ) -> None:
        if isinstance(what, str):
            what = (Problem(what, where, expected, found, remedy),)
        self.problems: tuple[Problem, ...] = tuple(what)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UsageError(PetuneError, ValueError):
    """The call, the command line or the recipe asks for something impossible."""

    code = 2


class RecipeError(UsageError):
    """A recipe file says something wrong; carries every problem found, not only the first."""


class DataError(PetuneError):
    """A data file or its rows cannot be used."""

    code = 3


class FileError(PetuneError):
    """A model, adapter or checkpoint file is missing, damaged or does not fit."""

    code = 4


class MachineError(PetuneError):
    """The machine refuses: disk, memory, device, permission, a missing optional package."""

    code = 5


class DistributedError(PetuneError):
    """A process of the group failed, or the group could not form."""

    code = 6


class TrainingFault(PetuneError):
    """Training went wrong: a non-finite value, a tensor that does not train, a frozen one that moved."""

    code = 7


class Stopped(PetuneError):
    """Stopped on request with the state saved; running again with --resume continues."""

    code = 75


def told_apart(one: str, other: str) -> tuple[str, str]:
    """Two digests that differ, as a message shows them: 16 digits, or as many as it takes to see where."""
    end = next((at for at in range(16, len(one)) if one[:at] != other[:at]), len(one))
    return f"{one[:end]}…", f"{other[:end]}…"


def nearest(name: str, valid: Iterable[str], count: int = 3) -> list[str]:
    """The `count` valid names most like `name`, best first; empty when nothing is near.

    A typing error changes a few letters, not half of them, or puts the right ones in another order.
    """
    known = list(valid)
    same_letters = [one for one in known if sorted(one) == sorted(name)]
    return list(dict.fromkeys([*same_letters, *difflib.get_close_matches(name, known, n=count, cutoff=0.7)]))[
        :count
    ]


def did_you_mean(name: str, valid: Iterable[str]) -> str | None:
    """'did you mean: ...' for the nearest valid name; None when nothing is near."""
    near = nearest(name, valid, 1)
    return f"did you mean: {near[0]}" if near else None
