"""How a run looks while it runs: a live bar on a terminal, under a plan with its ranks below it; plain lines
everywhere else, the same words in both."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from petune.log import human, printable
from petune_cli.echo import echo, echo_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from petune.run.reporting import Reporter

WIDE = 100  # columns of a terminal with room for one figure more


@contextmanager
def reporter() -> Iterator[Reporter]:
    """The reporter that fits standard output; the bar is taken down whatever ends the run."""
    if not sys.stdout.isatty():
        from petune.run.reporting import PlainReporter  # with torch, which tables are shown without

        yield PlainReporter(echo_line)
        return
    live = Live()
    try:
        yield live
    finally:
        live.close()


class Live:
    """Reporter: a progress bar with loss, learning rate, speed, time left and, on a wide terminal, the most
    memory that was held, and below it the ranks of a plan; everything else is printed above.

    in_ranks: where the first rank of a plan, which is a process of its own, finds the same.
    """

    in_ranks: ClassVar[str] = "petune_cli.display:Live"

    def __init__(self, console: Console | None = None) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        class WithRanks(Progress):
            """Drawn several times a second, whether the run goes on or waits for a rank."""

            def get_renderables(_) -> Iterator[RenderableType]:
                yield from super().get_renderables()
                yield from self._panel()

        self.held: Sequence[Mapping[str, Any]] = ()
        self.bar = WithRanks(
            *(TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None)),
            TextColumn("loss {task.fields[loss]}  lr {task.fields[lr]}  {task.fields[speed]} tokens/s"),
            TextColumn("{task.fields[peak]}"),
            *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
            console=console,
        )
        self.task = self.bar.add_task("training", total=None, loss="-", lr="-", speed="-", peak="")

    def ranks(self, held: Sequence[Mapping[str, Any]]) -> None:
        """Show a line a rank from now on. held: what each holds."""
        self.held = held

    def _panel(self) -> Iterator[RenderableType]:
        if self.held:
            from petune.parallel.launch.process_group import health
            from petune_cli.ranks import panel

            yield panel(health(), self.held)

    def header(self, lines: Sequence[str], total_steps: int) -> None:
        self._print(lines, first="bold")
        self.bar.update(self.task, total=total_steps)
        self.bar.start()

    def step(self, record: Mapping[str, Any]) -> None:
        shown: dict[str, Any] = {
            "loss": f"{record['loss']:.4f}",
            "lr": f"{record['lr']:.1e}",
            "speed": f"{record['tokens_per_s']:,.0f}",
            "peak": self._peak(),
        }
        self.bar.update(self.task, completed=record["step"], **shown)

    def _peak(self) -> str:
        """The most memory that this process has held; empty where a rank's line says it, or room is short."""
        if self.held or self.bar.console.width < WIDE:
            return ""
        import torch

        from petune.run.summary import peak_memory

        return f"peak {human(peak_memory(torch.device('cuda' if torch.cuda.is_initialized() else 'cpu')))}"

    def evaluated(self, record: Mapping[str, Any]) -> None:
        from petune.run.reporting import score_line

        self._print([score_line(record)])

    def note(self, line: str) -> None:
        self._print([line])

    def done(self, lines: Sequence[str]) -> None:
        self.close()
        self._print(lines, first="bold")

    def close(self) -> None:
        """Take the bar down; more than once does no harm."""
        self.bar.stop()

    def aside(self, line: str, world: int) -> None:
        """Print a line while the first of `world` ranks has a bar of its own on this terminal: below what it
        has drawn, which is left standing, with room for it to draw on."""
        from petune_cli.ranks import height

        self.bar.console.print("\n" + printable(line) + "\n" * height(world), markup=False, highlight=False)

    def _print(self, lines: Sequence[str], first: str | None = None) -> None:
        for at, line in enumerate(lines):
            self.bar.console.print(
                printable(line),
                style=first if at == 0 else None,
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, without: Collection[str] = ()) -> None:
    """Print a table: drawn on a terminal, columns of plain text elsewhere. without: the heads of columns that
    are left out."""
    shown = [at for at, head in enumerate(heads) if head not in without]
    heads, *rows = ([row[at] for at in shown] for row in (heads, *rows))
    if not sys.stdout.isatty():
        echo("\n".join(columns([heads, *rows])))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = max(len(printable(row[0])) for row in (heads, *rows))  # what a row is called is never cut
    table.add_column(heads[0], overflow="fold", width=min(names, console.width // 3))
    for head in heads[1:]:
        table.add_column(head)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # not as markup, which a name may hold
    console.print(table)


def show_json(value: object) -> None:
    """Print plain data as JSON; a number that is none (NaN, infinite) as null, which JSON has."""
    echo(json.dumps(_finite(value), indent=2, ensure_ascii=not sys.stdout.isatty()))


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as aligned lines, two spaces between the columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def score_table(scores: Mapping[str, Any]) -> list[str]:
    """What an evaluation found, one line a metric and one column a model; values that belong to no model
    stand below."""
    models = [name for name, value in scores.items() if isinstance(value, Mapping)]
    metrics = list(dict.fromkeys(metric for name in models for metric in scores[name]))
    rows = [
        ["metric", *models],
        *([metric, *(_cell(scores[name].get(metric)) for name in models)] for metric in metrics),
    ]
    return (columns(rows) if models else []) + [
        f"{name}: {_cell(value)}" for name, value in scores.items() if name not in models
    ]


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
