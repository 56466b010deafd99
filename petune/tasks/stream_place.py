"""Where a stream stands: what a checkpoint keeps of it, so that a run that goes on reads none of the rows
before.

A mark is made before each window, and is JSON: the pass and the window, how far which file is read, and what
was learned of the rows up to there. It says what the rows after it follow from, and whether what was read is
what is there now: by the names and sizes of the files before, and a hash of both ends of what was read of the
last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from petune.errors import Problem
from petune.files.json_fields import (
    Digest,
    Fields,
    IntegerValue,
    ListOf,
    MapOf,
    OneOf,
    TextValue,
    Truth,
    TupleValue,
)
from petune.tasks import rows
from petune.tasks.bad_rows import Faults
from petune.tasks.configs import DataConfig
from petune.tasks.formats import ColumnLayout
from petune.tasks.lines import Cursor
from petune.tasks.row_maker import RowMaker
from petune.tasks.sources import DataSource

Mark = Mapping[str, Any]
END = 2**16  # bytes of either end of what was read of a file that are compared

_SAID = OneOf(TextValue(), None)
_PROBLEM = Fields(dict.fromkeys(("what", "where", "expected", "found", "remedy"), _SAID))
_READING = Fields(
    {
        "good": IntegerValue(),
        "cursor": Fields(
            {**dict.fromkeys(("file", "byte", "line", "held"), IntegerValue()), "whole": Truth()}
        ),
        "columns": MapOf(TextValue()),
        "began": MapOf(TupleValue(TextValue(), TextValue())),
        "bad": Fields({"count": IntegerValue(), "fatal": Truth(), "told": ListOf(_PROBLEM)}),
    }
)
MARK = Fields(
    {
        **dict.fromkeys(("place", "pass", "window", "kept"), IntegerValue()),
        "reading": OneOf(_READING, None),
        "order": Digest(),
        "read": OneOf(Digest(), None),
    }
)
START: Mark = {"place": 0, "pass": 0, "window": 0, "kept": 0, "reading": None}


class StreamReading:
    """The good rows of one side of a source: from its beginning, or from where another reading stood when it
    told its `state`."""

    def __init__(
        self,
        source: DataSource,
        side: str,
        layout: ColumnLayout,
        task: str,
        config: DataConfig,
        state: Mark | None = None,
    ) -> None:
        self.source, self.side, self.window = source, side, config.window
        self.faults, self.cursor, self.good = Faults(skip=config.on_bad_line == "skip"), Cursor(), 0
        self.make = RowMaker(layout, task, self.faults)
        if state is not None:
            self.good, self.cursor = state["good"], Cursor(**state["cursor"])
            self.make.columns = dict(state["columns"])
            self.make.began = {name: (kind, where) for name, (kind, where) in state["began"].items()}
            bad = state["bad"]
            self.faults.count, self.faults.fatal = bad["count"], bad["fatal"]
            self.faults.told = [Problem(**problem) for problem in bad["told"]]

    def __iter__(self) -> Iterator[rows.Row]:
        """Bad rows are told after as many good ones as a window has, and at the end; raises DataError then,
        as `Faults.settle`."""
        self._settle_window()
        for record in self.source.records(self.side, self.faults, cursor=self.cursor):
            row = self.make(record)
            if self.faults.count and not self.faults.skip:
                self.faults.settle(self.good)
            if row is None:
                continue
            self.good += 1
            yield row
            self._settle_window()
        self.faults.settle(self.good)

    def _settle_window(self) -> None:
        if self.good % self.window == 0:
            self.faults.settle(self.good)

    def state(self) -> dict[str, Any]:
        """Where it stands, behind the last row that it gave, as JSON."""
        faults = self.faults
        return {
            "good": self.good,
            "cursor": asdict(self.cursor),
            "columns": dict(self.make.columns),
            "began": {name: list(began) for name, began in self.make.began.items()},
            "bad": {
                "count": faults.count,
                "fatal": faults.fatal,
                "told": [asdict(problem) for problem in faults.told],
            },
        }


def fingerprint(source: DataSource, mark: Mark) -> str | None:
    """A hash of what was read before a mark, as it is now: names and sizes of the files before the last one,
    and both ends of what was read of that. None where there is no such file, or it is shorter."""
    if mark["reading"] is None:
        return None
    at = Cursor(**mark["reading"]["cursor"])
    if at.file >= len(source.train):
        return None
    try:
        before = [(path.name, path.stat().st_size) for path in source.train[: at.file]]
        ends = _ends(source.train[at.file], at.byte)
    except OSError:  # whoever reads the rows says so
        return None
    known = json.dumps([before, source.train[at.file].name]).encode()
    return None if ends is None else hashlib.sha256(known + ends).hexdigest()


def _ends(path: Path, size: int) -> bytes | None:
    """Both ends of the first `size` bytes of a file; None where it has fewer."""
    with path.open("rb") as file:
        head = file.read(min(size, END))
        file.seek(max(0, size - END))
        tail = file.read(min(size, END))
    return head + tail if len(tail) == min(size, END) else None
