"""Streamed rows: read from their files as steps need them, so that they need neither fit into memory nor be
read before the first step.

What is at a place of the stream follows from the files, the settings and the seed alone: good rows come in
the order of the files, one pass after the other, in windows of `data.window` rows, each in an order of its
own. Step k takes the places from k times its rows on. So a run that goes on sees the very next row, and
replicas may be more or fewer. It begins at the mark of that row's window, which its checkpoint keeps; without
one it reads from the beginning what it has trained on, without tokenizing it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petune.errors import DataError, UsageError
from petune.tasks.bad_rows import Faults
from petune.tasks.configs import DataConfig
from petune.tasks.encode import Encoded, beyond, encode, make_coder, refuse_beyond
from petune.tasks.examples import Coder, Example, whole_tokenizer
from petune.tasks.formats import ColumnLayout, detect
from petune.tasks.lines import shown
from petune.tasks.objects import DataObject
from petune.tasks.registry import find_task
from petune.tasks.rows import Row, RowFacts, Rows, fingerprint, identity
from petune.tasks.sources import DataSource, find_source, first_record, held_out_of
from petune.tasks.stream_place import START, Mark, StreamReading
from petune.tasks.stream_place import fingerprint as fingerprint_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_ROWS = 100  # to train on, which are looked at before the first step
NO_TASKS = ("classify", "tokens")  # their classes are known when all rows are


class Streamed:
    """The rows to train on of a source, by their place in the stream.

    held: what identifies the rows that are held out, which are passed over.
    """

    def __init__(
        self,
        source: DataSource,
        layout: ColumnLayout,
        task: str,
        coder: Coder,
        held: frozenset[str],
        seed: int,
        vocab_size: int | None = None,
    ) -> None:
        self.source, self.layout, self.task, self.coder = source, layout, find_task(task), coder
        self.config, self.held, self.seed, self.vocab_size = coder.config, held, seed, vocab_size
        self._last: tuple[tuple[int, int], list[Example]] | None = None
        self._stand(START)

    def examples(self, first: int, count: int) -> list[Example]:
        """The examples at `count` places from `first` on. A row with nothing to train keeps its place, and
        counts for nothing.

        Raises DataError with file and line for bad rows that are met, FileError for a tokenizer of another
        model.
        """
        if self._last is None or self._last[0] != (first, count):
            with whole_tokenizer(self.coder.tokenizer):
                found = self.task.encode(self._rows(first, count), self.coder)
            refuse_beyond(beyond(found, self.vocab_size), self.vocab_size)
            self._last = (first, count), found
        return self._last[1]

    # ------------------------------------------------------------ where it stands

    def mark(self, place: int) -> Mark:
        """What `go_to` needs to find the rows from `place` on without those before, as JSON."""
        mark = next((one for one in reversed(self._marks) if one["place"] <= place), dict(START))
        if "order" not in mark:
            mark |= {"order": self._order, "read": fingerprint_of(self.source, mark)}
        return mark

    def go_to(self, place: int, mark: Mark | None) -> str | None:
        """Stand at a `mark` before the rows from `place` on; at the beginning where it does not fit, and why,
        in words."""
        unfit = self._unfit(place, mark)
        self._last = None
        self._stand(START if mark is None or unfit else mark)
        return unfit

    def _unfit(self, place: int, mark: Mark | None) -> str | None:
        if mark is None:
            return "the checkpoint does not say where they are"
        if mark["place"] > place:
            return "the checkpoint stands beyond them"
        if mark["order"] != self._order:
            return "what decides which rows come, and in which order, has changed"
        if mark["reading"] is None:
            return None
        at = mark["reading"]["cursor"]
        name = shown(self.source.train[at["file"]]) if at["file"] < len(self.source.train) else "a file"
        if at["whole"]:
            return f"{name} can only be read from its beginning"
        known = mark["read"] is not None and mark["read"] == fingerprint_of(self.source, mark)
        return None if known else f"{name}, or a file before it, is not what was read"

    @cached_property
    def _order(self) -> str:
        """What decides which rows come, and in which order, beside the files."""
        config, layout = self.config, self.layout
        held = hashlib.sha256("\n".join(sorted(self.held)).encode("utf-8", "surrogatepass")).hexdigest()
        settings = [self.task.name, self.seed, config.window, config.max_rows, config.on_bad_line]
        known = [settings, layout.format, sorted(layout.columns.items()), held]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def _stand(self, mark: Mark) -> None:
        """Stand before the window of a mark."""
        self._marks = deque([dict[str, Any](mark)])  # of every window since the rows asked for last
        self._windows, self._first, self._window = self._all_windows(mark), mark["place"], list[Row]()

    # ------------------------------------------------------------ the order

    def _rows(self, first: int, count: int) -> list[Row]:
        """Rows at places, which come one after the other, or begin anew."""
        if first < self._first:
            self._stand(START)
        while len(self._marks) > 1 and self._marks[1]["place"] <= first:
            self._marks.popleft()
        rows: list[Row] = []
        while len(rows) < count:
            place = first + len(rows)
            if place < self._first + len(self._window):
                start = place - self._first
                rows += self._window[start : start + count - len(rows)]
            else:
                self._first += len(self._window)
                self._window = next(self._windows)
        return rows

    def _all_windows(self, mark: Mark) -> Iterator[list[Row]]:
        """The windows from a mark on, pass after pass, each in its order. Raises DataError for a pass without
        rows."""
        place = mark["place"]
        while True:
            reading, number, kept = self._reading(mark["reading"]), mark["pass"], mark["kept"]
            rows = self._kept(reading, kept)
            for at in itertools.count(mark["window"]):
                window = list(itertools.islice(rows, self.config.window))
                if not window:
                    break
                random.Random(f"seed {self.seed} pass {number} window {at}").shuffle(window)
                place, kept = place + len(window), kept + len(window)
                self._marks.append(
                    {
                        "place": place,
                        "pass": number,
                        "window": at + 1,
                        "kept": kept,
                        "reading": reading.state(),
                    }
                    if len(window) == self.config.window
                    else {**START, "place": place, "pass": number + 1}
                )
                yield window
            if not kept:
                remedy = "write rows that are not held out, and whose columns are not empty"
                raise DataError("no row is left to train on", where=self.source.name, remedy=remedy)
            mark = {**START, "place": place, "pass": number + 1}

    def _reading(self, state: Mark | None = None) -> StreamReading:
        return StreamReading(self.source, "train", self.layout, self.task.name, self.config, state)

    def _kept(self, reading: StreamReading, kept: int) -> Iterator[Row]:
        """The rows of one pass that are to be trained on, at most `max_rows` with those `kept` before."""
        most = self.config.max_rows
        rows = (row for row in reading if identity(row) not in self.held)
        return itertools.islice(rows, None if most is None else max(0, most - kept))

    def one_pass(self) -> Iterator[Row]:
        """The good rows of one pass over the files, at most `max_rows`."""
        return self._kept(self._reading(), 0)


# ------------------------------------------------------------ before the first step


def stream_rows(
    config: DataConfig,
    task: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_kind: str,
    max_positions: int | None,
    vocab_size: int | None,
    seed: int,
    objects: Mapping[str, DataObject],
) -> tuple[RowFacts, Encoded]:
    """The held-out rows of a stream, tokenized, its first rows, and itself.

    Raises UsageError for a task that must know all rows and for rows that come from no file, else as
    `load_rows` and `encode`.
    """
    source = find_source(config.path, folder, objects)
    _refuse(task, source)
    layout = _layout_of(source, config, task)
    held, rule = _held_out(source, layout, task, config, folder, objects)
    coder = make_coder(tokenizer, config, max_positions=max_positions, segments=model_kind == "encoder")
    hidden = frozenset(map(identity, held))
    stream = Streamed(source, layout, task, coder, hidden, seed, vocab_size)
    first = list(itertools.islice(stream.one_pass(), FIRST_ROWS))
    if not first:
        remedy = "write rows that are not held out, and whose columns are not empty"
        raise DataError("no row is left to train on", where=source.name, remedy=remedy)
    rows = Rows(first, held, None, layout.format, (), fingerprint(first, held))
    sizes: dict[str, Any] = {
        "model_kind": model_kind,
        "max_positions": max_positions,
        "vocab_size": vocab_size,
    }
    encoded = encode(rows, task, tokenizer, config, **sizes)
    notes = (str(layout), f"streamed in windows of {config.window:,} rows; {rule}")
    told = f"these figures are of the first {len(first)} rows to train on; others are read as steps need them"
    report = replace(encoded.report, notes=(told, *encoded.report.notes))
    facts = RowFacts(None, layout.format, notes, _identity_of(source, rows))
    return facts, replace(encoded, report=report, stream=stream)


def _refuse(task: str, source: DataSource) -> None:
    if task in NO_TASKS:
        what = f"task {task} must know its classes before the first step, and a stream does not"
        raise UsageError(what, where="data.stream", remedy="set data.stream: false")
    if not source.in_files or source.demo:
        remedy = "write the rows to files (.jsonl .csv .tsv .parquet .txt), or set data.stream: false"
        raise UsageError("only files are streamed", where="data.stream", found=source.name, remedy=remedy)


def _layout_of(source: DataSource, config: DataConfig, task: str) -> ColumnLayout:
    faults = Faults(skip=config.on_bad_line == "skip")
    first = first_record(source.records("train", faults), source.name, faults)
    return detect(first, config.format, config.columns, task)


def _held_out(
    source: DataSource,
    layout: ColumnLayout,
    task: str,
    config: DataConfig,
    folder: Path,
    objects: Mapping[str, DataObject],
) -> tuple[list[Row], str]:
    """The held-out rows, and whence they are, in words: a file of their own, or the first distinct rows."""
    if config.held_out is None:
        given = held_out_of(source, config.eval, folder, objects)
        if given is None:
            remedy = "give data.eval, or data.held_out: 500"
            raise UsageError("a stream cannot hold out a share of its rows", where="data.eval", remedy=remedy)
        other, side = given
        return list(
            StreamReading(other, side, layout, task, config)
        ), f"held-out rows are those of {other.name}"
    found: dict[str, Row] = {}
    for row in StreamReading(source, "train", layout, task, config):
        found.setdefault(identity(row), row)
        if len(found) == config.held_out:
            break
    return list(found.values()), f"held out the first {len(found):,} distinct rows, wherever they come again"


def _identity_of(source: DataSource, rows: Rows) -> str:
    """What a stream is known by without reading it: its files by name and size, and the rows seen so far."""
    files = [(path.name, path.stat().st_size) for path in source.train]
    return hashlib.sha256(json.dumps([files, rows.sha256]).encode()).hexdigest()
