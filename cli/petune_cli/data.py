"""`petune data`: show the data as the model will see it."""

from __future__ import annotations

from typing import Annotated

import typer

from petune_cli.arguments import Given, Json, Words
from petune_cli.display import show_json
from petune_cli.echo import echo


def data(
    words: Words = None,
    count: Annotated[
        int, typer.Option("-n", min=0, help="Rows to show, with the trained tokens marked.")
    ] = 3,
    json: Json = False,
) -> None:
    """Show the data: format, lengths, cuts, what trains."""
    recipe = Given.of(words).recipe()
    from petune.preflight.inputs import preview

    seen = preview(recipe, count)
    if json:
        return show_json({**seen.counted, "examples": list(seen.examples)})
    for line in (*seen.facts, *(f"\n{example}" for example in seen.examples)):
        echo(line)
