"""`petune train`."""

from __future__ import annotations

from typing import Annotated

import typer

from petune.errors import UsageError
from petune.log import phase
from petune_cli.arguments import Given, Words
from petune_cli.display import reporter


def train(
    words: Words = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint that verifies.")
    ] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--from", metavar="STEP", help="Go on from exactly this checkpoint folder.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in the folder `out`.")
    ] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-change", metavar="KEY", help="A key that may differ when resuming; repeatable."
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts",
            min=0,
            metavar="N",
            help="Replace a process that dies and go on from the newest saved state, up to N times.",
        ),
    ] = 0,
) -> None:
    """Train a recipe; without one, the demo."""
    if overwrite and (resume or checkpoint):
        raise UsageError(
            "--overwrite starts anew and --resume goes on", where="command line", remedy="give one of the two"
        )
    with phase("loading torch and transformers"):
        recipe = Given.of(words).recipe()
        from petune.run.train import train as run_training
        from petune_cli.report import complete

    with reporter() as shown:
        run = run_training(
            recipe,
            resume=checkpoint or resume,
            overwrite=overwrite,
            allow_change=tuple(allow_change or ()),
            reporter=shown,
            restarts=restarts,
        )
    if recipe.report:
        complete(run.folder)
