"""What a run knows of its scores: which state is the best one, and which when that one is gone."""

from __future__ import annotations

from petune.run.progress import Progress


def scored(step: int, value: float, loss: float = 1.0, at: int | None = None) -> Progress:
    return Progress(
        step=step, scores={"accuracy": value, "loss": loss}, scored_step=step if at is None else at
    )


def test_the_best_of_saved_states_is_chosen_by_value_then_loss_then_step() -> None:
    progress = Progress(
        step=9, best_step=7, best_value=0.9, best_scores={"accuracy": 0.9, "loss": 0.1}, worse=2
    )
    progress.choose_best(
        [scored(2, 0.5), scored(4, 0.7, 0.9), scored(5, 0.7), scored(6, 0.8, at=5)], "accuracy", True
    )
    assert (progress.best_step, progress.best_value, progress.worse) == (4, 0.7, 2)
    assert progress.best_scores == {"accuracy": 0.7, "loss": 0.9}
    progress.choose_best([scored(2, 0.5), scored(4, 0.7), scored(5, float("nan"))], "accuracy", False)
    assert progress.best_step == 2
    progress.choose_best([scored(6, 0.8, at=5)], "accuracy", True)
    assert (progress.best_step, progress.best_value, progress.best_scores) == (None, None, {})
