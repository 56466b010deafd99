"""Cells: what is checked of a value before it is used, and how one that cannot be used is told."""

from __future__ import annotations

import json
from typing import Any

from petune.tasks.configs import MAX_BAD_SHARE
from petune.tasks.read import DECODER, kind_of

FILL = f"fill it, delete the row, or data.on_bad_line=skip (at most {MAX_BAD_SHARE:.0%})"


class Bad(Exception):
    """A cell that cannot be used: what is wrong with it, then as in `Problem` expected, found and remedy."""


def clean(value: object, name: str, *, may_be_empty: bool = False) -> str:
    """A usable text: a string, not blank, and valid Unicode (JSON can smuggle in half of a surrogate pair).
    Raises Bad."""
    if not isinstance(value, str):
        raise Bad(f"{name} is {kind_of(value)}", "a string", kind_of(value))
    if not value.strip() and not may_be_empty:
        raise Bad(f"{name} is empty", None, None, FILL)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Bad(f"{name} holds half of a surrogate pair, which is no character") from None
    return value


def decoded(text: str, name: str) -> Any:
    """The value that a cell holds as JSON text. Raises Bad."""
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Bad(f"{name} is not JSON: {error.msg} at character {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise Bad(f"{name} is not JSON: {error}") from error
