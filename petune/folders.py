"""A folder that appears whole, on disk, or not at all: written under another name, put under a manifest, flushed, and renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from petune.errors import UsageError
from petune.folder_manifest import seal_folder
from petune.tensorfile import open_regular, sync_folder, writing


def commit_folder(folder: Path, fill: Callable[[Path], None], overwrite: bool, ours: Collection[str]) -> Path:
    """Let `fill` write into a sibling of `folder`, flush it and give it the name by one rename; a failure leaves things as they were.

    With `overwrite` a folder that holds one of the files `ours` is replaced. Raises UsageError for any other occupied place, MachineError.
    """
    folder = folder.absolute()
    folder = folder.resolve() if folder.is_symlink() else folder
    occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if occupied and not overwrite:
        raise UsageError("this folder is occupied", where=str(folder), remedy="give another, or overwrite it (--overwrite)")
    if occupied and not any((folder / name).is_file() for name in ours):
        raise UsageError("this is not a model's or an adapter's folder: not overwritten", where=str(folder), remedy="give another")
    work, old = (folder.with_name(f".{folder.name}.{end}-{os.getpid()}") for end in ("tmp", "old"))
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            for leftover in (work, old):
                shutil.rmtree(leftover, ignore_errors=True)
            work.mkdir()
            fill(work)
            seal_folder(work)
            _flush(work)
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


def _flush(work: Path) -> None:
    """Every file to the disk, readable as the umask allows (safetensors makes its files private), then the folders' names."""
    mode = work.stat().st_mode & 0o666
    for place, _, names in os.walk(work, topdown=False):
        for name in names:
            with open_regular(Path(place, name)) as file:
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        sync_folder(Path(place))
