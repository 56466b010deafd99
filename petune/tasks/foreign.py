"""Files that are not what their name says: a web page, an archive, a pointer to the data."""

from __future__ import annotations

from pathlib import Path

from petune.errors import DataError

PAGE = "the download answered with a web page: fetch the file again"
FOREIGN: tuple[tuple[bytes, str, str], ...] = (  # in lower case, as the file begins; what it is; what to do
    (b"version https://git-lfs", "a Git LFS pointer, not the data", "fetch the file itself: git lfs pull"),
    (b"<!doctype", "an HTML page", PAGE),
    (b"<html", "an HTML page", PAGE),
    (b"<head", "an HTML page", PAGE),
    (b"<?xml", "an XML document", "convert it to .jsonl"),
    (b"%pdf", "a PDF document", "convert it to .txt"),
    (
        b"pk\x03\x04",
        "a zip archive, or a document of an office program",
        "unpack it first, or save it as .csv",
    ),
    (b"\x1f\x8b", "a gzip archive", "unpack it first: gunzip"),
    (b"bzh", "a bzip2 archive", "unpack it first: bunzip2"),
    (b"\xfd7zxz", "an xz archive", "unpack it first: unxz"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive", "unpack it first: unzstd"),
    (b"par1", "a Parquet file", "name it .parquet"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
)


def refuse_foreign(path: Path, name: str) -> None:
    """Name what a file really is, before its first line is blamed: DataError, which calls the file `name`."""
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        head = file.read(512)
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, kind, remedy in FOREIGN:
        if first.startswith(start) and not (suffix == ".parquet" and start == b"par1"):
            raise DataError(f"this {suffix} file is {kind}", where=name, remedy=remedy)
    if suffix in (".jsonl", ".ndjson", ".json") and first.startswith(b"<"):
        raise DataError(f"this {suffix} file is an HTML or XML page", where=name, remedy=PAGE)
