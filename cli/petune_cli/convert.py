"""`petune convert`: a recipe from another program's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from petune.errors import UsageError
from petune_cli.arguments import Given, Json, Overwrite, refuse_place
from petune_cli.display import show_json
from petune_cli.echo import echo
from petune_cli.init import refuse_other

ConvertFrom = Literal["axolotl", "llamafactory", "peft", "torchtune", "trl"]  # whose file it is


def convert(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE [KEY=VALUE]", help="YAML or JSON; then settings.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The recipe.")] = Path(
        "recipe.yaml"
    ),
    source: Annotated[
        ConvertFrom | None, typer.Option("--from", help="Whose file it is; default told by its keys.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make a recipe of another program's configuration."""
    from petune.preflight.convert import convert, recipe_text

    given = Given.of(words)
    if given.target is None:
        raise UsageError("which file?", where="command line", remedy="petune convert config.yml")
    refuse_other(out, "name it so: -o NAME.yaml")
    refuse_place(out, overwrite, "petune convert FILE -o NAME.yaml")
    file = Path(given.target)
    converted = convert(file, given.overrides, source)
    out.write_text(recipe_text(converted, file, out), encoding="utf-8")
    left = [(one.key, str(one.value), one.why) for one in converted.left]
    if json:
        rows = [dict(zip(("key", "value", "why"), row, strict=True)) for row in left]
        return show_json({"recipe": str(out), "from": converted.program.title, "left": rows})
    echo(f"{out}: {converted.program.title}'s {file.name} as a recipe; petune check {out}")
    for key, value, why in left:
        echo(f"   not in it: {key}: {value[:60]}    {why}")
