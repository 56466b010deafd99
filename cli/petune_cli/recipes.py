"""`petune ls` and `petune cp`: the recipes that ship."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from petune.errors import UsageError
from petune_cli.arguments import Json, Overwrite, refuse_place
from petune_cli.display import show_json, show_table
from petune_cli.echo import echo


def ls(json: Json = False) -> None:
    """List the recipes that ship."""
    from petune.demo import minilm_folder
    from petune.recipe import load_recipe, shipped_recipes

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
    overwrite: Overwrite = False,
) -> None:
    """Copy a recipe, to make it your own."""
    from petune.files.given import path_of
    from petune.recipe import find_recipe
    from petune_cli.init import refuse_other

    source = find_recipe(name)
    refuse_other(source, "for a recipe of your rows: petune init model=MODEL data=DATA")
    place = path_of(dest)
    place = place / source.name if place.is_dir() or dest.endswith("/") else place
    if place.is_file() and place.samefile(source):
        raise UsageError(
            "this is the recipe itself", where=str(place), remedy="name another file: petune cp NAME DEST"
        )
    refuse_other(place, "give DEST such a name, or a folder with a / at its end")
    refuse_place(place, overwrite, "petune cp NAME DEST")
    shutil.copyfile(source, place)
    echo(f"{place}\n   train it with: petune train {place}")
