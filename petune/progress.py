"""What a run knows of itself beside its tensors: how far it has come, and its scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    recent: list[list[float]] = field(default_factory=list)  # loss and gradient norm of the last steps, by which spikes are judged
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
        """Take the scores of this step; whether `metric` is the best so far. A value that is not finite never is."""
        self.scores, self.scored_step = scores, self.step
        value, best = scores[metric], self.best_value
        better = math.isfinite(value) and (best is None or (value > best if larger_is_better else value < best))
        self.worse = 0 if better else self.worse + 1
        better = better or (value == best and scores["loss"] < self.best_scores["loss"])  # the loss decides between equals
        if better:
            self.best_value, self.best_step, self.best_scores = value, self.step, scores
        return better

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
