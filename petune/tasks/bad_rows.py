"""Bad rows, gathered: the first ten are told with their place, all are counted, and skipping them has a
limit."""

from __future__ import annotations

from petune.errors import DataError, Problem
from petune.tasks.configs import MAX_BAD_SHARE

TOLD = 10


class Faults:
    """Collects the problems of one set of rows; `settle` ends the collection."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.blanks = 0  # lines passed over, which is no fault
        self.told: list[Problem] = []
        self.fatal = False

    def add(self, problem: Problem, *, fatal: bool = False) -> None:
        """One bad row; `fatal` if what follows it in the file could not be read at all, so that skipping is
        no choice."""
        self.count += 1
        self.fatal |= fatal
        if len(self.told) < TOLD:
            self.told.append(problem)

    def settle(self, good: int) -> str | None:
        """A note on what was skipped. Raises DataError with the first ten problems when skipping is not asked
        for, or went too far."""
        if not self.count:
            return None
        share = self.count / (self.count + good)
        if self.skip and not self.fatal and share <= MAX_BAD_SHARE:
            return f"skipped {self.count} bad rows ({share:.1%}), the first at {self.told[0].where}"
        problems = list(self.told)
        if self.count > TOLD:
            problems.append(Problem(f"... and {self.count - TOLD} more bad rows"))
        if self.skip and not self.fatal:
            what = f"{self.count} of {self.count + good} rows are bad: too many to skip"
            remedy = "mend or delete these rows, or name other columns: data.columns"
            problems.append(Problem(what, None, f"at most {MAX_BAD_SHARE:.0%}", f"{share:.1%}", remedy))
        raise DataError(problems)
