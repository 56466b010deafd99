"""Tokenized rows that are kept: made once a host, mapped into memory by all its ranks, and there for the next
run.

    FOLDER/KEY/train.arrow, eval.arrow    examples, as a stream of Arrow record batches
    FOLDER/KEY/facts.json                 labels, notes, fingerprint and report of the rows
    FOLDER/KEY.lock                       held by the process that makes them; others wait

KEY is a hash of all that examples follow from: the content of the files and how they are called here, the
tokenizer, the settings, the code that reads and encodes. So nothing is ever out of date, and whatever is
damaged is made anew. An entry appears whole or not at all, and the longest unused go first.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petune.errors import FileError, PetuneError
from petune.files.atomic import commit_folder
from petune.files.hashes import FileHashes
from petune.files.lock import WaitingLock
from petune.files.manifest import MANIFEST, check_folder
from petune.files.safetensors import read_json, write_json, writing
from petune.log import human, phase, warn
from petune.tasks.configs import DataConfig
from petune.tasks.encode import Encoded, encode, make_coder
from petune.tasks.lines import shown
from petune.tasks.load import load_rows
from petune.tasks.media import Reader, rate_of
from petune.tasks.mlm import masking_of
from petune.tasks.objects import DataObject
from petune.tasks.report import DataReport
from petune.tasks.rows import RowFacts
from petune.tasks.sources import DataSource, find_source, held_out_of
from petune.tasks.table import Examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL = 4 << 20  # bytes of files that are read and tokenized in about a second
SMALL_ROWS = 10_000  # given from Python
PACKAGES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow")  # whose code makes examples too
_FACTS, _SIDES = "facts.json", ("train", "eval")
_PLACE_ONLY = ("name_or_path",)  # of a tokenizer: says nothing of its tokens


@dataclass(frozen=True)
class Shelf:
    """Where tokenized rows are kept. most: bytes of all entries. all: keep small data too, which are made
    again in a second."""

    folder: Path
    most: int
    all: bool = False

    def used(self) -> int:
        """Bytes of all entries."""
        return sum(_bytes_of(entry) for entry in self._entries())

    def make_room(self, needed: int, own: Path) -> None:
        """Delete the entries that were used longest ago until `needed` more bytes fit; never `own`."""
        entries = sorted(self._entries(), key=lambda entry: entry.stat().st_mtime)
        sizes = {entry: _bytes_of(entry) for entry in entries if entry != own}
        for entry, size in sizes.items():
            if sum(sizes.values()) + needed <= self.most:
                return
            shutil.rmtree(entry, ignore_errors=True)  # who has it mapped keeps it
            needed -= size

    def _entries(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (path.parent for path in sorted(self.folder.glob(f"*/{_FACTS}")))


@dataclass(frozen=True)
class Asked:
    """What rows are read and encoded for: the arguments of `load_rows` and `encode`."""

    config: DataConfig
    task: str
    folder: Path
    tokenizer: PreTrainedTokenizerBase | None
    model_kind: str
    max_positions: int | None
    vocab_size: int | None
    seed: int
    labels: tuple[str, ...] | None
    objects: Mapping[str, DataObject]
    reader: Reader | None = None

    def make(self) -> tuple[RowFacts, Encoded]:
        """Read, check and tokenize. Raises as `load_rows` and `encode` do."""
        rows = load_rows(
            self.config,
            self.task,
            self.folder,
            seed=self.seed,
            labels=self.labels,
            objects=self.objects,
            rate=rate_of(self.reader),
        )
        encoded = encode(
            rows,
            self.task,
            self.tokenizer,
            self.config,
            model_kind=self.model_kind,
            max_positions=self.max_positions,
            vocab_size=self.vocab_size,
            reader=self.reader,
        )
        return rows.facts, encoded

    def key(self, all: bool) -> str | None:
        """The name of their entry; None for pictures, for a tokenizer that nothing identifies, and unless
        `all` for small data.

        How the recipe spells the place of files plays no part, only what they are called from here, as
        messages do.
        """
        if self.tokenizer is None or self.reader is not None:
            return None
        tokenizer, sources = identity_of(self.tokenizer), self._sources()
        files = {shown(path): path for source, _ in sources for path in source.files()}
        if tokenizer is None or (not all and _is_small([one for one, _ in sources], files.values())):
            return None
        with FileHashes(files, afresh=False) as hashes:
            content = sorted(hashes.result().items())
        settings = asdict(self.config)
        del settings["path"], settings["eval"]
        told = {
            "code": _code(),
            "tokenizer": tokenizer,
            "sources": [_facts_of(source, side) for source, side in sources],
            "content": content,
            "settings": settings,
            "task": self.task,
            "kind": self.model_kind,
            "sizes": [self.max_positions, self.vocab_size],
            "seed": self.seed if self.config.split_by == "seed" else None,
            "labels": self.labels,
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def _sources(self) -> list[tuple[DataSource, str]]:
        source = find_source(self.config.path, self.folder, self.objects)
        held_out = held_out_of(source, self.config.eval, self.folder, self.objects)
        return [(source, "train"), *([] if held_out is None else [held_out])]


def _facts_of(source: DataSource, side: str) -> list[Any]:
    """What tells the rows of one side of a source, beside the content of its files. Rows given from Python
    have their hash in the name they go by."""
    sides = [[shown(path) for path in paths] for paths in (source.train, source.held_out)]
    return [side, *sides, source.demo, source.hub, source.given and source.given.spec, bool(source.saved)]


def rows_and_examples(asked: Asked, shelf: Shelf | None) -> tuple[RowFacts, Encoded]:
    """The rows of a run, tokenized: those kept on the shelf, or made now, and kept there if they can be.

    The first process of a host that needs them makes them, and others wait. Raises as `load_rows` and
    `encode`.
    """
    key = None if shelf is None else asked.key(shelf.all)
    if shelf is None or key is None:
        return asked.make()
    entry = shelf.folder / key
    if (found := _kept(entry, asked)) is not None:
        return found
    try:
        with writing(shelf.folder):
            shelf.folder.mkdir(parents=True, exist_ok=True)
        lock = WaitingLock(shelf.folder / f"{key}.lock")
        if not lock.take():
            with phase("waiting for another process, which tokenizes the same rows"):
                lock.wait()
    except PetuneError as error:
        warn(f"tokenized rows are not kept: {error}")
        return asked.make()
    with lock:
        return _kept(entry, asked) or _make(entry, asked, shelf)


def _make(entry: Path, asked: Asked, shelf: Shelf) -> tuple[RowFacts, Encoded]:
    """Make what the entry holds and put it there; where that cannot be, say so and keep it in memory."""
    with phase("reading and tokenizing the rows"):
        made = asked.make()
    size = sum(_table(side).nbytes for side in (made[1].train, made[1].eval))
    try:
        if asked.key(shelf.all) != entry.name:
            warn("tokenized rows are not kept: a file has changed while it was read")
            return made
        if size > shelf.most:
            what = f"they take {human(size)}, and rows_cache_gib allows {human(shelf.most)}"
            warn(f"tokenized rows are not kept: {what}")
            return made
        shelf.make_room(size, entry)
        shutil.rmtree(entry, ignore_errors=True)  # what is damaged
        with phase("writing the tokenized rows"):
            commit_folder(entry, partial(_write, *made), False, (MANIFEST,))
    except (PetuneError, OSError) as error:
        warn(f"tokenized rows are not kept, and every process holds its own: {error}")
        return made
    del made
    _release()
    return _kept(entry, asked) or asked.make()


def _release() -> None:
    """Give memory that nothing uses any more back to the system."""
    import pyarrow as pa  # type: ignore[import-untyped]  # comes with datasets

    gc.collect()
    pa.default_memory_pool().release_unused()


def _write(facts: RowFacts, encoded: Encoded, folder: Path) -> None:
    for name, side in zip(_SIDES, (encoded.train, encoded.eval), strict=True):
        with writing(folder / f"{name}.arrow"):
            _table(side).write(folder / f"{name}.arrow")
    told = {"rows": asdict(facts), "report": asdict(encoded.report), "packed": encoded.packed}
    write_json(folder / _FACTS, told)


def _kept(entry: Path, asked: Asked) -> tuple[RowFacts, Encoded] | None:
    """What the entry holds, mapped; None where nothing is, or what is there is damaged, which is said."""
    if not (entry / _FACTS).is_file():
        return None
    try:
        with phase("reading the tokenized rows that were kept"):
            if not (entry / MANIFEST).is_file():
                raise FileError("has no manifest", where=str(entry))
            check_folder(entry)
            sides = [Examples.map(entry / f"{name}.arrow") for name in _SIDES]
            told = read_json(entry / _FACTS)
            rows, report = told["rows"], told["report"]
            labels = None if rows["labels"] is None else tuple(rows["labels"])
            facts = RowFacts(labels, rows["format"], tuple(rows["notes"]), rows["sha256"])
            lengths = tuple((first, last, count) for first, last, count in report["lengths"])
            figures = DataReport(**{**report, "notes": tuple(report["notes"]), "lengths": lengths})
        os.utime(entry)  # it was used now
    except (PetuneError, OSError, ValueError, KeyError, TypeError) as error:
        warn(f"tokenized rows that were kept are damaged, and made anew: {error}")
        return None
    encoded = Encoded(sides[0], sides[1], figures, packed=bool(told["packed"]), kept=entry)
    if asked.task == "mlm" and asked.tokenizer is not None:
        coder = make_coder(asked.tokenizer, asked.config, max_positions=asked.max_positions)
        encoded = replace(encoded, masking=masking_of(coder))
    return facts, encoded


def _table(side: Any) -> Examples:
    return side if isinstance(side, Examples) else Examples.of(side)


def _bytes_of(entry: Path) -> int:
    found = 0
    with suppress(OSError):  # another process may delete it meanwhile
        found = sum(file.stat().st_size for file in entry.iterdir())
    return found


def _is_small(sources: Iterable[DataSource], files: Iterable[Path]) -> bool:
    """Whether rows are read and tokenized in about a second."""
    given = sum(len(table) for one in sources if one.given for _, table in one.given.sides.values())
    return sum(path.stat().st_size for path in files) < SMALL and given < SMALL_ROWS


# ------------------------------------------------------------ what examples follow from


def identity_of(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | None:
    """What the tokens of a text follow from: the program of the tokenizer and its plain settings. None for
    one whose code is not of a package, or which has no program that can be read."""
    kind = type(tokenizer)
    if not tokenizer.is_fast or kind.__module__.split(".")[0] != "transformers":
        return None
    program: str = tokenizer.backend_tokenizer.to_str()
    start = program.find('"added_tokens"')  # before it: truncation and padding of the last call
    plain = {
        name: value
        for name, value in vars(tokenizer).items()
        if (value is None or isinstance(value, str | int | float)) and name not in _PLACE_ONLY
    }
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "program": hashlib.sha256(program[max(start, 0) :].encode()).hexdigest(),
        "settings": plain,
        "special": tokenizer.special_tokens_map,
        "template": tokenizer.chat_template,
        "inputs": tokenizer.model_input_names,
    }


@cache
def _code() -> str:
    """A hash of the code that reads and encodes rows, ours and that of packages."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent).glob("*.py")):
        digest.update(path.name.encode() + b"\n" + path.read_bytes())
    for package in PACKAGES:
        digest.update(f"{package} {_version(package)}\n".encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    with suppress(ImportError):
        return version(package)
    return "none"
