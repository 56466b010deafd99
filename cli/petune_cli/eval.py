"""`petune eval`: score a run beside its untouched base."""

from __future__ import annotations

from petune_cli.arguments import Given, Json, VerifyBase, Words
from petune_cli.echo import echo


def evaluate(words: Words = None, verify_base: VerifyBase = False, json: Json = False) -> None:
    """Score a run beside its untouched base."""
    run = Given.of(words).run(verify_base=verify_base)
    from petune_cli.display import score_table, show_json

    scores = run.eval()
    if json:
        return show_json(scores)
    said = [("note     ", line) for line in scores.pop("notes")] + [
        ("WARNING  ", line) for line in scores.pop("warnings")
    ]
    for line in [*score_table(scores), *(start + line for start, line in said)]:
        echo(line)
