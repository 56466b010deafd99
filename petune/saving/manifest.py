"""The manifest of a checkpoint: names, sizes and leaf hashes of its files, sealed; and whether a folder is
what it says."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from petune.errors import FileError, Problem, told_apart
from petune.files.hashes import leaf_hashes, number_of_blocks
from petune.files.manifest import name_fault
from petune.files.range_writer import ALONE, Crew
from petune.files.safetensors import open_regular, parse_json, read_bytes, reading, write_file

VERSION = 2
MANIFEST = "manifest.json"
COMMITTED = re.compile(r"step-(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: `facts` is the writer's JSON, `files` maps a relative path to what is known of
    its bytes: `size`, and `blocks`, the SHA-256 of every 64 MiB."""

    version: int
    run_id: str
    step: int
    facts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint against its manifest.

    Raises FileError with all problems: missing, unexpected, resized or changed files, links and pipes, an
    edited manifest, another version.
    """
    manifest = read_manifest(path)
    problems = compare(path, manifest)
    if not problems:  # else the sizes tell already; hashing gigabytes would not say more
        problems = [
            found for name, fields in manifest.files.items() if (found := _changed(path / name, fields))
        ]
    if problems:
        raise FileError(problems)
    return manifest


def _changed(file: Path, fields: Mapping[str, Any]) -> Problem | None:
    """The first block of a file whose SHA-256 is another one."""
    expected = fields["blocks"]
    with open_regular(file) as held, reading(file):
        found = leaf_hashes(held)
    for at, (one, other) in enumerate(zip_longest(expected, found, fillvalue=""), 1):
        if one != other:
            block = "" if len(expected) == 1 else f", in block {at} of {len(expected)}"
            noted, own = told_apart(one, other)
            return _damaged(f"has been changed or damaged{block}", file, f"sha256 {noted}", own)
    return None


def _damaged(what: str, path: Path, expected: str | None = None, found: str | None = None) -> Problem:
    return Problem(
        what,
        str(path),
        expected,
        found,
        "use another checkpoint; resuming a run falls back to the newest whole one by itself",
    )


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, whose files nobody looks at. Raises FileError as `verify`."""
    with reading(path):
        folder = path.is_dir() and not path.is_symlink()
    if not folder:
        raise FileError(
            "is not a checkpoint folder",
            where=str(path),
            expected="a folder with a manifest.json",
            remedy="check the path",
        )
    file = path / MANIFEST
    if not os.path.lexists(file):
        raise FileError([_damaged("has no manifest: it is not a checkpoint, or its save was cut off", file)])
    text = read_bytes(file)
    found = parse_json(text, str(file))
    if not isinstance(found, dict):
        raise FileError([_damaged("the manifest is not a JSON object", file)])
    version = found.get("version")
    if type(version) is not int or version != VERSION:
        newer = type(version) is int and version > VERSION
        what = "a newer version of manifest" if newer else "another version of manifest"
        remedy = "use the petune that wrote it, or another checkpoint"
        raise FileError(
            what,
            where=str(file),
            expected=str(VERSION),
            found=repr(version)[:40],
            remedy=remedy,
        )
    seal = found.pop("seal", None)
    try:
        whole = isinstance(seal, str) and render(found) == text
    except RecursionError:
        whole = False
    if not whole:
        raise FileError(
            [_damaged("the manifest has been changed or damaged: its own SHA-256 does not fit", file)]
        )
    manifest = _manifest(found, file)
    if (match := COMMITTED.fullmatch(path.name)) and int(match[1]) != manifest.step:
        raise FileError(
            [_damaged("belongs to another step than its folder says", path, match[1], str(manifest.step))]
        )
    return manifest


def _manifest(found: Mapping[str, Any], file: Path) -> Manifest:
    """Types first: a seal is no signature, and whoever can edit a file can seal it again."""
    kinds = {"version": int, "run_id": str, "step": int, "facts": dict, "files": dict}
    if (
        set(found) != set(kinds)
        or any(type(found[key]) is not kind for key, kind in kinds.items())
        or not found["files"]
    ):
        what = "the manifest's fields are not those of a manifest"
        raise FileError([_damaged(what, file, ", ".join(kinds), ", ".join(found)[:200])])
    for name, fields in found["files"].items():
        if fault := path_fault(name):
            raise FileError([_damaged(fault, file, "a path inside the checkpoint", repr(name)[:200])])
        if not _is_entry(fields):
            what = f"the manifest's entry for {name!r} is not size and as many blocks"
            raise FileError([_damaged(what, file)])
    return Manifest(**found)


def _is_entry(fields: object) -> bool:
    kinds = {"size": int, "blocks": list}
    if not isinstance(fields, dict) or {key: type(value) for key, value in fields.items()} != kinds:
        return False
    blocks = fields["blocks"]
    return len(blocks) == number_of_blocks(fields["size"]) and all(type(one) is str for one in blocks)


def compare(path: Path, manifest: Manifest) -> list[Problem]:
    """The cheap half of verify: names, kinds and sizes."""
    with reading(path):
        names, problems = contents(path)
        listed, found = set(manifest.files), set(names) - {MANIFEST}
        problems += [_damaged("is missing", path / name) for name in sorted(listed - found)]
        problems += [
            _damaged("is not in the manifest: remove it", path / name) for name in sorted(found - listed)
        ]
        for name in sorted(listed & found):
            if (size := (path / name).lstat().st_size) != (expected := manifest.files[name]["size"]):
                problems.append(_damaged("has another size", path / name, f"{expected} bytes", f"{size}"))
    return problems


def contents(folder: Path) -> tuple[list[str], list[Problem]]:
    """Every file below a folder as a relative path, and a problem for whatever is neither file nor folder;
    follows no link."""
    names: list[str] = []
    problems: list[Problem] = []
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name + "/")
                elif entry.is_file(follow_symlinks=False):
                    names.append(name)
                else:
                    problems.append(
                        _damaged(
                            "is a link, a pipe or a device: a checkpoint holds only files", folder / name
                        )
                    )
    return sorted(names), problems


def path_fault(name: str) -> str | None:
    """Why a checkpoint cannot hold a file of this name, or None."""
    if name == MANIFEST:
        return "the manifest cannot list itself"
    fault = name_fault(name)
    return f"a file's name {fault}" if fault else None


# ---------------------------------------------------------------- writing


def write_manifest(
    folder: Path, step: int, run_id: str, facts: Mapping[str, Any], files: Mapping[str, Any]
) -> None:
    """Seal a folder whose `files` are known and on the disk."""
    content = {"version": VERSION, "run_id": run_id, "step": step, "facts": facts, "files": files}
    write_file(folder / MANIFEST, [render(content)], sync=True)


def hash_files(folder: Path, sizes: Mapping[str, int], crew: Crew = ALONE) -> dict[str, Any]:
    """What a manifest knows of files by name, of which each rank of the crew hashes some blocks: the same
    however many there are."""
    mine: dict[str, list[str]] = {}
    place = -crew.rank
    for name, size in sizes.items():
        blocks = range(-place % crew.world, number_of_blocks(size), crew.world)
        place += number_of_blocks(size)
        with open_regular(folder / name) as file, reading(folder / name):
            mine[name] = leaf_hashes(file, blocks)
    every = [json.loads(text) for text in crew.meet(json.dumps(mine))]
    place, files = 0, {}
    for name, size in sizes.items():
        ranks = [rank % crew.world for rank in range(place, place + number_of_blocks(size))]
        place += number_of_blocks(size)
        files[name] = {"size": size, "blocks": [every[rank][name].pop(0) for rank in ranks]}
    return files


def render(content: Mapping[str, Any]) -> bytes:
    """The one spelling of a manifest; `seal` is the SHA-256 of the rest, so that an edited fact is found as
    well as an edited file."""

    def spell(value: Mapping[str, Any]) -> bytes:
        return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"

    return spell({**content, "seal": hashlib.sha256(spell(content)).hexdigest()})
