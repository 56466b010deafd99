"""The settings of a run as its resolved.yaml keeps them, under the hash of what was written: one that was cut
or edited since is refused, for what it lacks would silently be a default.

    # run 9e14a461fcdd4717886a7e134bf23246
    # sha256 HEX of all below
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from petune.errors import FileError, told_apart
from petune.recipe.read import load_recipe
from petune.recipe.schema import Recipe

_SEAL = re.compile(rb"# run [0-9a-f]{32}\n# sha256 ([0-9a-f]{64}) of all below\n")
_REMEDY = (
    "put the file back from another copy of the run; a setting is changed on the command line: petune train"
    " RUN --resume KEY=VALUE"
)


def sealed_settings(recipe: Recipe, run_id: str) -> bytes:
    """What resolved.yaml holds for the run `run_id`."""
    text = recipe.to_yaml().encode()
    return f"# run {run_id}\n# sha256 {hashlib.sha256(text).hexdigest()} of all below\n".encode() + text


def load_resolved(file: Path, *overrides: Sequence[str] | Mapping[str, Any]) -> Recipe:
    """The settings of a run, with `overrides` as `load_recipe` takes them. Raises FileError for a file that
    is not what the run wrote, RecipeError as `load_recipe`."""
    if os.path.isfile(file):
        _check_seal(file)
    return load_recipe(load_recipe(file), *overrides)


def _check_seal(file: Path) -> None:
    try:
        whole = file.read_bytes()
    except OSError:
        return  # `load_recipe` says why it cannot be read
    if (seal := _SEAL.match(whole)) is None:
        raise _changed(file, "the run and the SHA-256 of what follows in its first two lines", "others")
    if (found := hashlib.sha256(whole[seal.end() :]).hexdigest()) != (noted := seal[1].decode()):
        noted, found = told_apart(noted, found)
        raise _changed(file, f"a sha256 of {noted}", found)


def _changed(file: Path, expected: str, found: str) -> FileError:
    return FileError(
        "was cut or edited since the run wrote it",
        where=str(file),
        expected=expected,
        found=found,
        remedy=_REMEDY,
    )
