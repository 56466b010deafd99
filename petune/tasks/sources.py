"""Where rows come from: a file, a folder, a glob, `demo:NAME`, a data set of the hub, or an object given from
Python.

What exists on this machine wins over a name on the hub, and nothing that looks like a file is ever looked for
on the network. A source may bring its own held-out rows: a folder's `eval` or `validation` file, the
validation split of a data set of the hub or of one that the library `datasets` has saved to disk. A `test`
file or split is never touched.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petune.demo import DATA, data_path
from petune.errors import DataError, MachineError, nearest
from petune.tasks.arrow import refuse_compressed
from petune.tasks.bad_rows import Faults
from petune.tasks.lines import Cursor, RowRecord, shown
from petune.tasks.objects import HELD_OUT, OBJECT, TRAIN, DataObject, rows_of
from petune.tasks.read import READERS, read_file

SAVED = ("dataset_dict.json", "dataset_info.json")  # what save_to_disk writes for several splits, and for one
HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.\[\]:%+-]+))?")


@dataclass(frozen=True)
class DataSource:
    """Files, a data set of the hub, one `saved` by datasets in a folder, or a Python object, not yet read.

    `demo` is the name of a shipped corpus, whose columns each task reads in its own way.
    """

    name: str
    train: tuple[Path, ...] = ()
    held_out: tuple[Path, ...] = ()
    demo: str | None = None
    hub: tuple[str, str | None, str | None] | None = None
    saved: Path | None = None
    given: DataObject | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def in_files(self) -> bool:
        """Whether `train` and `held_out` say all there is."""
        return self.hub is None and self.saved is None and self.given is None

    def has(self, side: str) -> bool:
        """Whether there are rows of "train" or "eval". A data set in splits is opened to know."""
        if self.given:
            return side in self.given.sides
        if self.in_files:
            return bool(self.train if side == "train" else self.held_out)
        return next(iter(self.records(side, Faults(skip=False))), None) is not None

    def files(self) -> list[Path]:
        """Every file that rows are read from; none for rows given from Python."""
        if self.saved:
            return sorted(path for path in self.saved.rglob("*") if path.is_file())
        if self.hub:
            name, config, split = self.hub
            found = _hub_load(name, config, split)
            splits = [found] if split else list(found.values())
            return sorted({Path(one["filename"]) for each in splits for one in each.cache_files})
        return [*self.train, *self.held_out]

    def records(
        self, side: str, faults: Faults, *, whole: bool = False, cursor: Cursor | None = None
    ) -> Iterator[RowRecord]:
        """The records of one side, "train" or "eval", of its files from where `cursor` stands; with `whole` a
        text file is one."""
        if self.hub:
            yield from _hub_records(*self.hub, side)
        if self.given:
            yield from self.given.records(side, faults)
        if self.saved:
            yield from _whole(_records(shown(self.saved), _saved_load(self.saved), "/", side), self.saved)
        files, cursor = self.train if side == "train" else self.held_out, cursor or Cursor()
        for number in range(cursor.file, len(files)):
            if number > cursor.file:
                cursor.enter(number)
            yield from read_file(files[number], faults, whole=whole, cursor=cursor)


def find_source(spec: str, folder: Path, objects: Mapping[str, DataObject] = {}) -> DataSource:
    """What `spec` names, seen from the recipe's folder, then from the working directory; one of `objects` by
    its spec.

    Raises DataError when nothing is there, listing where it looked and the nearest names.
    """
    if spec.startswith(OBJECT):
        return _given(spec, objects)
    if spec.startswith("demo:"):
        return _demo(spec.removeprefix("demo:"))
    places = [base / spec for base in (folder, Path.cwd())]
    tried = list(dict.fromkeys(Path(os.path.realpath(place)) for place in places))
    hub = None if spec.startswith((".", "/")) or Path(spec).suffix.lower() in READERS else HUB.fullmatch(spec)
    for path in tried:
        if path.is_file():
            return DataSource(spec, train=(path,))
        if path.is_dir():
            said = (f"{spec} is a folder here, not the hub's data set of that name",) if hub else ()
            return _folder(spec, path, said)
        if path.exists():
            what = "neither a file nor a folder"
            raise DataError(what, where=shown(path), remedy="give a file, or a folder of files")
        if glob.has_magic(spec) and (
            found := sorted(
                Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()
            )
        ):
            return DataSource(spec, train=tuple(found), notes=(f"{len(found)} files match {spec}",))
    for place in places:
        if place.is_symlink():
            what, aim = "a symbolic link that leads nowhere", f"a link to {os.readlink(place)}"
            raise DataError(what, where=str(place), found=aim, remedy="mend the link, or give the file")
    if hub and not glob.has_magic(hub["id"]):
        return DataSource(spec, hub=(hub["id"], hub["config"], hub["split"]))
    looked = " or ".join(dict.fromkeys(str(path.parent) for path in tried))
    raise DataError(f"no data at {spec!r}", found=f"no such file or folder in {looked}", remedy=_near(tried))


def held_out_of(
    source: DataSource, spec: str | None, folder: Path, objects: Mapping[str, DataObject] = {}
) -> tuple[DataSource, str] | None:
    """Where held-out rows are given, and on which side: at `spec` (data.eval), else with `source` itself;
    None where they are not."""
    if not spec:
        return (source, "eval") if source.has("eval") else None
    other = find_source(spec, folder, objects)
    return other, "eval" if other.has("eval") else "train"


def _given(spec: str, objects: Mapping[str, DataObject]) -> DataSource:
    if spec not in objects:
        remedy = (
            "give it again: petune.train(..., data=...); or write the rows to a .jsonl file and give its path"
        )
        raise DataError(
            "the data were an object given from Python, which no file holds", where=spec, remedy=remedy
        )
    given = objects[spec]
    sizes = " and ".join(f"{len(table)} rows of {name}" for name, table in given.sides.values())
    return DataSource(
        given.name, given=given, notes=(f"{sizes}, given from Python as {spec.removeprefix(OBJECT)}",)
    )


def _near(tried: list[Path]) -> str:
    """The data files and folders whose name without its suffix is most like the one asked for."""
    here = [entry for path in tried if path.parent.is_dir() for entry in path.parent.iterdir()]
    data = [
        entry
        for entry in here
        if not entry.name.startswith(".") and (entry.is_dir() or entry.suffix.lower() in READERS)
    ]
    stems = nearest(tried[0].stem, dict.fromkeys(entry.stem for entry in data))
    near = dict.fromkeys(entry.name for stem in stems for entry in data if entry.stem == stem)
    if near:
        return f"did you mean: {' or '.join(near)}"
    return "a path starts at the recipe's folder or the working directory; or try demo:docstrings"


def _demo(name: str) -> DataSource:
    corpus, _, part = name.partition("-")
    if corpus not in DATA or part not in ("", "domain"):
        known = [*DATA, *(f"{one}-domain" for one in DATA)]
        raise DataError(f"there is no demo data called {name!r}", expected="demo:" + ", demo:".join(known))
    start = "domain_" if part else ""
    folder = data_path(corpus)
    return DataSource(
        f"demo:{name}",
        train=(folder / f"{start}train.jsonl",),
        held_out=(folder / f"{start}eval.jsonl",),
        demo=corpus,
    )


def _folder(spec: str, folder: Path, said: tuple[str, ...]) -> DataSource:
    if any((folder / name).is_file() for name in SAVED):
        return DataSource(spec, saved=folder, notes=(*said, f"{spec}: a data set saved by datasets"))
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix.lower() in READERS and not path.name.startswith(".")
    )
    if not files:
        raise DataError(
            "no data file in the folder",
            where=shown(folder),
            expected=" ".join(f"*{suffix}" for suffix in READERS),
        )
    train, held_out = (
        tuple(path for path in files if path.stem.lower() in names) for names in (TRAIN, HELD_OUT)
    )
    if not train:
        return DataSource(
            spec,
            train=tuple(files),
            notes=(*said, f"{len(files)} files of {spec}, read in the order of their names"),
        )
    left = [path.name for path in files if path not in train and path not in held_out]
    notes = (
        *said,
        f"{spec}: {', '.join(path.name for path in (*train, *held_out))}"
        + (f"; not read: {', '.join(left)}" if left else ""),
    )
    return DataSource(spec, train=train, held_out=held_out, notes=notes)


def _hub_records(name: str, config: str | None, split: str | None, side: str) -> Iterator[RowRecord]:
    """Rows of a hub data set. A split given is all there is."""
    if split is None:
        yield from _records(name, _hub_load(name, config, None), "@", side)
    elif side == "train":
        yield from _rows(f"{name}@{split}", _hub_load(name, config, split))


def _records(name: str, splits: Any, joint: str, side: str) -> Iterator[RowRecord]:
    """Rows of one side of a data set in splits, by their names; `joint` stands between its name and that of a
    split."""
    held = next((one for one in (TRAIN if side == "train" else HELD_OUT) if one in splits), None)
    if held is not None:
        yield from _rows(f"{name}{joint}{held}", splits[held])
    elif side == "train":
        raise DataError(
            f"the data set {name} has no train split", expected=f"{name}{joint}SPLIT", found=", ".join(splits)
        )


def _rows(name: str, split: Any) -> Iterator[RowRecord]:
    """Rows of one split, class numbers named."""
    for number, row in enumerate(rows_of(split), start=1):
        yield RowRecord(f"{name}:{number}", row)


def _saved_load(folder: Path) -> Any:
    """The splits of a data set that save_to_disk wrote; a single one is the train split.

    Raises DataError for a damaged folder, and for compressed tables.
    """
    import datasets

    for file in sorted(folder.rglob("*.arrow")):
        refuse_compressed(file)
    try:
        found = datasets.load_from_disk(str(folder))
        splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
        for split in splits.values():
            split.data.table.validate(full=True)  # or a wrong offset would be read from where it points to
    except Exception as error:  # datasets and pyarrow raise bare classes of their own for damaged files
        raise _not_whole(folder, error) from error
    return splits


def _whole(records: Iterator[RowRecord], folder: Path) -> Iterator[RowRecord]:
    """The records of a saved data set. Raises DataError where reading them finds it damaged."""
    while True:
        try:
            record = next(records, None)
        except DataError:
            raise
        except Exception as error:
            raise _not_whole(folder, error) from error
        if record is None:
            return
        yield record


def _not_whole(folder: Path, error: Exception) -> DataError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(
        f"not a whole data set saved by datasets: {first}",
        where=shown(folder),
        remedy="save or copy it again",
    )


def _hub_load(name: str, config: str | None, split: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"the hub shows this account no data set {name!r}", remedy="a local folder is written ./NAME"
        ) from error
    except OSError as error:
        remedy = "pass a local file, or demo:docstrings, which needs no network"
        raise MachineError(
            f"cannot reach the hub for the data set {name!r}: {error}", remedy=remedy
        ) from error
    except ValueError as error:
        raise DataError(
            f"cannot load the data set {name!r}: {error}", remedy="write it as NAME:CONFIG@SPLIT"
        ) from error


def first_record(records: Iterator[RowRecord], name: str, faults: Faults) -> RowRecord:
    """The first record of a source of this name. Raises DataError where there is none."""
    first = next(records, None)
    if first is None:
        faults.settle(0)
        why = f"only {faults.blanks} blank lines" if faults.blanks else "the file is empty"
        raise DataError(f"there are no rows: {why}", where=name)
    return first
