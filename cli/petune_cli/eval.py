"""`petune eval`: score a run beside its untouched base."""

from __future__ import annotations

from typing import Annotated

import typer

from petune.errors import UsageError
from petune_cli.arguments import Given, Json, Metrics, VerifyBase, Words
from petune_cli.display import score_table, show_json
from petune_cli.echo import echo


def evaluate(
    words: Words = None,
    answers: Annotated[
        int,
        typer.Option(
            "--answers",
            min=0,
            metavar="N",
            help="Score what base and tuned model generate for N held-out rows instead.",
        ),
    ] = 0,
    metric: Metrics = None,
    verify_base: VerifyBase = False,
    json: Json = False,
) -> None:
    """Score a run beside its untouched base."""
    if metric and not answers:
        raise UsageError("--metric is about generated answers", remedy="add --answers N")
    run = Given.of(words).run(verify_base=verify_base)

    if answers:
        from petune.run.answers import keep_answers

        found = keep_answers(run.folder, run, answers, metric or ())
        if json:
            return show_json(found)
        for line in [*score_table(found["scores"]), *(f"note      {line}" for line in run.dense_base)]:
            echo(line)
        return echo(f"{len(found['rows'])} held-out rows; each answer: petune report {run.folder}")
    scores = run.eval()
    if json:
        return show_json(scores)
    said = [f"note     {line}" for line in scores.pop("notes")]
    said += [f"WARNING  {line}" for line in scores.pop("warnings")]
    for line in [*score_table(scores), *said]:
        echo(line)
