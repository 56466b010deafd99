"""`petune init`: write a recipe for one's own model and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from petune.errors import UsageError
from petune_cli.arguments import Given, Overwrite, refuse_place
from petune_cli.echo import echo


def init(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="model=X data=Y [KEY=VALUE] [FILE]",
            help="Settings, and the file to write.",
            show_default="recipe.yaml",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a recipe for your model and data."""
    from petune.recipe import load_recipe

    given = Given.of(words)
    file = Path(given.target or "recipe.yaml")
    refuse_other(file, "settings are written key=value, the file NAME.yaml")
    refuse_place(file, overwrite, "petune init ... NAME.yaml")
    keys = {word.partition("=")[0].split(".")[0] for word in given.overrides}
    if missing := [key for key in ("model", "data") if key not in keys]:
        example = "petune init model=/path/to/model data=rows.csv"
        raise UsageError(
            f"{' and '.join(missing)} must be given", where="command line", remedy=f"for example  {example}"
        )
    recipe = load_recipe(None, given.overrides)
    from petune.preflight.draft import draft
    from petune.run.build import prepare

    prepared = prepare(recipe)
    file.write_text(draft(prepared, file), encoding="utf-8")
    echo(
        f"{file}: {recipe.method_name} on {recipe.model} for task {prepared.task.name}, data"
        f" {recipe.data.path}"
    )
    alone = "no column is a label, so it learns words that are hidden; to classify texts, add a label to each"
    unasked = [alone] if prepared.task.name == "mlm" and "task" not in keys else []
    for line in (*prepared.rows.notes, *unasked, f"train it with: petune train {file}"):
        echo(f"   {line}")


def refuse_other(file: Path, remedy: str) -> None:
    """Raise UsageError for a file that has no recipe's name."""
    if file.suffix not in (".yaml", ".yml"):
        raise UsageError("a recipe is a .yaml file", where=str(file), remedy=remedy)
