"""From a data config to the rows of a run: find, read, detect, check, split; everything decided on the way
becomes a note."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from petune.demo.punctuation import punctuated
from petune.errors import DataError, UsageError, did_you_mean
from petune.tasks.bad_rows import Faults
from petune.tasks.configs import DataConfig
from petune.tasks.formats import DEMO, ColumnLayout, detect, refuse_left_label
from petune.tasks.judgements import with_others
from petune.tasks.lines import RowRecord
from petune.tasks.objects import DataObject
from petune.tasks.registry import find_task
from petune.tasks.row_maker import RowMaker
from petune.tasks.rows import Labelled, Pictured, Row, Rows, Tagged, fingerprint
from petune.tasks.sources import DataSource, find_source, first_record, held_out_of
from petune.tasks.splits import Split, keep_apart, sample, split_documents, split_off

WITH_LABELS = ("classify", "tokens")
OTHERS = 4  # passages of other docstrings beside the right one, in the demo of rerank
CLASSES_TOLD = 12  # in the header; the most frequent
LABEL_ROWS = 1000  # that are looked at for a label beside the text
INFERRED: dict[tuple[str, str], str] = {  # (format, kind of model) -> task
    **{("text-label", kind): "classify" for kind in ("encoder", "encoder-decoder", "decoder")},
    **{(format_, "encoder-decoder"): "seq2seq" for format_ in ("pairs", "alpaca", "docstrings")},
    **{(format_, "decoder"): "causal" for format_ in ("pairs", "alpaca", "text", "docstrings")},
    **{(format_, "decoder"): "chat" for format_ in ("messages", "sharegpt")},
    **{("tokens", kind): "tokens" for kind in ("encoder", "decoder")},
    **{(format_, "decoder"): "prefer" for format_ in ("preferences", "preference-turns")},
    ("image-label", "encoder"): "classify",
    ("audio-text", "encoder-decoder"): "seq2seq",
    ("text", "encoder"): "mlm",
    ("docstrings", "encoder"): "classify",
}


def _tagged(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Words of a docstring and the punctuation that followed each."""
    return dict(zip(DEMO["tokens"], punctuated(columns["text"]), strict=True))


def _preferred(columns: Mapping[str, Any]) -> dict[str, Any]:
    """A docstring whose summary is preferred as it is written to its words in lower case, without marks;
    rejected is empty where that is no difference."""
    bare = " ".join(punctuated(columns["summary"])[0])
    return {**columns, "rejected": "" if bare == columns["summary"] else bare}


def _among_others(records: Iterable[RowRecord]) -> Iterator[RowRecord]:
    """Docstrings, and with each what the OTHERS before it say, which are mostly of the same module; the first
    have none before them and are left out."""
    before: deque[str] = deque(maxlen=OTHERS)
    for record in records:
        body = record.columns["body"]
        if len(before) == OTHERS and body not in before:
            yield RowRecord(record.where, {**record.columns, "others": list(before)})
        if body and body not in before:
            before.append(body)


def _each(make: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[..., Iterator[RowRecord]]:
    """The records that `make` makes of the columns of each."""
    return lambda records: (RowRecord(one.where, make(one.columns)) for one in records)


# task -> the records it reads of the demo corpus, where it is not told by their columns
DERIVED: Mapping[str, Callable[[Iterable[RowRecord]], Iterator[RowRecord]]] = {
    "tokens": _each(_tagged),
    "prefer": _each(_preferred),
    "rerank": _among_others,
}


def infer_task(format_: str, model_kind: str) -> str:
    """The one task that rows of this format mean for a model of this kind ("encoder", "encoder-decoder",
    "decoder"); UsageError if none."""
    if task := INFERRED.get((format_, model_kind)):
        return task
    fit = [f"{kind}: {task}" for (known, kind), task in INFERRED.items() if known == format_]
    raise UsageError(
        f"rows of format {format_} have no task for a model of kind {model_kind}",
        where="task",
        expected="; ".join(fit),
        remedy="take a model of that kind, or other data; "
        "where the columns of these have other names, say which play a role: data.columns",
    )


def detect_format(config: DataConfig, folder: Path, objects: Mapping[str, DataObject] = {}) -> str:
    """The format of the first row, without a task to help: for `infer_task`. "docstrings" for the demo
    corpus.

    Raises DataError, also for text beside a column that looks like its label.
    """
    source = find_source(config.path, folder, objects)
    if source.demo and config.format == "auto" and not config.columns:
        return source.demo
    faults = Faults(skip=config.on_bad_line == "skip")
    records = source.records("train", faults, whole=config.chunk)
    first = first_record(records, source.name, faults)
    layout = detect(first, config.format, config.columns, None)
    if layout.format == "text" and config.format == "auto" and not config.chunk:
        refuse_left_label(layout, [first, *itertools.islice(records, LABEL_ROWS)])
    return layout.format


def load_rows(
    config: DataConfig,
    task: str,
    folder: Path,
    *,
    seed: int = 0,
    labels: tuple[str, ...] | None = None,
    objects: Mapping[str, DataObject] = {},
    rate: int | None = None,
) -> Rows:
    """Read and check every row of a run. `folder` is where relative paths start (the recipe's), `seed`
    matters to `split_by: seed` alone.

    `labels` are the classes, in the order of their ids, of a model that has been trained; without them the
    rows define the classes. `objects` are rows given from Python, by the spec that names them in `config`.
    `rate` is that of sounds, in samples a second: a row of another is a bad one.
    Raises DataError with the first ten bad rows, UsageError if format and task do not fit, MachineError if a
    file or the hub cannot be reached.
    """
    find_task(task)
    source = find_source(config.path, folder, objects)
    notes = list(source.notes)
    train, layout = _read(source, "train", config, task, notes, rate)
    if config.chunk and layout.format != "text":
        remedy = "remove data.chunk, or set format: text"
        what = "only plain text is cut into windows"
        raise UsageError(what, where="data.chunk", expected="text", found=layout.format, remedy=remedy)
    if given := held_out_of(source, config.eval, folder, objects):
        held_out, _ = _read(*given, config, task, notes, rate, layout)
        split = keep_apart(
            train, held_out, f"held-out rows {'are' if config.eval else 'come with'} {given[0].name}"
        )
    elif config.chunk and config.split * len(train) < 0.5:
        split = split_documents(train, config.split)
    else:
        salt = f"seed {seed}" if config.split_by == "seed" else ""
        split = split_off(train, config.split, salt)
    notes.append(split.rule)
    if task in WITH_LABELS:
        labels = _known(split, labels) if labels else _labels(split) if task == "classify" else _tags(split)
    kept, held = (sample(rows, config.max_rows) for rows in (split.train, split.eval))
    if len(kept) + len(held) < len(split.train) + len(split.eval):
        sizes = (
            f"{len(kept)} of {len(split.train)} rows to train on, {len(held)} of {len(split.eval)} held out"
        )
        notes.append(f"max_rows: {sizes}, chosen by content hash")
    if layout.format == "judgements":
        kept, held = with_others(kept, held)
    if task in WITH_LABELS:
        notes += [_per_class(kept, held), *_doubtful_classes(kept, held)]
    return Rows(
        kept,
        held,
        labels if task in WITH_LABELS else None,
        layout.format,
        tuple(notes),
        fingerprint(kept, held),
    )


def _read(
    source: DataSource,
    side: str,
    config: DataConfig,
    task: str,
    notes: list[str],
    rate: int | None,
    layout: ColumnLayout | None = None,
) -> tuple[list[Row], ColumnLayout]:
    """The rows of one side, in `layout` or the one found from the first record."""
    faults = Faults(skip=config.on_bad_line == "skip")
    demo = source.demo if config.format == "auto" and not config.columns else None
    records = source.records(side, faults, whole=config.chunk)
    if demo and task in DERIVED:
        records = DERIVED[task](records)
    first = first_record(records, source.name, faults)
    columns: Mapping[str, str] = DEMO[task] if demo else config.columns
    make = RowMaker(
        layout or detect(first, config.format, columns, task),
        task,
        faults,
        drop_empty=demo is not None,
        rate=rate,
    )
    rows = [row for record in itertools.chain((first,), records) if (row := make(record)) is not None]
    if layout is None:
        notes.append(str(make.layout))
    if make.unused and not demo and (left := f"columns not used: {', '.join(make.unused)}") not in notes:
        notes.append(left)
    if skipped := faults.settle(len(rows) + make.dropped):
        notes.append(skipped)
    if make.dropped:
        notes.append(f"{side}: {make.dropped} rows without {' or '.join(make.columns.values())} dropped")
    if faults.blanks:
        notes.append(f"{side}: {faults.blanks} blank lines passed over")
    if not rows:
        found, remedy = f"{make.dropped} dropped", "write rows whose columns are not empty"
        raise DataError("no row is left", where=source.name, found=found, remedy=remedy)
    return rows, make.layout


def _per_class(train: list[Row], held_out: list[Row]) -> str:
    """How many rows each class has on either side, or how many words each tag, the most frequent first."""
    sides = [Counter(label for row in side for label in _labels_of(row)) for side in (train, held_out)]
    order = [label for label, _ in (sides[0] + sides[1]).most_common()]
    told = [f"{label} {sides[0][label]} + {sides[1][label]}" for label in order]
    what = "words per tag" if isinstance(train[0], Tagged) else "rows per class"
    return f"{what}, to train on + held out: {_abridged(told)}"


def _doubtful_classes(train: list[Row], held_out: list[Row]) -> Iterator[str]:
    """Lines about classes that no held-out row has, and about those that differ in case alone."""
    trained, held = ({label for row in side for label in _labels_of(row)} for side in (train, held_out))
    if missed := _in_order(trained - held):
        yield (
            f"warning: labels without a held-out row, of which no score tells: {_abridged(missed)}; use more"
            " rows or a larger data.split"
        )
    folded: dict[str, list[str]] = {}
    for label in _in_order(trained | held):
        folded.setdefault(label.casefold(), []).append(label)
    if alike := [" and ".join(labels) for labels in folded.values() if len(labels) > 1]:
        yield f"warning: labels that differ in case alone are different classes: {_abridged(alike)}"


def _abridged(names: Sequence[str]) -> str:
    more = f" and {len(names) - CLASSES_TOLD} more" if len(names) > CLASSES_TOLD else ""
    return ", ".join(names[:CLASSES_TOLD]) + more


def _labels_of(row: Row) -> tuple[str, ...]:
    """The class of a labelled row, or the tags of its words."""
    return (
        (row.label,) if isinstance(row, Labelled | Pictured) else row.tags if isinstance(row, Tagged) else ()
    )


def _known(split: Split, labels: tuple[str, ...]) -> tuple[str, ...]:
    """`labels`, when every row has one of them. Raises DataError for the first row that has another."""
    for row in (*split.train, *split.eval):
        for label in _labels_of(row):
            if label not in labels:
                what = f"label {label!r} is not one the model knows"
                raise DataError(what, where=row.where, expected=", ".join(labels[:10]))
    return labels


def _tags(split: Split) -> tuple[str, ...]:
    """The tags of both sides: a rare one may be held out alone. Raises DataError unless there is something to
    tell apart."""
    tags = {tag for row in (*split.train, *split.eval) for tag in _labels_of(row)}
    if len(tags) < 2:
        what = "every word has the same tag"
        raise DataError(what, where=split.train[0].where, expected="at least 2 tags", found=", ".join(tags))
    return _in_order(tags)


def _labels(split: Split) -> tuple[str, ...]:
    """The classes trained on, numbers in their order, names in the alphabet's. Raises DataError unless there
    is something to tell apart."""
    counts = Counter(row.label for row in split.train if isinstance(row, Labelled | Pictured))
    first = split.train[0].where
    if len(counts) < 2:
        what = "every row has the same label"
        raise DataError(what, where=first, expected="at least 2 classes", found=repr(next(iter(counts))))
    if len(counts) == len(split.train) > 2:
        what = "every row has a label of its own"
        found = f"{len(counts)} labels"
        raise DataError(what, where=first, found=found, remedy="is it the right column? data.columns.label")
    for row in split.eval:
        if isinstance(row, Labelled | Pictured) and row.label not in counts:
            what = f"label {row.label!r} is held out but never trained on"
            expected = ", ".join(sorted(counts)[:10])
            raise DataError(what, where=row.where, expected=expected, remedy=did_you_mean(row.label, counts))
    return _in_order(counts)


def _in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Numbers in their order, names in the alphabet's."""
    numeric = all(label.lstrip("-").isdecimal() for label in labels)
    return tuple(sorted(labels, key=lambda label: (int(label) if numeric else 0, label)))
