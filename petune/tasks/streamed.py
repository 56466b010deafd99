"""Streamed rows: read from their files as steps need them, so that they need neither fit into memory nor be
read before the first step.

What is at a place of the stream follows from the files, the settings and the seed alone: good rows come in
the order of the files, one pass after the other, in windows of `data.window` rows, each in an order of its
own. Step k takes the places from k times its rows on. So a run that goes on reads from the beginning what it
has trained on, without tokenizing it, and then sees the very next row; and replicas may be more or fewer.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from petune.errors import DataError, UsageError
from petune.tasks.bad_rows import Faults
from petune.tasks.configs import DataConfig
from petune.tasks.encode import Encoded, beyond, encode, make_coder, refuse_beyond
from petune.tasks.examples import Coder, Example, whole_tokenizer
from petune.tasks.formats import Layout, detect
from petune.tasks.objects import DataObject
from petune.tasks.registry import find_task
from petune.tasks.row_maker import RowMaker
from petune.tasks.rows import Row, RowFacts, Rows, fingerprint, identity
from petune.tasks.sources import Source, find_source, held_out_of

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
        source: Source,
        layout: Layout,
        task: str,
        coder: Coder,
        held: frozenset[str],
        seed: int,
        vocab_size: int | None = None,
    ) -> None:
        self.source, self.layout, self.task, self.coder = source, layout, find_task(task), coder
        self.config, self.held, self.seed, self.vocab_size = coder.config, held, seed, vocab_size
        self._last: tuple[tuple[int, int], list[Example]] | None = None
        self._begin()

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

    # ------------------------------------------------------------ the order

    def _begin(self) -> None:
        """Stand before the first place."""
        self._windows, self._first, self._window = self._all_windows(), 0, list[Row]()

    def _rows(self, first: int, count: int) -> list[Row]:
        """Rows at places, which come one after the other, or begin anew."""
        if first < self._first:
            self._begin()
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

    def _all_windows(self) -> Iterator[list[Row]]:
        """Pass after pass, each in windows, each in its order. Raises DataError for a pass without rows."""
        for number in itertools.count():
            rows, some = self.one_pass(), False
            for at in itertools.count():
                window = list(itertools.islice(rows, self.config.window))
                if not window:
                    break
                random.Random(f"seed {self.seed} pass {number} window {at}").shuffle(window)
                some = True
                yield window
            if not some:
                raise DataError("no row is left to train on", where=self.source.name)

    def one_pass(self) -> Iterator[Row]:
        """The good rows of one pass over the files, at most `max_rows`."""
        rows = read(self.source, "train", self.layout, self.task.name, self.config)
        return itertools.islice((row for row in rows if identity(row) not in self.held), self.config.max_rows)


def read(source: Source, side: str, layout: Layout, task: str, config: DataConfig) -> Iterator[Row]:
    """The good rows of one side. Bad ones are told after as many good ones as a window has, and at the end;
    raises DataError then, as `Faults.settle`."""
    faults = Faults(skip=config.on_bad_line == "skip")
    make, good = RowMaker(layout, task, faults), 0
    for record in source.records(side, faults):
        row = make(record)
        if faults.count and not faults.skip:
            faults.settle(good)
        if row is None:
            continue
        good += 1
        yield row
        if good % config.window == 0:
            faults.settle(good)
    faults.settle(good)


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
        raise DataError("no row is left to train on", where=source.name)
    rows = Rows(first, held, None, layout.format, (), fingerprint(first, held))
    sizes = {"model_kind": model_kind, "max_positions": max_positions, "vocab_size": vocab_size}
    encoded = encode(rows, task, tokenizer, config, **sizes)  # type: ignore[arg-type]
    notes = (str(layout), f"streamed in windows of {config.window:,} rows; {rule}")
    told = f"these figures are of the first {len(first)} rows to train on; others are read as steps need them"
    report = replace(encoded.report, notes=(told, *encoded.report.notes))
    facts = RowFacts(None, layout.format, notes, _identity_of(source, rows))
    return facts, replace(encoded, report=report, stream=stream)


def _refuse(task: str, source: Source) -> None:
    if task in NO_TASKS:
        what = f"task {task} must know its classes before the first step, and a stream does not"
        raise UsageError(what, where="data.stream", remedy="set data.stream: false")
    if not source.in_files or source.demo:
        remedy = "write the rows to files (.jsonl .csv .tsv .parquet .txt), or set data.stream: false"
        raise UsageError("only files are streamed", where="data.stream", found=source.name, remedy=remedy)


def _layout_of(source: Source, config: DataConfig, task: str) -> Layout:
    faults = Faults(skip=config.on_bad_line == "skip")
    first = next(source.records("train", faults), None)
    if first is None:
        faults.settle(0)
        raise DataError("there are no rows", where=source.name)
    return detect(first, config.format, config.columns, task)


def _held_out(
    source: Source,
    layout: Layout,
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
        return list(read(other, side, layout, task, config)), f"held-out rows are those of {other.name}"
    found: dict[str, Row] = {}
    for row in read(source, "train", layout, task, config):
        found.setdefault(identity(row), row)
        if len(found) == config.held_out:
            break
    return list(found.values()), f"held out the first {len(found):,} distinct rows, wherever they come again"


def _identity_of(source: Source, rows: Rows) -> str:
    """What a stream is known by without reading it: its files by name and size, and the rows seen so far."""
    files = [(path.name, path.stat().st_size) for path in source.train]
    return hashlib.sha256(json.dumps([files, rows.sha256]).encode()).hexdigest()
