"""The one way from a verb to the terminal: what is printed for people holds nothing that a terminal obeys."""

from __future__ import annotations

import sys

import typer

from petune.log import printable


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text for people."""
    typer.echo(printable(text), err=err, nl=nl)


def echo_answer(text: str, *, nl: bool = True) -> None:
    """Print what a model said: for people on a terminal, exactly as it is elsewhere."""
    if sys.stdout.isatty():
        echo(text, nl=nl)
        return
    sys.stdout.write(text + "\n" * nl)  # typer would strip colours from it
    sys.stdout.flush()
