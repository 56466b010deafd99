"""The manifest of a folder that petune wrote: size and SHA-256 of every file in it, in one small JSON file
that other readers ignore.

It stands beside tuned weights, exported and merged models alike. A file of the user's own is not refused: one
that is no documentation is named, since nobody can tell whether it is as it was meant.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from petune.errors import FileError, Problem, told_apart
from petune.files.hashes import FileHashes, differing
from petune.files.json_fields import Digest, Fields, IntegerValue, Kind, MapOf, check_fields, check_version
from petune.files.safetensors import read_json, reading, write_json
from petune.log import warn

MANIFEST = "petune.manifest.json"
RECORD = "petune.json"  # of a tuning; petune writes none without a manifest
VERSION = 1
MOST = 10  # problems that are named
_DOCUMENTATION = (".md", ".rst", ".pdf", ".png", ".svg", ".jpg")
_FIELDS: Mapping[str, Kind] = {
    "version": IntegerValue(1),
    "files": MapOf(Fields({"size": IntegerValue(0), "sha256": Digest()}), least=1),
}


def seal_folder(folder: Path) -> None:
    """Write the manifest of every file in `folder`. Raises FileError or MachineError."""
    with FileHashes({name: folder / name for name in _files_in(folder)}) as hashes:
        write_json(folder / MANIFEST, {"version": VERSION, "files": hashes.entries()})


def check_folder(folder: Path) -> None:
    """Compare every file of `folder` with its manifest; a folder without one and without a petune.json is not
    petune's, and passes.

    Raises FileError naming the first ten files that are missing, of another size or changed, and for a
    manifest that is damaged, newer, or missing beside a petune.json. Hashes of large files that have not
    changed are remembered, so that this costs a stat.
    """
    file = folder / MANIFEST
    if not file.is_file():
        if (folder / RECORD).is_file():
            what = f"is missing: {RECORD} beside it is petune's, which writes none without"
            raise FileError(what, where=str(file), remedy="use a complete copy of the folder")
        return
    listed = _read(file)
    problems = [
        problem for name, entry in listed.items() if (problem := _misfit(folder / name, int(entry["size"])))
    ]
    if not problems:  # sizes tell already: hashing would not say more
        expected = {name: str(entry["sha256"]) for name, entry in listed.items()}
        found = differing({name: folder / name for name in listed}, expected)
        for name, value in found.items():
            noted, own = told_apart(expected[name], value)
            problems.append(
                Problem("has been changed or damaged", str(folder / name), f"sha256 {noted}", own)
            )
    if problems:
        first = Problem("these files are not what petune wrote", str(folder), remedy=_REMEDY)
        raise FileError([first, *problems[:MOST]])
    strangers = [name for name in _files_in(folder) if name not in listed and not _is_documentation(name)]
    if strangers:
        warn(f"{folder}: not in its manifest, so under no hash: {', '.join(strangers[:MOST])!r}")


_REMEDY = (
    f"use another copy; if you changed it yourself, remove {MANIFEST}, and petune.json where there is one"
)


def _read(file: Path) -> Mapping[str, Mapping[str, Any]]:
    found = read_json(file, links=True)
    check_version(found, "version", VERSION, file)
    check_fields(found, _FIELDS, file)
    for name in found["files"]:
        if fault := name_fault(name):
            raise FileError(
                f"a file's name {fault}",
                where=f"{file}  files",
                found=repr(name)[:200],
                remedy="use another copy",
            )
    return dict(found["files"])


def name_fault(name: str) -> str | None:
    """Why `name` is no path to a file below a folder, or None."""
    if not name.isprintable() or "\\" in name:  # half a surrogate pair too, which cannot be encoded below
        return "holds a control character or a backslash"
    if not name or len(name) > 1024 or any(len(part.encode()) > 255 for part in name.split("/")):
        return "is empty or too long"
    return "leads out of its folder" if any(part in ("", ".", "..") for part in name.split("/")) else None


def _misfit(file: Path, size: int) -> Problem | None:
    with reading(file.parent):
        if not file.is_file():
            return Problem("is missing", str(file))
        found = file.stat().st_size
    return None if found == size else Problem("has another size", str(file), f"{size} bytes", f"{found}")


def _files_in(folder: Path) -> list[str]:
    """Every file below `folder` but its manifest, as relative paths."""
    found = [
        Path(place, name).relative_to(folder).as_posix()
        for place, _, names in os.walk(folder)
        for name in names
    ]
    return sorted(name for name in found if name != MANIFEST)


def _is_documentation(name: str) -> bool:
    parts = name.split("/")
    hidden = any(part.startswith(".") for part in parts)  # .cache of a download, .git of a clone
    return hidden or parts[-1].lower().endswith(_DOCUMENTATION) or parts[-1].startswith(("LICENSE", "NOTICE"))
