"""Paths as users give them, in recipes and from Python."""

from __future__ import annotations

import os
from pathlib import Path

from petune.errors import UsageError


def in_home(text: str) -> str:
    """A path of a recipe, config:FILE among them, with the home that ~ stands for; as it is where no such
    home is known."""
    prefix = "config:" if text.startswith("config:") else ""
    return prefix + os.path.expanduser(text.removeprefix(prefix))


def home_known(text: str) -> bool:
    """Whether a path of a recipe begins with no ~, or with one whose home is known."""
    return not in_home(text).removeprefix("config:").startswith("~")


def own_cache() -> Path:
    """Where petune keeps for its user what it can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "petune")


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
