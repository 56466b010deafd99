"""What a run knows of itself beside its tensors: how far it has come, and its scores; and the same read back
from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petune.errors import FileError, Problem
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
)
from petune.tasks import MARK


@dataclass
class Progress:
    """What a run knows of itself beside its tensors; JSON in every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    before: dict[str, float] = field(default_factory=dict)
    head_only: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    scored_step: int = -1
    best_step: int | None = None
    best_value: float | None = None
    best_scores: dict[str, float] = field(default_factory=dict)
    worse: int = 0
    # loss and gradient norm of the last steps, by which spikes are judged
    recent: list[list[float]] = field(default_factory=list)
    spikes: int = 0  # in a row

    def advance(self, loss: float, tokens: int, seconds: float, *, trained: bool) -> None:
        """Count a step; one that has `trained` nothing has taken its time, and its rows their turn."""
        self.step += 1
        self.seconds += seconds
        if trained:
            self.tokens += tokens
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss = loss

    def score(self, scores: dict[str, float], metric: str, larger_is_better: bool) -> bool:
        """Take the scores of this step; whether `metric` is the best so far. A value that is not finite never
        is."""
        self.scores, self.scored_step = scores, self.step
        before = self.best_value
        better = self._take_best(self.step, scores, metric, larger_is_better)
        self.worse = 0 if better and self.best_value != before else self.worse + 1
        return better

    def _take_best(self, step: int, scores: dict[str, float], metric: str, larger_is_better: bool) -> bool:
        """Take the scores of `step` as the best ones where they are better; of equal values the lower loss
        decides."""
        value, best = scores[metric], self.best_value
        better = math.isfinite(value) and (
            best is None or (value > best if larger_is_better else value < best)
        )
        better = better or (value == best and scores["loss"] < self.best_scores["loss"])
        if better:
            self.best_value, self.best_step, self.best_scores = value, step, scores
        return better

    def choose_best(self, saved: Iterable[Progress], metric: str, larger_is_better: bool) -> None:
        """Take the best of the `saved` states that were scored, which come in the order of their steps; none
        where none was."""
        self.best_step, self.best_value, self.best_scores = None, None, {}
        for one in saved:
            if one.scored_step == one.step:
                self._take_best(one.step, one.scores, metric, larger_is_better)

    def summary(self, scores: Mapping[str, float]) -> dict[str, Any]:
        """The share of summary.json that is known here; `scores` are those of what `tuned/` holds."""
        return {
            "before": self.before,
            "after": dict(scores),
            "last": self.scores,
            "head_only": self.head_only,
            "loss": [self.first_loss, self.last_loss],
            "steps": self.step,
            "best_step": self.best_step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 2),
            "tokens_per_s": round(self.tokens / max(self.seconds, 1e-9), 1),
        }


_MAYBE = OneOf(Number(), None)
_SCORES = MapOf(Number())
_KINDS: Mapping[str, Kind] = {
    "step": IntegerValue(),
    "tokens": IntegerValue(),
    "seconds": Number(0),
    "before": _SCORES,
    "head_only": _MAYBE,
    "first_loss": _MAYBE,
    "last_loss": _MAYBE,
    "scores": _SCORES,
    "scored_step": IntegerValue(-1),
    "best_step": OneOf(IntegerValue(), None),
    "best_value": _MAYBE,
    "best_scores": _SCORES,
    "worse": IntegerValue(),
}
# not in every checkpoint
_LATER: Mapping[str, Kind] = {"recent": ListOf(TupleValue(Number(), Number())), "spikes": IntegerValue()}
_FACTS: Mapping[str, Kind] = {
    "progress": Fields(_KINDS, _LATER),
    "rows": TextValue(),
    "frozen": TextValue(),
    "method": TextValue(),
}

_MAY = {"stream": MARK}


def read_progress(
    facts: Mapping[str, Any], step: int, planned: int | None, metric: str, path: Path
) -> Progress:
    """The progress in the `facts` of the manifest of the checkpoint of `step` at `path`.

    planned: the steps of the whole run, if they are the same. metric: the one that says what is best.

    A seal is no signature: whoever edits a manifest can seal it again. Raises FileError for a field that is
    missing or of another kind, and for a progress that contradicts the manifest's step, the plan or itself.
    """
    file = path / "manifest.json"
    check_fields(facts, Fields(_FACTS, _MAY, others=True), file, "facts")
    progress = Progress(**facts["progress"])
    told = [name for name in ("before", "scores", "best_scores") if getattr(progress, name)]
    # each evaluation gives the same scores
    names = {metric, "loss"}.union(*(getattr(progress, name) for name in told))
    evaluation = Fields(dict.fromkeys(sorted(names), Number()))
    check_fields(
        facts["progress"], Fields(dict.fromkeys(told, evaluation), others=True), file, "facts.progress"
    )
    limits = {"step": step, "scored_step": progress.step, "best_step": progress.step, "worse": progress.step}
    problems = []

    def fault(what: str, name: str, expected: str | None = None) -> None:
        found = str(getattr(progress, name))
        problems.append(Problem(what, f"{file}  facts.progress.{name}", expected, found))

    for name, limit in limits.items():
        if (getattr(progress, name) or 0) > limit:
            fault("is beyond the step", name, f"at most {limit}")
    nothing = progress.best_step is None and progress.best_value is None and not progress.best_scores
    if not nothing and (
        progress.best_step is None or progress.best_value not in progress.best_scores.values()
    ):
        fault("is none of the best scores", "best_value")
    if bool(progress.scores) != (progress.scored_step > 0):
        fault("does not go with the scores", "scored_step")
    if progress.step != step:
        problems.clear()
        fault("contradicts the manifest's step", "step", str(step))
    if planned is not None and step > planned:
        problems.append(
            Problem("is beyond the end of the run", f"{file}  step", f"at most {planned}", str(step))
        )
    if problems:
        raise FileError([*problems, Problem("the manifest was edited", remedy="use another checkpoint")])
    return progress
