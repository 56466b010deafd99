"""The settings of a run as its resolved.yaml keeps them, under the hash of what was written: one that was cut
or edited since is refused, for what it lacks would silently be a default.

    # run 9e14a461fcdd4717886a7e134bf23246
    # sha256 HEX of all below
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from petune.errors import FileError, told_apart
from petune.recipe.read import load_recipe
from petune.recipe.schema import Recipe

_SEAL = re.compile(rb"# run [0-9a-f]{32}\n# sha256 ([0-9a-f]{64}) of all below\n")
_SEALED = re.compile(rb"sha256|of all below|\r\n")  # what is left of a seal that was changed
_REMEDY = (
    "put the file back from another copy of the run; a setting is changed on the command line: petune train"
    " RUN --resume KEY=VALUE"
)
# what every petune has written down, in this order and `out` last; before there was a hash
_EVER = (
    *("model", "data", "task", "method", "epochs", "max_steps", "batch_size", "accumulate"),
    *("eval_batch_size", "lr", "schedule", "warmup", "weight_decay", "clip", "seed", "dtype", "device"),
    *("gradient_checkpointing", "compile", "eval_every", "save_every", "keep", "metric", "direction"),
    *("patience", "class_weights", "head_only", "trackers", "init_adapter", "out"),
)


def sealed_settings(recipe: Recipe, run_id: str) -> bytes:
    """What resolved.yaml holds for the run `run_id`."""
    text = recipe.to_yaml().encode()
    return f"# run {run_id}\n# sha256 {hashlib.sha256(text).hexdigest()} of all below\n".encode() + text


def is_sealed(file: Path) -> bool:
    """Whether the settings stand under a hash: those that an earlier petune wrote do not."""
    return _SEALED.search(_beginning(file)) is not None


def load_resolved(file: Path, *overrides: Sequence[str] | Mapping[str, Any]) -> Recipe:
    """The settings of a run, with `overrides` as `load_recipe` takes them. Raises FileError for a file that
    is not what the run wrote, as far as that can be checked: of one without a hash, which an earlier petune
    wrote, whether it ends too early. Raises RecipeError as `load_recipe`."""
    sealed = is_sealed(file)
    if sealed:
        _check_seal(file)
    elif file.is_file() and not file.stat().st_size:
        raise _changed(file, "every setting of the run", "nothing")
    recipe = load_recipe(file)
    # `out` is written last: a text that was cut lacks it
    if not sealed and (absent := [key for key in _EVER if key not in recipe._written.tree]):
        raise _changed(file, "every setting of the run", f"none of {', '.join(absent[:5])}")
    return load_recipe(recipe, *overrides) if overrides else recipe


def _beginning(file: Path) -> bytes:
    try:
        if file.is_file():
            with file.open("rb") as stream:
                return stream.read(160)
    except OSError:
        pass  # `load_recipe` says why it cannot be read
    return b""


def _check_seal(file: Path) -> None:
    try:
        whole = file.read_bytes()
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", where=str(file)) from error
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
