"""The same facts on a terminal and in a pipe, and a terminal left as it was found."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from petune_cli.display import Live, columns, reporter, score_table
from rich.console import Console

from petune.run.reporting import PlainReporter, Reporter


def record(step: int) -> dict[str, Any]:
    """One training step as the loop reports it."""
    return {
        "step": step,
        "epoch": step / 10,
        "loss": 1.5 / step,
        "lr": 1e-4,
        "grad_norm": 0.5,
        "tokens": 64,
        "tokens_per_s": 1234.5,
    }


def play(shown: Reporter, steps: int) -> None:
    """A whole short run."""
    shown.header(["petune 0.1.0", "rows [100]"], steps)
    for step in range(1, steps + 1):
        shown.step(record(step))
    shown.evaluated({"step": steps, "epoch": 1.0, "eval_accuracy": 0.75})
    shown.note("a note")
    shown.done(["accuracy 0.5 -> 0.75", "next: petune eval runs/x"])


def test_plain_lines_go_to_standard_output_and_stay_few(capsys: pytest.CaptureFixture[str]) -> None:
    with reporter() as shown:
        play(shown, 1000)
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) <= 21
    assert steps[0].startswith("step 1/1000")
    assert steps[-1].startswith("step 1000/1000")
    assert "accuracy 0.7500" in "\n".join(lines)
    assert lines[-1] == "next: petune eval runs/x"


def test_a_pipe_gets_plain_lines_without_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    with reporter() as shown:
        assert isinstance(shown, PlainReporter)
        play(shown, 3)
    assert "\x1b" not in capsys.readouterr().out


def test_a_terminal_gets_a_bar_that_reaches_its_end() -> None:
    screen = io.StringIO()
    live = Live(Console(file=screen, force_terminal=True, width=120))
    play(live, 4)
    text = screen.getvalue()
    assert "4/4" in text
    assert "loss 0.3750" in text and re.search(r"peak \d", text)
    assert "rows [100]" in text, "what looks like markup is text"
    assert "accuracy 0.7500" in text


def test_the_bar_is_taken_down_when_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with pytest.raises(RuntimeError), reporter() as shown:
        assert isinstance(shown, Live)
        shown.header(["x"], 2)
        raise RuntimeError
    assert not shown.bar.live.is_started


def test_columns_line_up() -> None:
    assert columns([("a", "bb"), ("ccc", "d")]) == ["a    bb", "ccc  d"]


def test_scores_of_models_stand_side_by_side_and_gaps_are_shown() -> None:
    assert score_table({"base": {"loss": 1.0}, "tuned": {"loss": 0.5, "f1": 1.0}, "rows": 3}) == [
        "metric  base    tuned",
        "loss    1.0000  0.5000",
        "f1      -       1.0000",
        "rows: 3",
    ]
    assert score_table({"loss": 0.25}) == ["loss: 0.2500"]
