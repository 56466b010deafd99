"""The verbs that hand a run on: merged into plain weights, or in the layout another library reads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from petune_cli.given import Given, Words

Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default inside the run folder.")]


class Layout(StrEnum):
    """Who is to read the files."""

    peft = "peft"
    hf = "hf"


def merge(words: Words = None, out: Out = None) -> None:
    """Write a run as a plain Hugging Face model (lora, full)."""
    place = Given.of(words).run().merge(out)
    typer.echo(f"{place}\n   load it with transformers.Auto...from_pretrained({str(place)!r})")


def export(
    words: Words = None,
    to: Annotated[Layout, typer.Option("--to", help="peft: lora as peft reads it; hf: a merged model.")] = ...,  # type: ignore[assignment]
    out: Out = None,
) -> None:
    """Write a run for peft or for transformers."""
    place = Given.of(words).run().export(to.value, out)
    reader = "peft.PeftModel.from_pretrained(base, " if to is Layout.peft else "transformers.Auto...from_pretrained("
    typer.echo(f"{place}\n   load it with {reader}{str(place)!r})")
