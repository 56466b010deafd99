"""Examples in an Arrow table: 8 bytes a token in memory, and none of its own where the table is a mapped
file, which all processes of a host then share.

An example is made of its lists when it is asked for, and is the one that was put in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

from petune.tasks.examples import Example

AT_ONCE = 4096  # examples of a record batch
_TEXTS = b"texts"  # of an example, in the metadata of a record batch
_LISTS = ("input_ids", "token_types", "positions")  # columns of lists, of which the last two may be absent


class Examples(Sequence[Example]):
    """The examples of some record batches, in order."""

    def __init__(self, batches: Iterable[Any] = ()) -> None:
        self.batches = list(batches)
        self._columns = [_Columns(batch) for batch in self.batches]
        self._ends: list[int] = []
        for columns in self._columns:
            self._ends.append(len(self) + len(columns))

    @classmethod
    def of(cls, examples: Iterable[Example]) -> Examples:
        """A table of these examples in memory."""
        rest = iter(examples)
        return cls(map(_batch, iter(lambda: list(islice(rest, AT_ONCE)), [])))

    @classmethod
    def map(cls, path: Path) -> Examples:
        """The table in the file at `path`, mapped into memory. Raises OSError, ValueError for what is no
        table."""
        import pyarrow as pa  # type: ignore[import-untyped]  # comes with datasets

        with pa.memory_map(str(path)) as source:
            return cls(pa.ipc.open_stream(source).read_all().to_batches())

    def write(self, path: Path) -> None:
        """Write the table as a stream of record batches, which `datasets` reads too (Dataset.from_file)."""
        import pyarrow as pa

        schema = self.batches[0].schema if self.batches else pa.schema([])
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for batch in self.batches:
                stream.write_batch(batch)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return sum(batch.nbytes for batch in self.batches)

    def sizes(self) -> list[int]:
        """The number of input tokens of each example."""
        return [int(size) for columns in self._columns for size in columns.sizes()]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, at: int) -> Example: ...

    @overload
    def __getitem__(self, at: slice) -> list[Example]: ...

    def __getitem__(self, at: int | slice) -> Example | list[Example]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        batch = bisect_right(self._ends, at)
        return self._columns[batch].example(at - (self._ends[batch - 1] if batch else 0))

    def __iter__(self) -> Iterator[Example]:
        for columns in self._columns:
            yield from map(columns.example, range(len(columns)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as any class that is equal by values


class _Columns:
    """The columns of a record batch as arrays that share its memory. An example of several texts has a row
    for each of them."""

    def __init__(self, batch: Any) -> None:
        self.texts = int((batch.schema.metadata or {}).get(_TEXTS, 1))
        found = {name: batch.column(name) for name in batch.schema.names}
        self.lists = {name: _flat(found[name]) for name in (*_LISTS, "labels") if _is_list(found, name)}
        self.classes: np.ndarray | None = None if "labels" in self.lists else _numbers(found["labels"])
        self.length, self.where = _numbers(found["length"]), found["where"]
        self.has_target, self.good = found["has_target"], found.get("good")

    def __len__(self) -> int:
        return len(self.length) // self.texts

    def sizes(self) -> np.ndarray:
        """The number of input tokens of each example."""
        return np.diff(self.lists["input_ids"][1][:: self.texts])

    def example(self, at: int) -> Example:
        """The example at a place of the batch."""
        first, *others = (self._text(row) for row in range(at * self.texts, (at + 1) * self.texts))
        return replace(first, others=tuple(others)) if others else first

    def _text(self, at: int) -> Example:
        own: dict[str, Any] = {}
        for name, (values, starts) in self.lists.items():
            own[name] = values[starts[at] : starts[at + 1]].tolist()
        if self.classes is not None:
            own["labels"] = int(self.classes[at])
        facts = self.where[at].as_py(), int(self.length[at]), self.has_target[at].as_py()
        if self.good is not None:
            own["good"] = self.good[at].as_py()
        return Example(where=facts[0], length=facts[1], has_target=facts[2], **own)


def _is_list(found: dict[str, Any], name: str) -> bool:
    import pyarrow as pa

    return name in found and pa.types.is_list(found[name].type)


def _flat(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """(values of all lists, where each of them begins, and the last ends)."""
    return _numbers(column.values), _numbers(column.offsets)


def _numbers(column: Any) -> np.ndarray:
    """A column of numbers as an array that shares its memory: `to_numpy` would import pandas, see `_array`.
    Raises ValueError where one of them is unknown."""
    if column.null_count:
        raise ValueError(f"{column.null_count} numbers of a column are unknown")
    kind = np.dtype(column.type.to_pandas_dtype())  # numpy's, and without pandas
    if not len(column):  # such a column may have no memory
        return np.empty(0, kind)
    return np.frombuffer(column.buffers()[1], kind, len(column), column.offset * kind.itemsize)


def _array(kind: Any, count: int, values: Any, known: Sequence[bool] | None = None) -> Any:
    """An array of pyarrow's from memory, of so many values, of which some may be unknown: `pa.array` would
    import pandas, 0.4 s in every process, to ask whether it is given something of its."""
    import pyarrow as pa

    mask = None if known is None or all(known) else pa.py_buffer(np.packbits(known, bitorder="little"))
    return pa.Array.from_buffers(kind, count, [mask, *map(pa.py_buffer, values)])


def _batch(examples: Sequence[Example]) -> Any:
    """A record batch of examples that have the same parts, and as many texts."""
    import pyarrow as pa

    texts = len(examples[0].texts)
    assert all(len(one.texts) == texts for one in examples), "examples of one task have as many texts"
    examples = [text for one in examples for text in one.texts]

    def starts(rows: Sequence[Sequence[int] | bytes]) -> np.ndarray:
        return np.cumsum([0, *map(len, rows)], dtype=np.int32)

    def lists(rows: Sequence[Sequence[int]], kind: Any) -> Any:
        at = starts(rows)
        flat = np.fromiter((value for row in rows for value in row), dtype=kind, count=int(at[-1]))
        flat = _array(pa.from_numpy_dtype(kind), len(flat), [flat])
        return pa.ListArray.from_arrays(_array(pa.int32(), len(at), [at]), flat)

    def numbers(values: Sequence[int], kind: Any) -> Any:
        return _array(pa.from_numpy_dtype(kind), len(values), [np.array(values, kind)])

    def flags(values: Sequence[bool | None]) -> Any:
        bits = np.packbits([bool(value) for value in values], bitorder="little")
        return _array(pa.bool_(), len(values), [bits], [value is not None for value in values])

    columns = {"input_ids": lists([one.input_ids for one in examples], np.int32)}
    labels = [one.labels for one in examples]
    rows = [one for one in labels if isinstance(one, list)]
    classes = [one for one in labels if isinstance(one, int)]
    columns["labels"] = lists(rows, np.int32) if rows else numbers(classes, np.int32)
    for name, kind in (("token_types", np.int8), ("positions", np.int32)):
        if any(getattr(one, name) is not None for one in examples):
            columns[name] = lists([getattr(one, name) for one in examples], kind)
    where = [one.where.encode() for one in examples]
    columns["where"] = _array(pa.string(), len(where), [starts(where), b"".join(where)])
    columns["length"] = numbers([one.length for one in examples], np.int64)
    columns["has_target"] = flags([one.has_target for one in examples])
    if any(one.good is not None for one in examples):
        columns["good"] = flags([one.good for one in examples])
    return pa.RecordBatch.from_pydict(columns, metadata={_TEXTS: str(texts)})
