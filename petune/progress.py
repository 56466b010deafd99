"""What a run knows of itself beside its tensors: how far it has come, and its scores."""

from __future__ import annotations

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
