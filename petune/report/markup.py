"""HTML that is put together, never pasted: a text that is no Markup is escaped where it is used, so a label
or a row can be whatever it likes and stays a text.

Characters that order or hide other text (controls, overrides of direction, halves of surrogate pairs) are
written out as in the terminal.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Sequence

from petune.log import printable

_VOID = {"meta", "br", "img"}
_LONG = 24  # characters of a word


class Markup(str):
    """A text that is HTML already: made by `element` and `join`, or written in this room."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """`text` as HTML that shows it; Markup as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(printable(text)))


def join(parts: Iterable[str]) -> Markup:
    """Parts one after another."""
    return Markup("".join(escaped(part) for part in parts))


def element(name: str, /, *inside: str, **attributes: object) -> Markup:
    """`<name attributes>inside</name>`. In names of attributes `_` stands for `-`, and one at the end is left
    out (`class_`); True is an attribute without a value, None and False none."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(inside)}</{name}>")


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[int] = (),
    caption: str = "",
) -> Markup:
    """A table whose first column names its rows; `numbers` are the columns that are aligned on the right. It
    scrolls by itself where the page is narrower; only long words are broken."""

    def cells(row: Sequence[str], name: str) -> Markup:
        found = []
        for at, cell in enumerate(row):
            head = name == "th" or at == 0
            scope = "col" if name == "th" else "row" if at == 0 else None
            long = any(len(word) > _LONG for word in re.sub("<[^>]*>", "", cell).split())
            kind = "n" if at in numbers else "long" if long else None
            found.append(element("th" if head else "td", cell, scope=scope, class_=kind))
        return element("tr", *found)

    said = [element("caption", caption)] if caption else []
    head = [element("thead", cells(heads, "th"))] if any(heads) else []
    body = element("tbody", *(cells(row, "td") for row in rows))
    return element("div", element("table", *said, *head, body), class_="wide")


def folded(title: str, *inside: str) -> Markup:
    """A part that is shut until it is asked for; in print it is open."""
    return element("details", element("summary", title), *inside)


def section(title: str, *inside: str) -> Markup:
    """A part under its heading; empty where nothing is inside."""
    return element("section", element("h2", title), *inside) if any(inside) else Markup()
