"""The one way from a verb to the terminal: what is printed for people holds nothing that a terminal obeys."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from petune.log import printable

STDOUT = "standard output"


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text for people."""
    with _named("standard error" if err else STDOUT):
        typer.echo(printable(text), err=err, nl=nl)


def echo_answer(text: str, *, nl: bool = True) -> None:
    """Print what a model said: for people on a terminal, exactly as it is elsewhere."""
    if sys.stdout.isatty():
        echo(text, nl=nl)
        return
    with _named(STDOUT):
        sys.stdout.write(text + "\n" * nl)  # typer would strip colours from it
        sys.stdout.flush()


def echo_line(text: str) -> None:
    """Print a line as it is, at once."""
    with _named(STDOUT):
        print(text, flush=True)


@contextmanager
def _named(stream: str) -> Iterator[None]:
    """Let what the system refuses say where: a full disk behind `>`, /dev/full."""
    try:
        yield
    except OSError as error:
        error.filename = stream
        raise
