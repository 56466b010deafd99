"""A page about one run or several: one HTML file that needs nothing else, no network and no server.

Its policy lets the one script run that petune wrote, by its hash, and nothing be loaded: should a text of a
run ever get past `markup`, it would still do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from petune.files.safetensors import write_file
from petune.report import compare, conditions, outcome
from petune.report.files import RunFiles, names_of
from petune.report.markup import Markup, element, join
from petune.report.words import moment

NAME = "report.html"
_T = TypeVar("_T")
_PARTS = (
    outcome.evaluation,
    outcome.answers,
    conditions.data,
    conditions.asked,
    conditions.memory,
    conditions.plan,
    conditions.environment,
    conditions.commands,
)


@cache
def _own(name: str) -> Markup:
    """A file of this room, as it is."""
    return Markup(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def policy(*, live: bool = False) -> str:
    """The content security policy of a page: its own style, script and pictures, and, on the live page, its
    own server."""
    script = base64.b64encode(hashlib.sha256(_own("page.js").encode()).digest()).decode()
    asks = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; connect-src {asks};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )


def guarded(part: Callable[[_T], Markup], of: _T) -> Markup:
    """A part of a page; where what it reads is damaged, a line that says so in its place."""
    try:
        return part(of)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        name = part.__name__.replace("_", " ")
        return element(
            "p", f"This part ({name}) cannot be shown: {type(error).__name__}: {error}", class_="bad"
        )


def content(runs: Sequence[RunFiles]) -> Markup:
    """What a page says, without its frame: of one run all parts, of several a comparison before them."""
    if len(runs) == 1:
        return join(_one(runs[0]))
    shared = (compare.came_out, compare.differences, compare.curves)
    each = [
        element("details", element("summary", name), *_one(run, curves=False), class_="run")
        for name, run in zip(names_of(runs), runs, strict=True)
    ]
    parts = [guarded(part, runs) for part in shared]
    return join((element("h1", f"{len(runs)} runs compared"), *parts, element("h2", "Each run"), *each))


def _one(run: RunFiles, *, curves: bool = True) -> list[Markup]:
    first = (outcome.heading, outcome.key_figures, outcome.warnings)
    drawn = [guarded(compare.curves, [run])] if curves else []
    return [
        *(guarded(part, run) for part in first),
        *drawn,
        *(guarded(part, run) for part in _PARTS),
    ]


def page(title: str, inside: Markup, *, live: str | None = None, above: str = "") -> Markup:
    """A whole page around `inside`, with `above` before it. live: the address at which a fresh `inside` is
    found."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy(live=live is not None)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", _own("page.css")),
    )
    made = element("span", f"made by petune, {moment(time.time())}", id="live")
    body = element(
        "body",
        above,
        element("main", inside, data_live=live),
        element("footer", made),
        element("script", _own("page.js")),
    )
    return join((Markup("<!doctype html>\n"), element("html", head, body, lang="en"), Markup("\n")))


def report(runs: Sequence[RunFiles]) -> Markup:
    """The page about some runs."""
    return page(" | ".join(names_of(runs)), content(runs))


def write_report(runs: Sequence[RunFiles], out: Path) -> None:
    """Write the page about some runs as a file. Raises MachineError."""
    write_file(out, [report(runs).encode()])
