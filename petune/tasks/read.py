"""Readers: a file becomes records (place, columns), strictly and with line numbers.

JSON is read by our own strict reader because the usual ones accept NaN, duplicate keys and half a file, or
name the wrong line. A bad line goes to `Faults` and reading goes on where it can.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from petune.errors import DataError, MachineError, Problem
from petune.log import human
from petune.tasks.bad_rows import Faults
from petune.tasks.class_names import class_names_of, named
from petune.tasks.configs import MAX_LINE_BYTES
from petune.tasks.foreign import refuse_foreign
from petune.tasks.lines import Cursor, Line, RowRecord, lines, shown, whole_text
from petune.tasks.plain_text import read_conll, read_document, read_txt


def read_file(
    path: Path, faults: Faults, *, whole: bool = False, cursor: Cursor | None = None
) -> Iterator[RowRecord]:
    """The records of one file, by its suffix, from where `cursor` stands in it; with `whole` a text file is
    one.

    Raises DataError for a file of another kind, MachineError if it cannot be opened.
    """
    suffix = path.suffix.lower()
    if suffix not in READERS:
        what = f"cannot read a {suffix or 'suffixless'} file as data"
        raise DataError(what, where=shown(path), expected=" ".join(READERS), remedy="convert it to .jsonl")
    try:
        refuse_foreign(path, shown(path))
        reader = read_document if whole and suffix == ".txt" else READERS[suffix]
        for record in reader(path, faults, cursor or Cursor()):
            yield record._replace(folder=path.parent)
    except PermissionError as error:
        raise MachineError(
            "no permission to read the data file", where=shown(path), remedy=f"chmod u+r {shown(path)}"
        ) from error
    except OSError as error:
        what, remedy = (
            f"cannot read the data file: {error.strerror or error}",
            "copy it anew, or name another",
        )
        raise MachineError(what, where=shown(path), remedy=remedy) from error


# --- JSON ---


class BadValue(ValueError):
    """Syntax that the json module lets pass and we do not."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadValue(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return row


def _no_constant(name: str) -> None:
    raise BadValue(f"{name} is not a JSON value")


DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number with a point",
    type(None): "null",
}


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    return KINDS.get(type(value), type(value).__name__)


def read_jsonl(path: Path, faults: Faults, cursor: Cursor) -> Iterator[RowRecord]:
    """One object a line; blank lines are counted."""
    name = shown(path)
    for line in lines(path, faults, cursor):
        where = f"{name}:{line.number}"
        if not line.text.strip():
            faults.blanks += 1
            continue
        try:
            value = DECODER.decode(line.text)
        except json.JSONDecodeError as error:
            what, remedy = CUT if _cut(line, error) else (f"not JSON: {error.msg}", _hint(line))
            faults.add(Problem(what, f"{where}:{error.colno}", remedy=remedy))
        except (ValueError, RecursionError) as error:
            faults.add(Problem(_said(error), where))
        else:
            if isinstance(value, dict):
                yield RowRecord(where, value)
            else:
                faults.add(
                    Problem(
                        "a row must be an object",
                        where,
                        expected='{"column": value, ...}',
                        found=kind_of(value),
                    )
                )


CUT = ("the last line is cut off", "was the file copied whole?")


def _cut(line: Line, error: json.JSONDecodeError) -> bool:
    """Whether a line that cannot be read only lacks its end: it has no line end, and more of it could have
    been JSON."""
    rest = line.text[error.pos :].rstrip()
    unfinished = (
        error.msg.startswith("Unterminated string")
        or len(rest) < 2
        or any(word.startswith(rest) for word in ("true", "false", "null"))
    )
    return not line.ended and line.text.lstrip().startswith("{") and unfinished


def _said(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the value is nested too deeply"
    return str(error) if isinstance(error, BadValue) else f"not JSON: {error}"


def _hint(line: Line) -> str | None:
    if line.number == 1 and line.text.strip() in ("{", "["):
        return "a .jsonl file has one whole object per line; name a pretty-printed array .json"
    if line.text.lstrip().startswith("{'"):
        return "JSON strings take double quotes"
    return None


def read_json(path: Path, faults: Faults, cursor: Cursor) -> Iterator[RowRecord]:
    """An array of objects, or (by its first character) lines of objects."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start != b"[":
        yield from read_jsonl(path, faults, cursor)
        return
    if text := whole_text(path, faults, cursor):
        yield from _array(path, text, faults)


def _array(path: Path, text: str, faults: Faults) -> Iterator[RowRecord]:
    """Walk the array element by element, so that each keeps its line."""
    name, position, line, seen = shown(path), text.index("[") + 1, 1, 0

    def skip(characters: str) -> str:
        nonlocal position
        while position < len(text) and text[position] in characters:
            position += 1
        return text[position : position + 1]

    while (head := skip(" \t\r\n")) != "]":
        line, seen = line + text.count("\n", seen, position), position
        where = f"{name}:{line}"
        try:
            if not head:
                raise BadValue("the array is not closed")
            value, position = DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError):
                where = f"{name}:{error.lineno}:{error.colno}"
            faults.add(Problem(_said(error), where, remedy="nothing after this place was read"), fatal=True)
            return
        if isinstance(value, dict):
            yield RowRecord(where, value)
        else:
            faults.add(Problem("a row must be an object", where, '{"column": value, ...}', kind_of(value)))
        if skip(" \t\r\n") == ",":
            position += 1
        elif text[position : position + 1] != "]":
            faults.add(
                Problem(
                    "expected , or ] after a row", f"{name}:{line + text.count(chr(10), seen, position)}"
                ),
                fatal=True,
            )
            return


# --- tables ---

AT_A_TIME = 64  # rows of a Parquet file
EMPTY_ROW = 64  # bytes that a row takes at least, for the sum
MOST_DECODED, MOST_GROWTH = 2**30, 1000  # the rows of a Parquet file may take 1 GiB and 1,000 times its size

SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}


def read_csv(path: Path, faults: Faults, cursor: Cursor) -> Iterator[RowRecord]:
    """A header and rows of as many cells; an empty cell is a missing value."""
    name, limit = shown(path), csv.field_size_limit(MAX_LINE_BYTES)  # the limit is the process', so put back
    try:
        delimiter, before = _delimiter(path), cursor.line
        header = _header_of(path, delimiter) if before else []
        reader = _cells(path, faults, cursor, delimiter)
        line = before + 1
        try:
            for cells in reader:
                where, line = f"{name}:{line}", before + reader.line_num + 1
                if not cells or cells == [""]:
                    faults.blanks += 1
                elif not header:
                    header = _header(cells, where, delimiter)
                elif len(cells) != len(header):
                    faults.add(_of_another_width(cells, header, where))
                else:
                    yield RowRecord(
                        where,
                        {column: cell if cell else None for column, cell in zip(header, cells, strict=True)},
                    )
        except csv.Error as error:
            faults.add(
                Problem(
                    f"not CSV: {error}",
                    f"{name}:{line}",
                    remedy='a cell in quotes ends with one, and a quote in it is written twice, "";'
                    " nothing after this place was read",
                ),
                fatal=True,
            )
    finally:
        csv.field_size_limit(limit)


def _delimiter(path: Path) -> str:
    """What stands between cells, by the header, to which every row is held: tabs in a .tsv, else commas, or
    the semicolons that spreadsheets write in countries whose numbers have a comma."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    found = lines(path, Faults(skip=True), Cursor(), fatal=True)
    header = next((line.text for line in found if line.text.strip()), "")
    return ";" if ";" in header and "," not in header else ","


def _cells(path: Path, faults: Faults, cursor: Cursor, delimiter: str) -> Any:
    """A reader of the csv module, over the lines of a file."""
    found = lines(path, faults, cursor, fatal=True)
    return csv.reader((line.text + "\n" for line in found), delimiter=delimiter, strict=True)


def _header_of(path: Path, delimiter: str) -> list[str]:
    """The names of the columns of a file that was entered in its middle; none where it has none yet."""
    first = (
        cells for cells in _cells(path, Faults(skip=True), Cursor(), delimiter) if cells not in ([], [""])
    )
    return [cell.strip() for cell in next(first, [])]


def _of_another_width(cells: Sequence[str], header: Sequence[str], where: str) -> Problem:
    """A row with too few or too many cells."""
    what, expected = "a row of another width than the header", f"{len(header)} cells"
    remedy = "quote cells that hold the separator"
    if len(cells) < len(header):
        remedy = "write the cells that are missing, or delete the row"
    return Problem(what, where, expected, str(len(cells)), remedy)


def _header(cells: list[str], where: str, delimiter: str) -> list[str]:
    header = [cell.strip() for cell in cells]
    if len(header) == 1 and (other := next((mark for mark in SEPARATORS if mark in header[0]), None)):
        expected, found = SEPARATORS.get(delimiter, repr(delimiter)), SEPARATORS[other]
        remedy = f"save it with {expected}" + (
            ", or name it .tsv" if other == "\t" else ", or name it .csv" if other == "," else ""
        )
        raise DataError(
            "the header has one column: the cells are separated by another sign",
            where=where,
            expected=expected,
            found=found,
            remedy=remedy,
        )
    for name in header:
        if not name or header.count(name) > 1:
            raise DataError(
                f"column name {name!r} appears twice" if name else "a column has no name",
                where=where,
                found=", ".join(header),
            )
    return header


def read_parquet(path: Path, faults: Faults, cursor: Cursor) -> Iterator[RowRecord]:
    """Rows of a Parquet file, class numbers named where datasets left the names; the place is the row's
    number, from 1.

    Some rows are in memory at a time. Raises DataError for a damaged file, and for one that holds far more
    than its size lets expect.
    """
    import pyarrow.parquet  # type: ignore[import-untyped]  # comes with datasets

    name, cursor.byte = shown(path), path.stat().st_size
    most = MOST_DECODED + MOST_GROWTH * cursor.byte
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = class_names_of((file.schema_arrow.metadata or {}).get(b"huggingface"))
        groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)]
        _refuse_grown(sum(group.total_byte_size for group in groups), most, path)
        for columns in _from_row(file, [group.num_rows for group in groups], cursor.line):
            cursor.line += 1
            cursor.held += EMPTY_ROW + _size(columns)
            _refuse_grown(cursor.held, most, path)
            yield RowRecord(f"{name}:{cursor.line}", named(columns, names))
    except DataError:
        raise
    except (
        Exception
    ) as error:  # pyarrow raises bare classes of its own, and OSError without a number, for damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"not a whole Parquet file: {first}", where=name, remedy="fetch or write it again"
        ) from error


def _from_row(file: Any, sizes: list[int], row: int) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file with groups of these sizes, from `row` on; groups before are not read."""
    first = 0
    while first < len(sizes) and row >= sizes[first]:
        row, first = row - sizes[first], first + 1
    groups = range(first, len(sizes))
    for batch in file.iter_batches(batch_size=AT_A_TIME, row_groups=list(groups), use_threads=False):
        yield from batch.slice(min(row, len(batch))).to_pylist()
        row = max(0, row - len(batch))


def _size(value: Any) -> int:
    """About how many bytes a value takes: the characters of its texts, and 8 for anything else."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return 8 + sum(map(_size, value))
    return 8 + sum(map(_size, value.values())) if isinstance(value, dict) else 8


def _refuse_grown(held: int, most: int, path: Path) -> None:
    """DataError for a file whose rows take more than `most` bytes."""
    if held > most:
        found = f"a file of {human(path.stat().st_size)}"
        remedy = "it is damaged or made to fill the memory; if it is meant, write it as .jsonl"
        raise DataError(
            f"the rows take more than {human(most)}", where=shown(path), found=found, remedy=remedy
        )


FileReader = Callable[[Path, Faults, Cursor], Iterator[RowRecord]]  # the rows of a file from a place on
READERS: dict[str, FileReader] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".txt": read_txt,
    **dict.fromkeys((".conll", ".bio", ".iob", ".iob2"), read_conll),
    ".parquet": read_parquet,
}
