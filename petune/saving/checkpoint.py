"""Resumable state on disk: a checkpoint is a folder committed whole, and valid exactly when its manifest
verifies.

Temporary name, fsync of every file, SHA-256 manifest, one rename, fsync of the parent; pointer and rotation
only after it, and the pointer is a hint nobody depends on. Tensors are safetensors and all else JSON: nothing
that is read here can run code.
"""

# Names inside a folder of checkpoints:
#   step-N             committed            step-N.tmp-PID   a save that has not finished
#   step-N.old-PID     what a second save of step N is replacing: still whole, and found as long as there is
# no step-N
#   step-N.gone-PID    rotated out, being deleted            aside-step-N   set aside by the user's choice of
# an earlier step; never touched

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from petune.errors import FileError, MachineError, PetuneError, Problem, UsageError
from petune.files.atomic import flush, remove
from petune.files.range_writer import ALONE, Crew
from petune.files.safetensors import reading, sync_folder, write_file, writing
from petune.log import human, warn
from petune.saving.manifest import (
    COMMITTED,
    Manifest,
    compare,
    contents,
    hash_files,
    path_fault,
    read_manifest,
    verify,
    write_manifest,
)

__all__ = [
    "Manifest",
    "candidates",
    "commit",
    "newest_good",
    "require_free",
    "rotate",
    "set_aside",
    "sweep",
    "verify",
]

POINTER = "latest"
# a folder of its own inside one of checkpoints, so that neither's rotation sees the other's
SNAPSHOTS = "snapshots"
_LEFTOVER = re.compile(r"step-(0|[1-9][0-9]{0,17})\.(tmp|old|gone)-[0-9]+")


# ---------------------------------------------------------------- writing


def commit(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    run_id: str,
    facts: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    fill: Callable[[Path], None] = lambda _: None,
    crew: Crew = ALONE,
) -> Path:
    """Save one checkpoint as `root/step-N`: `write` fills an empty folder, which takes its name whole or
    never.

    Several ranks call this together: the first one's `write` makes all files, then each one's `fill` writes
    into them what is its own, and has it on the disk when it returns; the first one's `root` counts.
    `facts` may be asked for when all else is on disk. Saving a step again replaces it without a moment in
    which neither is found. Raises MachineError (disk full, permission, ...) and whatever `write` and `fill`
    raise, on the rank that meets it; then nothing of the attempt is left and every earlier checkpoint is as
    it was.
    """
    if crew.rank:
        return _take_part(fill, crew)
    if step < 0:
        raise ValueError(f"step {step} is negative")
    final, work, old = (
        root / f"step-{step}{suffix}" for suffix in ("", f".tmp-{os.getpid()}", f".old-{os.getpid()}")
    )
    with writing(final):
        try:
            _prepare(root, work, old, final)
            write(work)
            crew.tell([str(work), str(final)])
            fill(work)
            files = hash_files(work, crew.tell(_flush(work)), crew)
            write_manifest(work, step, run_id, dict(facts() if callable(facts) else facts), files)
            if os.path.lexists(final):
                os.rename(final, old)
            os.rename(work, final)
            sync_folder(root)
        except BaseException:
            _undo(work, old, final)
            raise
    try:
        remove(old)
        write_file(root / POINTER, [f"{final.name}\n".encode()], sync=True)
    except (OSError, MachineError) as error:
        warn(f"step {step} is saved, but tidying up after it failed: {error}")
    return final


def _prepare(root: Path, work: Path, old: Path, final: Path) -> None:
    if not root.exists():
        root.mkdir()  # where its parent is gone, so is the run's folder, which must not be made anew
        sync_folder(root.parent)
    remove(work)
    _settle(old, final)
    work.mkdir()


def _take_part(fill: Callable[[Path], None], crew: Crew) -> Path:
    """`commit` on the other ranks: no name changes here, and when this returns the first rank has still to
    write the manifest, whose presence says that all else is there."""
    work, final = map(Path, crew.tell())
    fill(work)
    hash_files(work, crew.tell(), crew)
    return final


def _flush(work: Path) -> dict[str, int]:
    """Bring every file and folder of `work` to the disk; the files' sizes by name."""
    names, problems = contents(work)
    problems += [Problem(fault, where=str(work / name)) for name in names if (fault := path_fault(name))]
    if problems:
        raise FileError(problems)
    flush(work)
    return {name: (work / name).stat().st_size for name in names}


def _undo(work: Path, old: Path, final: Path) -> None:
    """Leave nothing of a failed save. Errors here stay unsaid: the one that brought us here is the cause, and
    `sweep` comes later."""
    with suppress(OSError):
        remove(work)
    with suppress(OSError):
        if not os.path.lexists(final):
            _settle(old, final)


def _settle(old: Path, final: Path) -> None:
    """End a replacement that was cut off: the old checkpoint takes its name back unless the new one stands
    there."""
    if not os.path.lexists(old):
        return
    if os.path.lexists(final):
        remove(old)
    else:
        os.rename(old, final)


# ---------------------------------------------------------------- finding


def candidates(root: Path) -> list[Path]:
    """Checkpoints and snapshots by their folder's name, newest step first (10 before 9), of one step the
    checkpoint; nothing is verified.

    A missing root has none.
    """
    found = {
        (step, kind): path
        for kind, place in enumerate((root / SNAPSHOTS, root))
        for step, path in _by_step(place).items()
    }
    return [found[key] for key in sorted(found, reverse=True)]


def _by_step(root: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    with reading(root):
        names = os.listdir(root) if root.is_dir() else []
    for name in names:
        if match := COMMITTED.fullmatch(name):
            found[int(match[1])] = root / name
        elif (match := _LEFTOVER.fullmatch(name)) and match[2] == "old":
            found.setdefault(int(match[1]), root / name)
    return found


def newest_good(root: Path) -> tuple[Path, Manifest, list[Problem]]:
    """The newest checkpoint that verifies, and the problems of every newer one, to be told aloud. Raises
    FileError when there is none."""
    problems: list[Problem] = []
    for path in candidates(root):
        try:
            return path, verify(path), problems
        except FileError as error:
            problems += error.problems
    if problems:
        raise FileError(
            [
                Problem("no checkpoint is whole", str(root), remedy="start the run again without --resume"),
                *problems,
            ]
        )
    raise FileError(
        "no checkpoint here",
        where=str(root),
        expected="folders step-N",
        remedy="check the path, or run without --resume",
    )


# ---------------------------------------------------------------- tidying


def leftovers(root: Path) -> list[str]:
    """What killed saves and rotations left in a folder of checkpoints, as relative paths."""
    found = []
    for prefix in ("", f"{SNAPSHOTS}/"):
        names = os.listdir(root / prefix) if (root / prefix).is_dir() else []
        found += [
            prefix + name
            for name in sorted(names)
            if _LEFTOVER.fullmatch(name) or name.startswith(f".{POINTER}.tmp-")
        ]
    return found


def sweep(root: Path) -> list[str]:
    """Remove what killed saves and rotations left, and finish a replacement that was cut off; call it holding
    the RunLock.

    Returns the relative paths dealt with. Raises MachineError.
    """
    with writing(root):
        found = leftovers(root)
        for path in [root / name for name in found]:
            match = _LEFTOVER.fullmatch(path.name)
            if match and match[2] == "old":
                _settle(path, path.with_name(f"step-{match[1]}"))
            else:
                remove(path)
    return found


def rotate(root: Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Delete all but the newest `keep` checkpoints of this very folder and the protected ones; returns the
    deleted. Call it after commit.

    Only checkpoints whose names and sizes fit their manifest count as kept, so damaged ones never push the
    last good one out. Raises UsageError for keep < 2 (one flipped bit would end the run), MachineError.
    """
    if keep < 2:
        raise UsageError(
            "keep must be at least 2",
            where="keep",
            expected=">= 2",
            found=str(keep),
            remedy="one checkpoint can be damaged",
        )
    safe = {Path(path).resolve() for path in protect}
    deleted: list[Path] = []
    whole = 0
    own = _by_step(root)
    for path in [own[step] for step in sorted(own, reverse=True)]:
        if whole < keep:
            whole += _looks_whole(path)
        elif COMMITTED.fullmatch(path.name) and not path.is_symlink() and path.resolve() not in safe:
            gone = root / f"{path.name}.gone-{os.getpid()}"
            with writing(path):
                remove(gone)
                os.rename(path, gone)  # half a deletion must not look like a checkpoint
                remove(gone)
            deleted.append(path)
    return deleted


def _looks_whole(path: Path) -> bool:
    try:
        return not compare(path, read_manifest(path))
    except PetuneError:
        return False


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename checkpoints of steps beyond `after` to aside-step-N when a run goes on from an earlier step;
    nothing is deleted.

    Otherwise the next --resume would return to the future that was left. Returns the new paths. Raises
    MachineError.
    """
    moved = []
    for path in candidates(root):
        match = re.match(r"step-([0-9]+)", path.name)
        if match and int(match[1]) > after:
            target = path.with_name(f"aside-step-{match[1]}")
            with writing(path):
                remove(target)
                os.rename(path, target)
            moved.append(target)
    return moved


# ---------------------------------------------------------------- the disk


def require_free(path: Path, needed: int) -> None:
    """Raise MachineError unless the disk under `path`, which need not exist yet, has `needed` bytes free.
    Quotas are not seen."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    with writing(path):
        free = shutil.disk_usage(place).free
    if free < needed:
        sides = {"expected": f"{human(needed)} free", "found": human(free)}
        raise MachineError(
            "not enough disk space", where=str(path), remedy="free some space, or give another `out`", **sides
        )
