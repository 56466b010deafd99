"""`petune merge`: write a run as a plain Hugging Face model."""

from __future__ import annotations

from petune_cli.arguments import Given, VerifyBase, Words
from petune_cli.export import Out, Overwrite, tell_place


def merge(
    words: Words = None, out: Out = None, overwrite: Overwrite = False, verify_base: VerifyBase = False
) -> None:
    """Write a run as a plain Hugging Face model (lora, full)."""
    run = Given.of(words).run(verify_base=verify_base)
    place = run.merge(out, overwrite=overwrite)
    tell_place(run, place)
