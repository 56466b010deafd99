"""Where rows come from: a file, a folder, a glob, `demo:NAME`, a data set of the hub, or an object given from Python.

What exists on this machine wins over a name on the hub, and nothing that looks like a file is ever looked for on the network. A source may
bring its own held-out rows: a folder's `eval` or `validation` file, a hub data set's validation split. A `test` file is never touched.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petune.demo import DATA, data_path
from petune.errors import DataError, MachineError, nearest
from petune.tasks.faults import Faults
from petune.tasks.objects import HELD_OUT, OBJECT, TRAIN, DataObject, rows_of
from petune.tasks.read import READERS, Record, read_file, shown

HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.\[\]:%+-]+))?")


@dataclass(frozen=True)
class Source:
    """Files, a hub data set or a Python object, not yet read. `demo` names a shipped corpus, which each task reads in its own way."""

    name: str
    train: tuple[Path, ...] = ()
    held_out: tuple[Path, ...] = ()
    demo: str | None = None
    hub: tuple[str, str | None, str | None] | None = None
    given: DataObject | None = None
    notes: tuple[str, ...] = field(default=())

    def records(self, side: str, faults: Faults) -> Iterator[Record]:
        """The records of one side, "train" or "eval"."""
        if self.hub:
            yield from _hub_records(*self.hub, side)
        if self.given:
            yield from self.given.records(side, faults)
        for path in self.train if side == "train" else self.held_out:
            yield from read_file(path, faults)


def find_source(spec: str, folder: Path, objects: Mapping[str, DataObject] = {}) -> Source:
    """What `spec` names, seen from the recipe's folder, then from the working directory; one of `objects` by its spec.

    Raises DataError when nothing is there, listing where it looked and the nearest names.
    """
    if spec.startswith(OBJECT):
        return _given(spec, objects)
    if spec.startswith("demo:"):
        return _demo(spec.removeprefix("demo:"))
    tried = list(dict.fromkeys((base / Path(spec).expanduser()).resolve() for base in (folder, Path.cwd())))
    hub = None if spec.startswith((".", "~", "/")) or Path(spec).suffix.lower() in READERS else HUB.fullmatch(spec)
    for path in tried:
        if path.is_file():
            return Source(spec, train=(path,))
        if path.is_dir():
            said = (f"{spec} is a folder here, not the hub's data set of that name",) if hub else ()
            return _folder(spec, path, said)
        if path.exists():
            raise DataError("neither a file nor a folder", where=shown(path))
        if glob.has_magic(spec) and (found := sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())):
            return Source(spec, train=tuple(found), notes=(f"{len(found)} files match {spec}",))
    if hub and not glob.has_magic(hub["id"]):
        return Source(spec, hub=(hub["id"], hub["config"], hub["split"]))
    raise DataError(f"no data at {spec!r}", expected="one of " + ", ".join(shown(path) for path in tried), remedy=_near(tried))


def _given(spec: str, objects: Mapping[str, DataObject]) -> Source:
    if spec not in objects:
        remedy = "give it again: petune.train(..., data=...); or write the rows to a .jsonl file and give its path"
        raise DataError("the data were an object given from Python, which no file holds", where=spec, remedy=remedy)
    given = objects[spec]
    sizes = " and ".join(f"{len(table)} rows of {name}" for name, table in given.sides.values())
    return Source(given.name, given=given, notes=(f"{sizes}, given from Python as {spec.removeprefix(OBJECT)}",))


def _near(tried: list[Path]) -> str:
    here = [entry.name for path in tried if path.parent.is_dir() for entry in path.parent.iterdir()]
    near = nearest(tried[0].name, dict.fromkeys(here))
    return (
        f"did you mean: {' or '.join(near)}"
        if near
        else "a path starts at the recipe's folder or the working directory; or try demo:docstrings"
    )


def _demo(name: str) -> Source:
    corpus, _, part = name.partition("-")
    if corpus not in DATA or part not in ("", "domain"):
        known = [*DATA, *(f"{one}-domain" for one in DATA)]
        raise DataError(f"there is no demo data called {name!r}", expected="demo:" + ", demo:".join(known))
    start = "domain_" if part else ""
    folder = data_path(corpus)
    return Source(f"demo:{name}", train=(folder / f"{start}train.jsonl",), held_out=(folder / f"{start}eval.jsonl",), demo=corpus)


def _folder(spec: str, folder: Path, said: tuple[str, ...]) -> Source:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix.lower() in READERS and not path.name.startswith("."))
    if not files:
        raise DataError("no data file in the folder", where=shown(folder), expected=" ".join(f"*{suffix}" for suffix in READERS))
    train, held_out = (tuple(path for path in files if path.stem.lower() in names) for names in (TRAIN, HELD_OUT))
    if not train:
        return Source(spec, train=tuple(files), notes=(*said, f"{len(files)} files of {spec}, read in the order of their names"))
    left = [path.name for path in files if path not in train and path not in held_out]
    notes = (*said, f"{spec}: {', '.join(path.name for path in (*train, *held_out))}" + (f"; not read: {', '.join(left)}" if left else ""))
    return Source(spec, train=train, held_out=held_out, notes=notes)


def _hub_records(name: str, config: str | None, split: str | None, side: str) -> Iterator[Record]:
    """Rows of a hub data set, class numbers named. A split given is all there is; otherwise train and, if it exists, validation."""
    if side == "eval" and split:
        return
    found = _hub_load(name, config, split)
    if not split:
        wanted = TRAIN if side == "train" else HELD_OUT
        held = next((one for one in wanted if one in found), None)
        if held is None and side == "train":
            raise DataError(f"the data set {name} has no train split", expected=f"{name}@SPLIT", found=", ".join(found))
        if held is None:
            return
        found, split = found[held], held
    for number, row in enumerate(rows_of(found), start=1):
        yield Record(f"{name}@{split}:{number}", row)


def _hub_load(name: str, config: str | None, split: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(f"the hub shows this account no data set {name!r}", remedy="a local folder is written ./NAME") from error
    except OSError as error:
        remedy = "pass a local file, or demo:docstrings, which needs no network"
        raise MachineError(f"cannot reach the hub for the data set {name!r}: {error}", remedy=remedy) from error
    except ValueError as error:
        raise DataError(f"cannot load the data set {name!r}: {error}", remedy="write it as NAME:CONFIG@SPLIT") from error
