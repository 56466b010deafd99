"""`petune chat`: talk to a tuned model, or to its base."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from petune.errors import DataError, UsageError
from petune_cli.arguments import Given, VerifyBase, Words
from petune_cli.echo import echo, echo_answer
from petune_cli.generate import Temperature, Tokens, sampling, take_any_bytes

if TYPE_CHECKING:
    from petune.run.inference import Chat


def chat(
    words: Words = None,
    max_new_tokens: Tokens = None,
    temperature: Temperature = None,
    verify_base: VerifyBase = False,
) -> None:
    """Talk to a run; /base shows the untouched model."""
    session = Given.of(words).run(verify_base=verify_base).chat(**sampling(max_new_tokens, temperature))
    take_any_bytes()
    by_hand, refused, line = sys.stdin.isatty(), 0, None
    if by_hand:
        echo("/base: the untouched model and back   /reset: forget   /quit: end")
    for line in _said(by_hand):
        if line == "/quit":
            break
        try:
            _answer(session, line, lambda piece: echo_answer(piece, nl=False))
        except (UsageError, DataError) as error:  # of this line alone
            echo(str(error), err=True)
            refused = error.code
    if line is None and not by_hand:
        remedy = "pipe a line for each turn, or start it in a terminal"
        raise UsageError("nobody has said anything", where="standard input", remedy=remedy)
    if refused and not by_hand:
        raise typer.Exit(refused)


def _said(by_hand: bool) -> Iterator[str]:
    """The lines of the other side, typed or piped, without empty ones."""
    while True:
        try:
            line = input("> " if by_hand else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _answer(session: Chat, line: str, show: Callable[[str], None]) -> None:
    """Obey a command or show the model's answer piece by piece."""
    if line == "/base":
        session.use_base(not session.on_base)
        show("(the untouched base answers)\n" if session.on_base else "(the tuned model answers)\n")
    elif line == "/reset":
        session.reset()
        show("(forgotten)\n")
    elif line.startswith("/"):
        show(f"({line.split()[0]} is no command: /base, /reset, /quit)\n")
    else:
        for piece in session.ask(line):
            show(piece)
        show("\n")
