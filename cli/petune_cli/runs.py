"""`petune runs`: the runs in a folder as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from petune.errors import UsageError
from petune_cli.arguments import Json, refuse_no_folder
from petune_cli.display import show_json, show_table
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
    from petune.report import listing
    from petune.report.files import find_runs

    if sort not in listing.KEYS:
        raise UsageError(
            "there is no such column", where="--sort", expected=", ".join(listing.KEYS), found=sort
        )
    refuse_no_folder(folder, "runs")
    found = listing.rows(find_runs(folder), folder)
    if verify:
        found = [one | {"folder": _verdict(Path(one["path"]))} for one in found]
    found = listing.ordered(found, sort)
    if json:
        show_json(found)
    elif found:
        table = listing.KEYS, [listing.cells(one) for one in found]
        if not sys.stdout.isatty():
            return show_table(*table)
        heads, rows, alike = without_what_is_alike(*table)
        show_table(heads, rows)
        if alike:
            echo(alike)
    else:
        echo(f"no run has begun in {folder} yet")


def without_what_is_alike(
    heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[str], list[Sequence[str]], str]:
    """A table for a narrow place: without the columns that say the same of several runs, and a line that
    says it once."""
    same = [
        at
        for at, column in enumerate(zip(*rows, strict=True))
        if at and len(rows) > 1 and len({*column}) == 1
    ]
    kept = [at for at in range(len(heads)) if at not in same]
    line = ", ".join(f"{heads[at]} {rows[0][at]}" for at in same)
    shown: list[Sequence[str]] = [[row[at] for at in kept] for row in rows]
    return [heads[at] for at in kept], shown, f"all of them: {line}" if same else ""


def _verdict(path: Path) -> Any:
    from petune.run.checkup import check_up

    return dict(check_up(path).facts)["verdict"]
