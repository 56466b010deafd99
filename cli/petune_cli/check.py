"""`petune check`: look at a recipe, and at all it names, before anything is trained."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from petune_cli.arguments import Given, Words
from petune_cli.echo import echo


def check(
    words: Words = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print every setting with its meaning, defaults included.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of recipes, for editors.")
    ] = False,
) -> None:
    """Check a recipe and what it names: every mistake at once."""
    if schema:
        from petune.recipe import json_schema

        echo(json.dumps(json_schema(), indent=2))
        return
    recipe = Given.of(words).recipe()
    if full:
        echo(recipe.to_yaml(), nl=False)
        return
    from petune.preflight.inputs import check_inputs

    inputs = check_inputs(recipe)
    over = f", parallel {recipe.parallel}" if recipe.parallel.axes else ""
    name = recipe.source or "command line"
    task = f"task {inputs.task or 'by its data'}"
    echo(
        f"{name}: no mistakes; {recipe.method_name} on {recipe.model} for {task}, data"
        f" {recipe.data.path}{over}"
    )
    for note in recipe.notes:
        echo(f"   {note}")
    if inputs.unused:
        echo(f"   columns not used: {', '.join(inputs.unused)}")
    if inputs.distant:
        echo(f"   not looked at, for it is on the hub: {', '.join(inputs.distant)}")
