"""Runs as rows of a table: what each is, how far it came, and what came out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from petune.report.files import RunFiles
from petune.report.words import NONE, figure, is_number, moment

KEYS = ("name", "model", "method", "plan", "steps", "metric", "base", "tuned", "began", "state", "folder")
_BEST_LAST = ("base", "tuned", "steps", "began")  # numbers, the largest first


def row(run: RunFiles, name: str) -> dict[str, Any]:
    """The facts of a run by KEYS, as JSON has them. folder: readable, or damaged and by what."""
    faults = run.read().faults
    return {
        "name": name,
        "model": str(run.settings.get("model", "?")),
        "method": run.method,
        "plan": run.plan,
        "steps": run.step,
        "planned": run.planned,
        "metric": run.metric,
        "base": run.score("before"),
        "tuned": run.score("after"),
        "began": round(run.began, 1),
        "state": run.state,
        "folder": f"damaged: {faults[0]}" if faults else "readable",
        "path": str(run.path),
    }


def rows(folders: Sequence[Path], root: Path) -> list[dict[str, Any]]:
    """A row for each run folder, named from `root`."""
    return [row(RunFiles(folder), name_below(folder, root)) for folder in folders]


def name_below(folder: Path, root: Path) -> str:
    """The name of a run found in `root`."""
    return folder.name if folder == root else folder.relative_to(root).as_posix()


def ordered(found: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Rows by one of KEYS: texts from a to z, numbers from the largest to the smallest, unknown ones last."""

    def place(one: dict[str, Any]) -> tuple[float, str]:
        value = one[key]
        if key in _BEST_LAST:
            return (-value if is_number(value) else math.inf), str(one["name"])
        return 0.0, str(value)

    return sorted(found, key=place)


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    """A row as people read it, in the order of KEYS."""
    steps, planned = found["steps"], found["planned"]
    written = {
        "steps": figure(steps) + (f" of {planned:,}" if planned not in (None, steps) else ""),
        "base": figure(found["base"]),
        "tuned": figure(found["tuned"]),
        "began": moment(found["began"]),
    }
    return tuple(str(written.get(key, found[key]) or NONE) for key in KEYS)
