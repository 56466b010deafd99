"""`petune merge`: write a run as a plain Hugging Face model."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from petune_cli.arguments import Given, VerifyBase, Words
from petune_cli.export import Out, OverwriteFolder, tell_place


def merge(
    words: Words = None,
    out: Out = None,
    dtype: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option("--dtype", help="Of the weights that are written; default the run's own."),
    ] = None,
    rounding: Annotated[
        Literal["nearest", "stochastic"],
        typer.Option(
            "--rounding", help="Of weights that the tuning changed, to bf16; stochastic keeps small updates."
        ),
    ] = "nearest",
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="Of stochastic rounding; default the run's own."),
    ] = None,
    overwrite: OverwriteFolder = False,
    verify_base: VerifyBase = False,
) -> None:
    """Write a run as a plain Hugging Face model (not adapter, side)."""
    run = Given.of(words).run(verify_base=verify_base)
    place = run.merge(out, dtype=dtype, rounding=rounding, seed=seed, overwrite=overwrite)
    tell_place(run, place)
