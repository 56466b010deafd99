"""Paths as callers from Python give them."""

from __future__ import annotations

import os
from pathlib import Path

from petune.errors import UsageError


def path_of(folder: str | os.PathLike[str]) -> Path:
    """The path that an argument `folder` names, with ~ for a home. Raises UsageError for what names none."""
    if not isinstance(folder, str | os.PathLike):
        what, expected = "this is no folder", "the path of one"
        raise UsageError(what, where="folder", expected=expected, found=repr(folder)[:80])
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise UsageError(
            "it begins with ~ and a user whose home is not known",
            where=str(folder),
            remedy="write the folder in full",
        ) from None
