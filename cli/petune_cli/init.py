"""`petune init`: write a recipe for one's own model and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from petune_cli.arguments import Given
from petune_cli.echo import echo

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write over the file that is there.")]


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
    from petune.errors import UsageError
    from petune.recipe import load_recipe

    given = Given.of(words)
    file = Path(given.target or "recipe.yaml").expanduser()
    refuse_place(file, "petune init ... NAME.yaml", overwrite)
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


def refuse_place(file: Path, another: str, overwrite: bool) -> None:
    """Raise UsageError for a place where no recipe can be written, or shall not be. another: how the command
    names one."""
    from petune.errors import UsageError

    if file.suffix not in (".yaml", ".yml"):
        raise UsageError(
            "a recipe is a .yaml file",
            where=str(file),
            remedy="settings are written key=value, the file NAME.yaml",
        )
    if file.is_dir():
        raise UsageError("this is a folder", where=str(file), remedy=f"give another name: {another}")
    if file.exists() and not overwrite:
        raise UsageError(
            "this file is there already",
            where=str(file),
            remedy=f"say --overwrite, or give another name: {another}",
        )
    if not file.parent.is_dir():
        raise UsageError(
            "there is no such folder", where=str(file.parent), remedy=f"make it first: mkdir -p {file.parent}"
        )
