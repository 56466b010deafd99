"""The first rows of every file a data config names: enough to know that they can be read, without reading
them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from petune.tasks.bad_rows import Faults
from petune.tasks.configs import DataConfig
from petune.tasks.formats import DEMO, NEEDS, TASK_FORMATS, detect
from petune.tasks.media import FORMAT_OF, refuse_other_format
from petune.tasks.row_maker import RowMaker
from petune.tasks.rows import Row
from petune.tasks.sources import find_source, first_record, held_out_of

FIRST_ROWS = 100
FEW_ROWS = 10  # of these what costs more is asked


def hub_specs(config: DataConfig, folder: Path) -> tuple[str, ...]:
    """Those of `path` and `eval` that name data of the hub, which is not on this machine. Raises DataError
    for one that names nothing."""
    return tuple(spec for spec in (config.path, config.eval) if spec and find_source(spec, folder).hub)


def check_first_rows(
    config: DataConfig,
    task: str,
    folder: Path,
    *,
    reads: str | None,
    rate: int | None,
    look: Callable[[Sequence[Row]], object] | None,
) -> tuple[str, ...]:
    """Read the first rows of each side as `load_rows` would, in the layout of the very first; the
    columns that play no role.

    reads: what the model reads, "text", "image" or "audio", None where nobody knows; rate: of its sounds;
    look: is given the FEW_ROWS first good ones of each side, and may raise.
    Data of the hub is left alone. Raises DataError for rows that cannot be read, UsageError where format and
    task, or format and model, do not fit.
    """
    unused: dict[str, None] = {}
    layout, source, distant = None, find_source(config.path, folder), hub_specs(config, folder)
    train = None if source.hub else (source, "train")
    held_out = None if (config.eval or config.path) in distant else held_out_of(source, config.eval, folder)
    for source, side in filter(None, (train, held_out)):
        if source.demo:
            if reads in FORMAT_OF and not config.columns and config.format == "auto":
                refuse_other_format(_format_of_demo(task), str(reads))
            continue
        faults = Faults(skip=config.on_bad_line == "skip")
        records = itertools.islice(source.records(side, faults, whole=config.chunk), FIRST_ROWS)
        first = first_record(records, source.name, faults)
        layout = layout or detect(first, config.format, config.columns, task)
        if reads is not None:
            refuse_other_format(layout.format, reads)
        make = RowMaker(layout, task, faults, rate=rate)
        good = [row for record in (first, *records) if (row := make(record)) is not None]
        unused |= dict.fromkeys(make.unused)
        if not faults.skip:  # of all rows few may be bad; the first say little of that
            faults.settle(len(good))
        if look is not None:
            look(good[:FEW_ROWS])
    return tuple(unused)


def _format_of_demo(task: str) -> str:
    """The format that rows of the demo corpus have for a task."""
    return next(name for name in TASK_FORMATS[task] if set(NEEDS[name]) <= DEMO[task].keys())
