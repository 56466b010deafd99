"""The verbs that look before and after: the recipe, the data as the model will see it, the score."""

from __future__ import annotations

from typing import Annotated

import typer

from petune_cli.echo import echo
from petune_cli.given import Given, VerifyBase, Words


def check(
    words: Words = None,
    full: Annotated[bool, typer.Option("--full", help="Print every setting with its meaning, defaults included.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes, for editors.")] = False,
) -> None:
    """Check a recipe and what it names: every mistake at once."""
    if schema:
        import json

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
    echo(f"{name}: no mistakes; {recipe.method_name} on {recipe.model} for {task}, data {recipe.data.path}{over}")
    for note in recipe.notes:
        echo(f"   {note}")
    if inputs.unused:
        echo(f"   columns not used: {', '.join(inputs.unused)}")
    if inputs.distant:
        echo(f"   not looked at, for it is on the hub: {', '.join(inputs.distant)}")


def data(
    words: Words = None,
    count: Annotated[int, typer.Option("-n", min=0, help="Rows to show, with the trained tokens marked.")] = 3,
) -> None:
    """Show the data: format, lengths, cuts, what trains."""
    recipe = Given.of(words).recipe()
    from petune.preflight.inputs import preview

    seen = preview(recipe, count)
    for line in (*seen.facts, *(f"\n{example}" for example in seen.examples)):
        echo(line)


def evaluate(words: Words = None, verify_base: VerifyBase = False) -> None:
    """Score a run beside its untouched base."""
    run = Given.of(words).run(verify_base=verify_base)
    from petune_cli.display import score_table

    scores = run.eval()
    said = [("note     ", line) for line in scores.pop("notes")] + [("WARNING  ", line) for line in scores.pop("warnings")]
    for line in [*score_table(scores), *(start + line for start, line in said)]:
        echo(line)
