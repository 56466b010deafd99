"""Plain text: a row per line, a whole file as one document, or sentences of words with tags, as CoNLL has
them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from petune.errors import Problem
from petune.tasks.bad_rows import Faults
from petune.tasks.lines import Cursor, Line, RowRecord, lines, shown, whole_text

TAG = re.compile(r"O|[BIESLU]-\S+")
DOCSTART = "-DOCSTART-"


def is_conll(path: Path) -> bool:
    """Whether a text file has a word and its tag in every one of its first lines."""
    with path.open("rb") as file:
        head = [line.decode("utf-8", "replace").split() for line in file.readlines(4096)]
    cells = [line for line in head[:200] if line and line[0] != DOCSTART]
    return bool(cells) and all(len(line) > 1 and TAG.fullmatch(line[-1]) for line in cells)


def _lines(path: Path, faults: Faults, cursor: Cursor) -> Iterator[Line]:
    """`lines`; a file whose line ends are carriage returns alone, which would be one line, is a fault."""
    for line in lines(path, faults, cursor):
        if line.number > 1 or line.ended or "\r" not in line.text:
            yield line
            continue
        what, found = "this file has no line ends but carriage returns", f"{line.text.count(chr(13))} of them"
        remedy = r"save it with other line ends: tr '\r' '\n' < OLD > NEW"
        faults.add(Problem(what, shown(path), r"lines that end in \n or \r\n", found, remedy), fatal=True)


def read_conll(path: Path, faults: Faults, cursor: Cursor) -> Iterator[RowRecord]:
    """Sentences of lines `word ... tag` between blank ones, cells parted by tabs or else by spaces; the place
    is a sentence's first line.

    The first cell is column "tokens", the last "tags", those between "column 2" and so on. Lines of
    -DOCSTART- are passed over.
    """
    cursor.whole, name, width = True, shown(path), 0
    sentence: list[list[str]] = []
    first = 0
    for line in (*_lines(path, faults, Cursor()), Line(0, "", True)):
        parts = line.text.rstrip().split("\t" if "\t" in line.text else None)
        cells = [cell.strip() for cell in parts]
        if not line.text.strip() or cells[0] == DOCSTART:
            if sentence:
                columns = ("tokens", *(f"column {number}" for number in range(2, width)), "tags")
                yield RowRecord(
                    f"{name}:{first}",
                    {
                        column: list(cells)
                        for column, cells in zip(columns, zip(*sentence, strict=True), strict=True)
                    },
                )
            sentence = []
            continue
        width = width or len(cells)
        if len(cells) < 2 or len(cells) != width:
            expected = f"{width} cells, as before" if width > 1 else "a word and its tag"
            faults.add(
                Problem(
                    "a line of another width",
                    f"{name}:{line.number}",
                    expected,
                    f"{len(cells)} cell{'s' * (len(cells) > 1)}",
                )
            )
            width = width if width > 1 else 0
            continue
        first = first if sentence else line.number
        sentence.append(cells)


def read_document(path: Path, faults: Faults, cursor: Cursor) -> Iterator[RowRecord]:
    """The whole of a text file as one row."""
    if (text := whole_text(path, faults, cursor)).strip():
        yield RowRecord(shown(path), {"text": text})


def read_txt(path: Path, faults: Faults, cursor: Cursor) -> Iterator[RowRecord]:
    """A row of plain text per line, or the sentences of a file of words with tags."""
    if is_conll(path):
        yield from read_conll(path, faults, cursor)
        return
    name = shown(path)
    for line in _lines(path, faults, cursor):
        if line.text.strip():
            yield RowRecord(f"{name}:{line.number}", {"text": line.text})
        else:
            faults.blanks += 1
