"""Rows given from Python: a list of mappings, a datasets.Dataset or a pandas.DataFrame, or a mapping of
splits to these (DatasetDict).

Neither library is imported here: whoever gives such an object has imported its library. Values become plain
ones (numpy's and torch's scalars and arrays, tuples, missing cells of a DataFrame), so that the same rows
train alike from a file and from Python.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from petune.errors import DataError, Problem, UsageError
from petune.tasks.bad_rows import Faults
from petune.tasks.class_names import class_names, named
from petune.tasks.lines import RowRecord
from petune.tasks.media import png
from petune.tasks.read import kind_of
from petune.tasks.sounds import wav

OBJECT = "object:"  # what a recipe says in place of a path: object:CLASS@FINGERPRINT
TRAIN = ("train", "training")
HELD_OUT = ("eval", "validation", "valid", "dev")


class Table(Protocol):
    """Rows in order: a list of mappings, a datasets.Dataset or a pandas.DataFrame."""

    def __len__(self) -> int:
        """The number of rows."""

    def __getitem__(self, key: Any, /) -> Any:
        """A row, or a column."""


@dataclass(frozen=True)
class DataObject:
    """Rows given from Python. `spec` stands for them in a recipe, `name` is the argument they came by.

    `sides` holds the rows of "train" and, where the object has held-out rows, "eval", each with the words
    that name its place.
    """

    spec: str
    name: str
    sides: Mapping[str, tuple[str, Table]]

    def records(self, side: str, faults: Faults) -> Iterator[RowRecord]:
        """The records of one side; the place of a row is its Python index, `data[3]`."""
        if side not in self.sides:
            return
        name, table = self.sides[side]
        for number, row in enumerate(rows_of(table)):
            where = f"{name}[{number}]"
            if isinstance(row, dict):
                yield RowRecord(where, row)
            else:
                faults.add(
                    Problem(
                        "a row must be a mapping",
                        where,
                        expected='{"column": value, ...}',
                        found=kind_of(row),
                    )
                )


def take_rows(value: Any, name: str) -> DataObject:
    """`value`, which was given as the argument `name` ("data", "data.eval"), as rows. Raises UsageError for
    what holds no rows."""
    sides: dict[str, tuple[str, Table]] = {}
    if isinstance(value, Mapping):
        for side, known in (("train", TRAIN), ("eval", HELD_OUT)):
            split = next((one for one in known if one in value), None)
            if split is not None:
                sides[side] = (f"{name}[{split!r}]", value[split])
        if "train" not in sides:
            found = ", ".join(map(str, value)) or "an empty mapping"
            raise DataError("there is no train split", where=name, expected=" or ".join(TRAIN), found=found)
    else:
        sides["train"] = (name, value)
    digest = hashlib.sha256()
    for side, (place, table) in sides.items():
        _refuse_other(table, place)
        digest.update(f"{side} {len(table)}\n".encode())
        for row in rows_of(table):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return DataObject(f"{OBJECT}{type(value).__name__}@{digest.hexdigest()[:12]}", name, sides)


def _refuse_other(table: Any, place: str) -> None:
    """Raise UsageError unless `table` is of a kind that is read, DataError when it holds no rows."""
    if not (
        isinstance(table, list | tuple)
        or _is(table, "pandas", "DataFrame")
        or _is(table, "datasets", "Dataset")
    ):
        raise UsageError(
            "data of this kind cannot be read",
            where=place,
            expected="a path, a list of mappings, a datasets.Dataset or DatasetDict, or a pandas.DataFrame",
            found=f"{type(table).__module__}.{type(table).__name__}",
            remedy="make a list of its rows: data=[{...}, ...]",
        )
    if not len(table):
        found = f"an empty {type(table).__name__}"
        raise DataError("there are no rows", where=place, found=found, remedy="give a row at least")


def _is(value: object, package: str, kind: str) -> bool:
    """Whether `value` is of the class `kind` of a package that may not be imported here."""
    cls = getattr(sys.modules.get(package), kind, None)
    return cls is not None and isinstance(value, cls)


def rows_of(table: Any) -> Iterator[Any]:
    """The rows of a table with plain values, numbers of classes as their names. A row that is no mapping is
    passed on as it is."""
    names = class_names(table.features.to_dict()) if _is(table, "datasets", "Dataset") else {}
    if _is(table, "datasets", "Dataset"):
        table = _undecoded(table)
    if _is(table, "pandas", "DataFrame"):
        table = table.astype(object).where(table.notna(), None).to_dict("records")
    for row in table:
        plain = _plain(row)
        yield named(plain, names) if names else plain


def _undecoded(table: Any) -> Any:
    """A datasets.Dataset whose pictures and sounds are the bytes of their files."""
    import datasets

    for name, kind in table.features.items():
        if isinstance(kind, datasets.Image | datasets.Audio):
            table = table.cast_column(name, type(kind)(decode=False))
    return table


def _plain(value: Any) -> Any:
    """A value as JSON would have given it; a picture or a sound as the bytes of a file."""
    if _is(value, "PIL.Image", "Image") or _is_pixels(value):
        return png(value)
    if isinstance(value, Mapping):
        if {"array", "sampling_rate"} <= value.keys():  # a sound that datasets has decoded
            return wav(value["array"], int(value["sampling_rate"]))
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # of numpy or torch: a list, or of a scalar Python's number
    if hasattr(value, "shape") and hasattr(value, "tolist"):
        found = value.tolist()
        return _plain(found) if isinstance(found, list) else found
    return value


def _is_pixels(value: Any) -> bool:
    """Whether `value` is an array [height, width, colours] of bytes."""
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] == (3,)
