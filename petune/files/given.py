"""Paths as callers from Python give them."""

from __future__ import annotations

import os
from pathlib import Path

from petune.errors import UsageError


def path_of(folder: str | os.PathLike[str]) -> Path:
    """The path that an argument `folder` names. Raises UsageError for what names none."""
    if not isinstance(folder, str | os.PathLike):
        what, expected = "this is no folder", "the path of one"
        raise UsageError(what, where="folder", expected=expected, found=repr(folder)[:80])
    return Path(folder)
