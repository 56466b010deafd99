"""`petune runs`: the runs in a folder as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from petune_cli.arguments import Json
from petune_cli.echo import echo


def runs(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, or one run.")] = Path("runs"),
    sort: Annotated[str, typer.Option("--sort", metavar="COLUMN", help="The column to sort by.")] = "began",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file of every run: whole or damaged, as doctor says.")
    ] = False,
    json: Json = False,
) -> None:
    """List runs: what each is, how far it came, what came out."""
    from petune.errors import UsageError
    from petune.report import listing
    from petune.report.files import find_runs
    from petune_cli.display import show_json, show_table

    place = folder.expanduser()
    if sort not in listing.KEYS:
        raise UsageError(
            "there is no such column", where="--sort", expected=", ".join(listing.KEYS), found=sort
        )
    if not place.is_dir():
        raise UsageError("there is no such folder", where=str(folder), remedy="petune runs FOLDER")
    found = listing.rows(find_runs(place), place)
    if verify:
        found = [one | {"folder": _verdict(Path(one["path"]))} for one in found]
    found = listing.ordered(found, sort)
    if json:
        show_json(found)
    elif found:
        show_table(listing.KEYS, [listing.cells(one) for one in found])
    else:
        echo(f"no run has begun in {folder} yet")


def _verdict(path: Path) -> Any:
    from petune.run.checkup import check_up

    return dict(check_up(path).facts)["verdict"]
