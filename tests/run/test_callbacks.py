"""Callbacks hear every step and every evaluation, may end the run, and when they fail the run says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import petune
from petune.errors import UsageError
from petune.run.callbacks import Callbacks
from tests.small_runs import Listener, run, settings

pytestmark = pytest.mark.usefixtures("no_picture")


class Heard(petune.Callback):
    """Keeps what it is told; ends the run at `end_at` of on_step or on_eval."""

    def __init__(self, method: str = "", end_at: int = 0) -> None:
        self.method, self.end_at = method, end_at
        self.told: list[tuple[str, int, Mapping[str, Any]]] = []

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> bool | None:
        self.told.append(("on_step", step, metrics))
        return (self.method, self.end_at) == ("on_step", step)

    def on_eval(self, step: int, metrics: Mapping[str, Any]) -> bool | None:
        self.told.append(("on_eval", step, metrics))
        return (self.method, self.end_at) == ("on_eval", step)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.told.append(("on_end", summary["steps"], summary))


def test_callbacks_hear_what_the_history_holds(tmp_path: Path):
    heard = Heard()
    found = run(settings(tmp_path, eval_every=4), callbacks=[heard])
    assert [(method, step) for method, step, _ in heard.told] == [
        *(("on_step", step) for step in (1, 2, 3, 4)),
        ("on_eval", 4),
        *(("on_step", step) for step in (5, 6)),
        ("on_eval", 6),
        ("on_end", 6),
    ]
    of_step_four = heard.told[3][2] | heard.told[4][2]
    assert found.history[4] == {"step": 4} | of_step_four
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "eval_loss"} <= of_step_four.keys()
    assert heard.told[-1][2] == found.summary


@pytest.mark.parametrize(("method", "at"), [("on_step", 3), ("on_eval", 4)])
def test_a_callback_that_answers_true_ends_the_run_scored_saved_and_finished(
    method: str, at: int, tmp_path: Path
):
    listener = Listener()
    found = run(
        settings(tmp_path, eval_every=4, save_every=50), listener, callbacks=[Heard(method, at), Heard()]
    )
    assert found.summary["steps"] == at and found.history[-1]["step"] == at
    assert found.summary["after"]["loss"] == found.history[-1]["eval_loss"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{at}").is_dir()
    assert f"stopped early: Heard asked for it at step {at}" in listener.notes


class Failing(petune.Callback):
    def on_step(self, step: int, metrics: Mapping[str, Any]) -> bool | None:
        raise KeyError("acc")


class Talking(petune.Callback):
    def on_step(self, step: int, metrics: Mapping[str, Any]) -> Any:
        return {"loss": 1.0}


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (Failing(), r"Failing.on_step  the callback failed at step 1: KeyError: 'acc'"),
        (Talking(), "answers True, which ends the run"),
    ],
)
def test_a_callback_that_fails_ends_the_run_by_its_name(
    callback: petune.Callback, words: str, tmp_path: Path
):
    with pytest.raises(UsageError, match=words):
        run(settings(tmp_path), callbacks=[callback])
    if isinstance(callback, Failing):
        assert (
            "KeyError: 'acc'" in (tmp_path / "run" / "run.log").read_text()
            and "Traceback" in (tmp_path / "run" / "run.log").read_text()
        )


@pytest.mark.parametrize("wrong", [Heard, print, {"on_step": print}])
def test_what_is_no_callback_is_refused_before_anything_is_read(wrong: Any):
    with pytest.raises(UsageError, match="this is not a callback"):
        Callbacks([wrong])


def test_callbacks_do_not_reach_ranks(tmp_path: Path):
    with pytest.raises(UsageError, match=r"callbacks in memory cannot reach .* parallel plan"):
        run(settings(tmp_path, parallel={"dp": 2}), callbacks=[Heard()])
    assert not (tmp_path / "run").exists()
