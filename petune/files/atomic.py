"""A folder that appears whole, on disk, or not at all: written under another name, put under a manifest,
flushed, and renamed."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from petune.errors import FileError, PetuneError, UsageError
from petune.files.given import path_of
from petune.files.lock import lives
from petune.files.manifest import seal_folder
from petune.files.safetensors import open_regular, sync_folder, writing

# What a commit of NAME leaves beside it when it is killed, and write_file likewise: what was being written,
# and what it was to replace.
LEFTOVER = re.compile(r"\.(.+)\.(tmp|old)-([0-9]+)")


def commit_folder(
    given: str | os.PathLike[str], fill: Callable[[Path], None], overwrite: bool, ours: Collection[str]
) -> Path:
    """Let `fill` write into a sibling of the folder that is `given`, flush it and give it the name by one
    rename; a failure leaves things as they were.

    With `overwrite` a folder that holds one of the files `ours` is replaced. What killed commits of this name
    left is removed first. Raises UsageError as `path_of` and for any other occupied place, FileError for a
    link, MachineError.
    """
    folder = path_of(given).absolute()
    if folder.is_symlink():
        remedy = f"name the folder behind it ({folder.resolve()}), or remove the link"
        raise FileError(
            "is a symbolic link: nothing is written or replaced through it", where=str(folder), remedy=remedy
        )
    with writing(folder):
        sweep(folder.parent, (folder.name,))
    if folder.exists() and not folder.is_dir():
        raise UsageError("this is a file, not a folder", where=str(folder), remedy="give another name")
    occupied = folder.exists() and any(folder.iterdir())
    if occupied and not overwrite:
        raise UsageError(
            "this folder is occupied",
            where=str(folder),
            remedy="give another folder, or overwrite this one (--overwrite; in Python: overwrite=True)",
        )
    if occupied and not any((folder / name).is_file() for name in ours):
        raise UsageError(
            "this is not a model's or an adapter's folder: not overwritten",
            where=str(folder),
            remedy="give another",
        )
    work, old = (folder.with_name(f".{folder.name}.{end}-{os.getpid()}") for end in ("tmp", "old"))
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            work.mkdir()
            with _errors_of_rust():
                fill(work)
            seal_folder(work)
            flush(work)
            if occupied:
                os.rename(folder, old)
            os.rename(work, folder)
            sync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            if old.exists() and not folder.exists():
                os.rename(old, folder)
            shutil.rmtree(old, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
    return folder


@contextmanager
def _errors_of_rust() -> Iterator[None]:
    """Turn what libraries written in Rust (tokenizers) raise, whose number of the system stands in their
    words alone, into OSError."""
    try:
        yield
    except Exception as error:
        found = re.search(r"\(os error ([0-9]+)\)$", str(error))
        if found is None or isinstance(error, OSError | PetuneError):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def sweep(parent: Path, names: Collection[str], *, alone: bool = False) -> list[str]:
    """Remove what killed commits of `names` left in `parent`; a folder that was about to be replaced gets its
    name back.

    What another living process is at is left alone, unless the caller knows that it is `alone`. Returns the
    names. Raises OSError.
    """
    found = []
    for name in sorted(os.listdir(parent)) if parent.is_dir() else ():
        match = LEFTOVER.fullmatch(name)
        if (
            not match
            or match[1] not in names
            or not (alone or int(match[3]) == os.getpid() or not lives(int(match[3])))
        ):
            continue
        leftover, place = parent / name, parent / match[1]
        if match[2] == "old" and not os.path.lexists(place):
            os.rename(leftover, place)
        else:
            remove(leftover)
        found.append(name)
    return found


def remove(path: Path) -> None:
    """Delete a folder, file or link; never what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(work: Path) -> None:
    """Every file to the disk, readable as the umask allows (safetensors makes its files private), then the
    folders' names."""
    mode = work.stat().st_mode & 0o666
    for place, _, names in os.walk(work, topdown=False):
        for name in names:
            with open_regular(Path(place, name)) as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o666 != mode:
                    os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        sync_folder(Path(place))
