"""What a finished run left to be read: summary.json, strictly, and metrics.jsonl, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from petune.files.json_fields import (
    Fields,
    IntegerValue,
    Kind,
    ListOf,
    MapOf,
    Number,
    OneOf,
    TextValue,
    TupleValue,
    check_fields,
    check_seal,
)
from petune.files.safetensors import read_json

_SCORE = Number()
_SCORES = MapOf(_SCORE, least=1)
_MAYBE = OneOf(_SCORE, None)
_SUMMARY: Mapping[str, Kind] = {
    "rows": TextValue(),
    "num_labels": IntegerValue(),
    "metric": TextValue(),
    "before": _SCORES,
    "after": _SCORES,
    "head_only": _MAYBE,
    "loss": TupleValue(_SCORE, _SCORE),
    "steps": IntegerValue(),
    "best_step": OneOf(IntegerValue(), None),
    "tokens": IntegerValue(),
    "seconds": Number(0),
    "tokens_per_s": Number(0),
    "peak_memory_bytes": IntegerValue(),
    "warnings": ListOf(TextValue()),
}
_ADDED: Mapping[str, Kind] = {
    "last": MapOf(_SCORE),
    "direction": TextValue(("max", "min")),
    "lr": OneOf(Number(0, 1e9), None),
    "held_out": IntegerValue(),
    "notes": ListOf(TextValue()),
}  # not in every release's


def read_summary(
    file: Path, tasks: Mapping[str, Mapping[str, str]], formats: Sequence[str]
) -> dict[str, Any]:
    """The summary.json of a finished run. `tasks`: the metrics of each task. Raises FileError naming the
    fields that do not fit."""
    found = read_json(file)
    check_seal(found, file)
    named: dict[str, Kind] = {"task": TextValue(tuple(tasks)), "format": TextValue(formats)}
    check_fields(found, Fields({**_SUMMARY, **named}, _ADDED, others=True), file)
    metrics = tasks[found["task"]]
    needed = {found["metric"], "loss"} | ({"accuracy"} if found["head_only"] is not None else set())
    scores = Fields(dict.fromkeys(sorted(needed & metrics.keys()), _SCORE), others=True)
    at_end = {"last": scores} if found.get("last") else {}
    check_fields(
        found,
        Fields(
            {"metric": TextValue(tuple(metrics)), "before": scores, "after": scores, **at_end}, others=True
        ),
        file,
    )
    return {name: value for name, value in found.items() if name != "seal"}


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Every record of a metrics.jsonl that is whole: a crash cuts off the last line."""
    if not file.exists():
        return []
    return records_in(file.read_text(encoding="utf-8", errors="replace").splitlines())


def records_in(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The records among lines."""
    return [record for line in lines if (record := record_of(line)) is not None]


def record_of(line: str | bytes) -> dict[str, Any] | None:
    """What a line says where it is a record: a JSON object with a whole `step`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None
