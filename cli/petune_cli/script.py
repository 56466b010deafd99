"""`petune script`: the job that trains a recipe on several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from petune.errors import UsageError
from petune_cli.arguments import Given
from petune_cli.echo import echo_answer


def script(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE nodes=N [ranks=N] [time=H:M:S] [warn=S] [KEY=VALUE]",
            help="A recipe; machines, ranks on each, time, seconds of warning; settings.",
            show_default=False,
        ),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="For sbatch.")] = False,
    torchrun: Annotated[bool, typer.Option("--torchrun", help="To be started on each machine.")] = False,
) -> None:
    """Print the job that trains a recipe on several machines."""
    from petune.preflight.job_script import job_of, script

    if slurm == torchrun:
        raise UsageError("a job is --slurm or --torchrun", where="command line", remedy="give one of the two")
    job, others = job_of(words or ())
    given = Given.of(others)
    if given.target is None:
        raise UsageError("which recipe?", where="command line", remedy="petune script RECIPE --slurm nodes=2")
    kind = "slurm" if slurm else "torchrun"
    text = script(kind, given.target, given.recipe(), given.overrides, job, Path.cwd())
    echo_answer(text, nl=False)
