"""`petune sweep`: a small grid of runs, ranked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from petune.log import phase
from petune_cli.arguments import Given, Json, Words, is_setting
from petune_cli.display import reporter, show_json, show_table
from petune_cli.echo import echo


def sweep(
    words: Words = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, metavar="N", help="Runs of every choice, each with another seed.")
    ] = 1,
    json: Json = False,
) -> None:
    """Train each choice of lr=1e-4,2e-4 r=8,32 ... and rank them."""
    with phase("loading torch and transformers"):
        axes, others = sorted_out(words or ())
        recipe = Given.of(others).recipe()
        from petune.report import ranking
        from petune.report.page import NAME
        from petune.run import sweep as sweeping
        from petune.run.reporting import PlainReporter

    cells = sweeping.grid(recipe, axes, seeds)
    place = cells[0].folder.path.parent
    trials: list[ranking.Trial] = []
    aside = PlainReporter(partial(print, file=sys.stderr, flush=True))  # beside JSON
    for at in range(len(cells)):
        with reporter() as shown:
            told = aside if json else shown
            told.note(f"run {at + 1} of {len(cells)}: {cells[at].folder.path}")
            trials = sweeping.advance(cells, at, told)
    if json:
        show_json([trial.facts() for trial in trials])
        return
    show_table(ranking.HEADS, [trial.cells() for trial in trials])
    echo(str(place / NAME))


def sorted_out(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The words that give several values to a setting, by setting; and the others."""
    axes: dict[str, list[str]] = {}
    others: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        values = split(text)
        # `parallel=dp:2,tp:2` is one plan
        if is_setting(word) and len(values) > 1 and key != "parallel":
            axes[key] = values
        else:
            others.append(word)
    return axes, others


def split(text: str) -> list[str]:
    """The values between commas; a list or a mapping in brackets is one."""
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return values
