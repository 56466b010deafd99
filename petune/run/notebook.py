"""A run in a notebook: a progress bar, the latest numbers and the loss curve, in one cell output that is
drawn anew as the run goes on."""

from __future__ import annotations

import html
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from petune.run.plot import loss_svg
from petune.run.reporting import PlainReporter, Reporter, score_line, step_line

BETWEEN = 0.5  # seconds between two drawings of steps


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook. IPython is asked where it is loaded, and never
    imported for it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def fitting_reporter() -> Reporter:
    """A NotebookReporter in a notebook, plain lines elsewhere."""
    return NotebookReporter() if in_notebook() else PlainReporter()


class NotebookReporter:
    """A reporter for notebooks, drawn as HTML by IPython's display."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.latest = ""
        self.records: list[Mapping[str, Any]] = []
        self.at, self.total, self.drawn = 0, 1, 0.0
        self.place = uuid.uuid4().hex  # of the output in the notebook

    def header(self, lines: Sequence[str], total_steps: int) -> None:
        """Show the header and an empty bar."""
        self.lines += lines
        self.total = total_steps
        import_module("IPython.display").display(self, display_id=self.place)

    def step(self, record: Mapping[str, Any]) -> None:
        """Move the bar; the output is drawn anew twice a second at most."""
        self.records.append(record)
        self.at, self.latest = int(record["step"]), step_line(record, self.total)
        if time.monotonic() - self.drawn >= BETWEEN or self.at == self.total:
            self._draw()

    def evaluated(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        self.note(score_line(record))

    def note(self, line: str) -> None:
        self.done([line])

    def done(self, lines: Sequence[str]) -> None:
        self.lines += lines
        self._draw()

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        import_module("IPython.display").update_display(self, display_id=self.place)

    def _repr_html_(self) -> str:
        """What the notebook shows."""
        bar = f'<progress value="{self.at}" max="{self.total}" style="width: 100%"></progress>'
        text = "\n".join(html.escape(line) for line in (*self.lines, self.latest))
        return f"<div>{bar}<pre>{text}</pre>{loss_svg(self.records)}</div>"
