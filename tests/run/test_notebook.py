"""In a notebook a run shows a bar and its curve in one output; anywhere else nothing of IPython is
touched."""

from __future__ import annotations

import sys
import types
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import petune
from petune.run.notebook import NotebookReporter, fitting_reporter, in_notebook
from petune.run.reporting import PlainReporter
from tests.small_runs import settings

pytestmark = pytest.mark.usefixtures("no_picture")


class Display:
    """What IPython.display would show: the HTML of each drawing, by its place."""

    def __init__(self) -> None:
        self.drawn: dict[str, list[str]] = {}

    def display(self, shown: Any, *, display_id: str) -> None:
        assert display_id not in self.drawn
        self.drawn[display_id] = [shown._repr_html_()]

    def update_display(self, shown: Any, *, display_id: str) -> None:
        self.drawn[display_id].append(shown._repr_html_())


def ipython(monkeypatch: pytest.MonkeyPatch, shell: Any) -> Display:
    """A stand-in for IPython whose running shell is `shell`."""
    shown = Display()
    module: Any = types.ModuleType("IPython")
    module.get_ipython = lambda: shell
    display: Any = types.ModuleType("IPython.display")
    display.display, display.update_display = shown.display, shown.update_display
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


@pytest.mark.parametrize("shell", [None, types.SimpleNamespace()], ids=["no shell", "IPython on a terminal"])
def test_outside_a_notebook_a_run_speaks_in_lines(shell: Any, monkeypatch: pytest.MonkeyPatch):
    ipython(monkeypatch, shell)
    assert not in_notebook() and isinstance(fitting_reporter(), PlainReporter)


def test_ipython_is_not_imported_to_find_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook() and "IPython" not in sys.modules


def test_a_run_in_a_notebook_is_one_output_with_bar_lines_and_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    shown = ipython(monkeypatch, types.SimpleNamespace(kernel=object()))
    monkeypatch.setattr("petune.run.notebook.BETWEEN", 0.0)
    run = petune.train(settings(tmp_path, eval_every=3))
    (drawings,) = shown.drawn.values()
    assert [f'value="{step}" max="6"' in drawings[-1] for step in (5, 6)] == [False, True]
    assert sum('value="2"' in one for one in drawings) == 1
    assert (
        "method   lora(r=2" in drawings[0]
        and "step 6/6" in drawings[-1]
        and "evaluation at step 3" in drawings[-1]
    )
    assert "<svg" not in drawings[0] and "<svg" in drawings[-1]
    assert "step 6/6" not in capfd.readouterr().out
    for text in (drawings[-1], run._repr_html_()):
        ET.fromstring(text)  # well-formed
    assert "<td>loss</td>" in run._repr_html_() and "<svg" in run._repr_html_()


def test_steps_are_drawn_twice_a_second_at_most_and_the_last_always(monkeypatch: pytest.MonkeyPatch):
    shown = ipython(monkeypatch, types.SimpleNamespace(kernel=object()))
    clock = iter(range(10_000))
    monkeypatch.setattr("petune.run.notebook.time.monotonic", lambda: next(clock) / 100)
    reporter = NotebookReporter()
    reporter.header(["model <b>x</b>"], 300)
    for step in range(1, 301):
        reporter.step(
            {"step": step, "epoch": 0.1, "loss": 1 / step, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 9.0}
        )
    (drawings,) = shown.drawn.values()
    assert 5 < len(drawings) < 12 and 'value="300"' in drawings[-1]
    assert "model &lt;b&gt;" in drawings[-1]
