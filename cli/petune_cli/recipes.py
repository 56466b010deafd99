"""`petune ls` and `petune cp`: the recipes that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from petune_cli.arguments import Json
from petune_cli.echo import echo


def ls(json: Json = False) -> None:
    """List the recipes that ship."""
    from petune.demo import minilm_folder
    from petune.recipe import load_recipe, shipped_recipes
    from petune_cli.display import show_json, show_table

    rows = []
    for file in shipped_recipes():
        recipe = load_recipe(file)
        offline = recipe.model.startswith(("demo:", "config:")) and recipe.data.path.startswith("demo:")
        missing = recipe.model == "demo:minilm" and minilm_folder() is None
        state = "with requirements/demo.txt" if missing else "yes" if offline else "no"
        rows.append(
            (
                file.stem,
                recipe.model,
                recipe.method_name,
                str(recipe.parallel),
                recipe.task or "by the data",
                state,
            )
        )
    heads = ("recipe", "model", "method", "parallel", "task", "offline")
    if json:
        return show_json([dict(zip(heads, row, strict=True)) for row in rows])
    show_table(heads, rows)
    echo("train one with: petune train NAME    copy one with: petune cp NAME")


def cp(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe (petune ls), or a recipe file.")],
    dest: Annotated[str, typer.Argument(help="File, or folder with a / at its end.")] = "./",
) -> None:
    """Copy a recipe, to make it your own."""
    import shutil

    from petune.errors import UsageError
    from petune.recipe import find_recipe

    source = find_recipe(name)
    place = Path(dest).expanduser()
    place = place / source.name if place.is_dir() or dest.endswith("/") else place
    if place.exists():
        raise UsageError(
            "this file is there already", where=str(place), remedy="give another name: petune cp NAME DEST"
        )
    if not place.parent.is_dir():
        raise UsageError("there is no such folder", where=str(place.parent))
    shutil.copyfile(source, place)
    echo(f"{place}\n   train it with: petune train {place}")
