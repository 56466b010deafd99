"""Who may start in a run folder: the lock first, then what is there against what was asked for.
docs/reliability.md has the table."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from petune.errors import FileError, MachineError, Problem, RecipeError, UsageError, did_you_mean
from petune.files.lock import RunLock
from petune.recipe import Recipe, differences
from petune.run.folder import APPENDED, FILES, FOLDERS, RANK_LOGS, RunFolder, is_beginning, names


@contextmanager
def entered(
    folder: RunFolder, *, resume: bool, overwrite: bool, allow_change: Collection[str]
) -> Iterator[None]:
    """Hold the lock of a folder in which this start is allowed, for as long as the block lasts; made if need
    be.

    If nothing was written inside the block, a folder that was made goes again. Raises MachineError where
    another process holds the lock, UsageError for a folder that is occupied, RecipeError for settings that
    have changed, FileError for links.
    """
    path = folder.path
    if os.path.lexists(path) and not path.is_dir():
        raise UsageError("out is a file", where=str(path), remedy="choose another `out`")
    made = [place for place in (path, *path.parents) if not place.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "choose another `out`, in a folder that may be written and on a disk with room"
        what = f"the run folder cannot be made: {error.strerror}"
        raise MachineError(what, where=str(path), remedy=remedy) from None
    try:
        with RunLock(path):
            _refuse_occupied(folder, resume=resume, overwrite=overwrite)
            refuse_links(folder)
            if resume:
                _refuse_changes(folder, allow_change)
            yield
    finally:
        with suppress(OSError):
            for place in made:
                place.rmdir()  # refused, as it should be, where there is anything


def refuse_unknown(keys: Collection[str]) -> None:
    """Raise UsageError for a name in `--allow-change` that is no setting."""
    for key in keys:
        if key.split(".")[0] not in Recipe.model_fields:
            remedy = did_you_mean(key, Recipe.model_fields)
            raise UsageError(f"{key!r} is not a setting", where="--allow-change", remedy=remedy)


def _refuse_occupied(folder: RunFolder, *, resume: bool, overwrite: bool) -> None:
    """Raise UsageError unless the folder is free or the caller said what to do with it. The lock is ours."""
    where, run, replaced = str(folder.path), folder.has_resolved(), folder.is_being_replaced()
    if resume and run and replaced:
        remedy = "start it without --resume, which ends the replacement"
        raise UsageError("the run here was being replaced when that was cut off", where=where, remedy=remedy)
    if resume and not run:
        raise UsageError(
            "there is no run to resume", where=where, remedy="start it without --resume, or check `out`"
        )
    if resume or (run and (overwrite or replaced)):
        return
    strange = [name for name in names(folder.path) if not is_beginning(name)]
    if strange and not overwrite:
        raise UsageError(
            "this folder is occupied", where=where, remedy="use --resume, --overwrite, or another out=..."
        )
    if strange:
        what, found = (
            "--overwrite only replaces a run of petune, and this folder is none",
            ", ".join(strange[:5]),
        )
        raise UsageError(what, where=where, found=found, remedy="choose another out")


def _refuse_changes(folder: RunFolder, allow_change: Collection[str]) -> None:
    """Raise RecipeError with every setting that would change the numbers of the run here and is not in
    `allow_change`."""
    changed = differences(folder.resolved(), folder.recipe.resolved(), tuple(allow_change))
    if changed:
        problems = [
            Problem(
                f"{key} has changed since the run began",
                where=folder.recipe.where(key),
                expected=str(old),
                found=str(new),
            )
            for key, old, new in changed
        ]
        keys = " ".join(f"--allow-change {key}" for key, _, _ in changed)
        raise RecipeError(
            [
                *problems,
                Problem("these keys change the numbers", remedy=f"put them back, start anew, or say {keys}"),
            ]
        )


def refuse_links(folder: RunFolder) -> None:
    """Raise FileError for a name of petune's that is a link, a pipe or a device: nothing is written or
    deleted through it."""
    logs = [f"{RANK_LOGS}/{name}" for name in names(folder.path / RANK_LOGS)]
    kinds = dict.fromkeys((*FILES, *logs), (stat.S_ISREG, "a regular file"))
    kinds |= dict.fromkeys((*FOLDERS, RANK_LOGS), (stat.S_ISDIR, "a folder"))
    problems = []
    for name, (fits, expected) in kinds.items():
        with suppress(FileNotFoundError, NotADirectoryError):
            place = folder.path / name
            found = place.lstat()
            if not fits(found.st_mode):
                what = "is a symbolic link" if stat.S_ISLNK(found.st_mode) else "is something else"
                problems.append(
                    Problem(what, str(place), expected, remedy="remove it, or give another `out`")
                )
            elif name in APPENDED and found.st_nlink > 1:
                what = "is linked elsewhere too, where every line of this run would appear"
                problems.append(
                    Problem(
                        what,
                        str(place),
                        "a file of its own",
                        f"{found.st_nlink} names",
                        "put a copy in its place",
                    )
                )
    if problems:
        raise FileError(problems)
