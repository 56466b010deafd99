"""`petune report`: runs as one page that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from petune_cli.arguments import Metrics, Overwrite, refuse_place
from petune_cli.echo import echo


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN ...", help="Run folders; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Where to; else report.html in the run, or here."),
    ] = None,
    forecast: Annotated[
        bool,
        typer.Option("--forecast", help="Predict memory and draw the schedule too, as petune plan does."),
    ] = False,
    answers: Annotated[
        int,
        typer.Option(
            "--answers", min=0, max=100, metavar="N", help="Ask base and tuned model N held-out rows too."
        ),
    ] = 0,
    metric: Metrics = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a page about a run, or about several side by side."""
    from petune.report.files import RunFiles, is_run, no_run
    from petune.report.page import NAME, write_report

    if out is None and len(runs) == 1:
        place = runs[0] / NAME  # a run's own page, which is written anew
    else:
        place = out or Path(NAME)
        refuse_place(place, overwrite, "-o FILE")
    for folder in runs:
        if not is_run(folder):
            raise no_run(folder)
        if forecast:
            predict(folder)
        if answers:
            from petune.run.answers import keep_answers
            from petune.run.train import load_run

            keep_answers(folder, load_run(folder), answers, metric or ())
    write_report([RunFiles(folder) for folder in runs], place)
    echo(str(place))


def complete(folder: Path) -> None:
    """Write the page of a run that has just finished again, with the memory that was predicted for it and its
    schedule. The run has finished whatever becomes of its page, so nothing is raised."""
    from petune.log import say
    from petune.report.files import RunFiles
    from petune.report.page import NAME, write_report

    try:
        predict(folder)
        write_report([RunFiles(folder)], folder / NAME)
    except Exception as error:  # see above
        say(f"the page of the run has no forecast: {str(error).splitlines()[0] if str(error) else error!r}")


def predict(folder: Path) -> None:
    """Keep in the run folder what `petune plan` says of the memory of its ranks, and their schedule."""
    from petune.estimate.forecast import forecast
    from petune.estimate.timeline import charts
    from petune.files.safetensors import write_json
    from petune.recipe import load_resolved
    from petune_cli.drawing import as_svg

    found = forecast(load_resolved(folder / "resolved.yaml"))
    ranks = [
        {
            "frozen": rank.memory.frozen,
            "tuned": rank.memory.tuned,
            "optimizer": rank.memory.optimizer,
            "total": rank.total
            - rank.held,  # of rows that a cache holds the most is foretold, not the number
        }
        for rank in found.ranks
    ]
    drawn = charts(found)
    schedule = {"schedule": as_svg(drawn, found.facts)} if drawn else {}
    write_json(folder / "forecast.json", {"ranks": ranks} | schedule)
