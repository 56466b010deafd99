"""Lines of a file and records made of them. Lines are read with a cap, so that a file without line ends costs
no memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from petune.errors import Problem
from petune.tasks.bad_rows import Faults
from petune.tasks.configs import MAX_LINE_BYTES


class RowRecord(NamedTuple):
    """One row as the file has it. folder: where that lies, from which the row's own paths start; None where
    there is no file."""

    where: str
    columns: dict[str, Any]
    folder: Path | None = None


def shown(path: Path) -> str:
    """The path as a person would type it: relative when it lies under the working directory."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class Line(NamedTuple):
    """One line without its end; `ended` is False for a last line that has none."""

    number: int
    text: str
    ended: bool


@dataclass
class Cursor:
    """How far the files of a source are read. A reader begins where it stands, and moves it behind a record
    before it gives that.

    file: which of the files. byte: what was read of it; all of a Parquet file, whose metadata are at its end.
    line: its lines, or rows of a table, before the next one. held: about how many bytes the rows before take
    that a Parquet file holds. whole: whether the file can only be read from its beginning.
    """

    file: int = 0
    byte: int = 0
    line: int = 0
    held: int = 0
    whole: bool = False

    def enter(self, file: int) -> None:
        """Stand at the beginning of a file."""
        self.file, self.byte, self.line, self.held, self.whole = file, 0, 0, 0, False


def lines(path: Path, faults: Faults, cursor: Cursor, *, fatal: bool = False) -> Iterator[Line]:
    """Decoded lines from where `cursor` stands, blank ones included. An over-long or undecodable line is a
    fault; with `fatal` it also ends the reading."""
    with path.open("rb") as file:
        name = shown(path)
        file.seek(cursor.byte)
        while raw := file.readline(MAX_LINE_BYTES + 1):
            cursor.byte += len(raw)
            cursor.line += 1
            number = cursor.line
            where = f"{name}:{number}"
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(2**20)
                    cursor.byte += len(raw)
                what = f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB"
                faults.add(
                    Problem(what, where, remedy="one row per line; is a line end missing?"), fatal=fatal
                )
            else:
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                    yield Line(number, text.rstrip("\r\n"), raw.endswith(b"\n"))
                    continue
                except UnicodeDecodeError as error:
                    what = f"byte 0x{raw[error.start]:02x} is not UTF-8"
                    faults.add(
                        Problem(what, f"{where}:{error.start + 1}", remedy="save the file as UTF-8"),
                        fatal=fatal,
                    )
            if fatal:
                return


def whole_text(path: Path, faults: Faults, cursor: Cursor) -> str:
    """All of a file that can only be read from its beginning; nothing, and a fatal fault, where it is not
    UTF-8."""
    cursor.whole = True
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what, remedy = f"byte {error.start} is not UTF-8", "save the file as UTF-8"
        faults.add(Problem(what, shown(path), remedy=remedy), fatal=True)
        return ""
