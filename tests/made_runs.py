"""Run folders made by hand, without a model: what the tests of pages and tables of runs read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from petune.files.json_fields import sealed

RUN_ID = "0123456789abcdef0123456789abcdef"
LABELS = ("good", "bad")
VOID = {"meta", "br", "img"}


def step_records(count: int, first: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """Records of `count` steps whose loss falls; `changes` go over each."""
    return [
        {
            "step": step,
            "epoch": step / 10,
            "loss": 2 / (1 + step / 10) + 0.1 * math.sin(step),
            "lr": 1e-3 * (1 - step / (count + first)),
            "grad_norm": 1 + math.cos(step) / 2,
            "tokens": 100 * step,
            "tokens_per_s": 1000.0 + step,
        }
        | changes
        for step in range(first, first + count)
    ]


def evaluation(step: int, accuracy: float, **changes: Any) -> dict[str, Any]:
    """The record of an evaluation of 20 rows, 10 of each class."""
    right = round(10 * accuracy)
    found = {"step": step, "epoch": step / 10, "eval_loss": 1 - accuracy / 2, "eval_accuracy": accuracy}
    return found | {"confusion": [[right, 10 - right], [10 - right, right]]} | changes


def resolved(**changes: Any) -> dict[str, Any]:
    """Settings as a run notes them."""
    method = {"name": "lora", "r": 8, "alpha": None, "targets": "auto"}
    found = {"name": "made", "model": "demo:minilm", "data": {"path": "rows.jsonl"}, "method": method}
    return found | {"lr": 1e-3, "seed": 0, "parallel": "none"} | changes


def setup(steps: int, /, **changes: Any) -> dict[str, Any]:
    """What a run knows before its first step."""
    data = {"rows": 100, "eval_rows": 20, "p50": 12, "p95": 30, "longest": 40, "limit": 32, "truncated": 3}
    data |= {"dropped": 1, "eval_dropped": 0, "tokens": 1500, "trained": None, "bins": None}
    data |= {"truncation": "right", "notes": [], "sources": ["format text-label"]}
    data |= {"lengths": [[1, 20, 80], [21, 40, 20]], "classes": {"rows to train on": {"good": 60, "bad": 40}}}
    return {
        "run_id": RUN_ID,
        "began": 1.75e9,
        "method": "lora(r=8)",
        "task": "classify",
        "labels": list(LABELS),
        "metric": "accuracy",
        "parameters": {"trained": 1000, "total": 50_000},
        "numbers": "fp32 on cpu",
        "steps": {"total": steps, "per_epoch": 10, "per_step": 8, "unit": "rows"},
        "data": data,
        "plan": {"words": "one process", "world": 1, "ranks": []},
        "warnings": [],
    } | changes


def summary(steps: int, /, **changes: Any) -> dict[str, Any]:
    """What came of a run."""
    before, after = {"loss": 1.0, "accuracy": 0.5}, {"loss": 0.55, "accuracy": 0.9}
    return {
        "run_id": RUN_ID,
        "task": "classify",
        "metric": "accuracy",
        "held_out": 20,
        "before": before,
        "after": after,
        "last": after,
        "head_only": 0.7,
        "loss": [2.0, 0.4],
        "steps": steps,
        "best_step": steps,
        "tokens": 100 * steps,
        "seconds": 75.0,
        "tokens_per_s": 1234.5,
        "peak_memory_bytes": 3 << 20,
        "memory": [{"frozen": 1 << 20, "tuned": 1 << 10, "optimizer": 1 << 11, "peak": 3 << 20}],
        "warnings": [],
        "notes": [],
    } | changes


def write_run(
    folder: Path,
    steps: int = 40,
    *,
    records: list[dict[str, Any]] | None = None,
    finished: bool = True,
    settings: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    came_out: Mapping[str, Any] | None = None,
) -> Path:
    """A run folder of `steps` steps; `settings`, `facts` and `came_out` go over what its files hold."""
    folder.mkdir(parents=True)
    if records is None:
        records = [evaluation(0, 0.5), *step_records(steps), evaluation(steps, 0.9)]
    write_json(folder / "resolved.yaml", resolved(**(settings or {})))  # JSON is YAML
    write_json(folder / "recipe.yaml", {"model": "demo:minilm"})
    write_json(folder / "setup.json", setup(steps, **(facts or {})))
    write_json(folder / "env.json", {"run_id": RUN_ID, "packages": {"torch": "2.9"}, "python": "3.11"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run.log").write_text("2025-06-15 10:00:00 step 1/40\n")
    if finished:
        write_json(folder / "summary.json", sealed(summary(steps, **(came_out or {}))))
    return folder


def write_json(path: Path, value: object) -> None:
    """A value as a JSON file."""
    path.write_text(json.dumps(value), encoding="utf-8")


class Parsed(HTMLParser):
    """A page as a browser's parser sees it: its elements with their attributes, and its text without that of
    styles and scripts. `unclosed`: elements that were never closed, or in another order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.unclosed: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        self.unclosed += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the element that was opened last."""
        if not self.open or self.open.pop() != tag:
            self.unclosed.append(tag)

    def handle_data(self, data: str) -> None:
        """Note a text."""
        if not {"style", "script"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        """What a person reads."""
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str, class_: str = "") -> list[dict[str, str]]:
        """The attributes of every element of this kind that has all words of `class_`."""
        words = set(class_.split())
        return [
            found
            for name, found in self.elements
            if name == tag and words <= set(found.get("class", "").split())
        ]
