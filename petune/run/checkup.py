"""Whether a run folder is whole: its state, every checkpoint and tuned file against its hashes, the ids, and
what a start would do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from petune.errors import FileError, PetuneError, Problem, told_apart
from petune.files.safetensors import read_json
from petune.log import human
from petune.recipe import load_recipe, load_resolved
from petune.report.results import record_of
from petune.run.entrance import refuse_links
from petune.run.folder import SHIPPED, FolderState, RunFolder
from petune.saving import checkpoint, export

_T = TypeVar("_T")

_RESUME: dict[FolderState, str] = {
    "begun": "starts from the beginning: there is no checkpoint yet",
    "running": "is refused while the process that holds .lock lives",
    "finished": "says that the run is finished",
    "replaced": "is refused: an --overwrite of this run was cut off; start it without --resume",
}


@dataclass
class Checkup:
    """What was found: `facts` by name, a line each, and `problems`, none of a folder that is whole."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def attempt(self, test: Callable[[], _T], gone: Path | None = None) -> _T | None:
        """What `test` returns; what it raises is kept, unless `gone` is no longer there: a run that goes on
        deletes too."""
        try:
            return test()
        except PetuneError as error:
            if gone is None or os.path.lexists(gone):
                self.problems += error.problems
            return None


def check_up(path: Path) -> Checkup:
    """Read all of a run folder and change nothing. Raises FileError for what is none."""
    found, folder = Checkup(), RunFolder(path, load_recipe())
    state = folder.state() if path.is_dir() else "absent"
    if state in ("absent", "foreign") or not folder.has_resolved():
        what = "holds no run" if path.is_dir() else "is not a folder"
        raise FileError(
            what, where=str(path), expected="a folder with resolved.yaml", remedy="give what `out` was"
        )
    found.attempt(partial(refuse_links, folder))
    found.facts += [("run", str(path)), ("state", state), ("id", folder.run_id() or "cannot be read")]
    if recipe := found.attempt(partial(load_resolved, path / "resolved.yaml")):
        found.facts.append(("recipe", f"{recipe.method_name} on {recipe.model}"))
    resume = _checkpoints(found, folder, state)
    _shipped(found, folder, state)
    _records(found, folder, state)
    left = folder.leftovers() if state != "running" else []
    found.facts.append(("leftovers", f"{', '.join(left)}; the next start removes them" if left else "none"))
    if state == "replaced":
        found.problems.append(
            Problem(
                "an --overwrite of this run was cut off", str(path), remedy="start it again, without --resume"
            )
        )
    found.facts.append(("--resume", _RESUME.get(state, resume)))
    found.problems = list(dict.fromkeys(found.problems))  # what two looks have met is told once
    number = len(found.problems)
    damaged = f"damaged: {number} problem" + ("s" if number > 1 else "")
    found.facts.append(("verdict", damaged if number else "whole"))
    return found


def _checkpoints(found: Checkup, folder: RunFolder, state: FolderState) -> str:
    """Verify every checkpoint; what --resume would do with them."""
    whole: dict[Path, bool] = {}  # and whether it is of this run
    for path in checkpoint.candidates(folder.checkpoints):
        kind = "snapshot" if path.parent.name == checkpoint.SNAPSHOTS else "checkpoint"
        manifest = found.attempt(partial(checkpoint.verify, path), path if state == "running" else None)
        if manifest is None:
            found.facts.append((kind, f"{path.name} IS DAMAGED"))
            continue
        found.attempt(partial(folder.refuse_other_run, manifest.run_id, path))
        whole[path] = folder.run_id() in (None, manifest.run_id)
        size = human(sum(int(entry["size"]) for entry in manifest.files.values()))
        found.facts.append(
            (kind, f"{path.name} is whole, {size}" + ("" if whole[path] else ", BUT OF ANOTHER RUN"))
        )
    best = folder.path / "best"
    if best.is_file():
        place = (best.read_text(encoding="utf-8", errors="replace").splitlines() or [""])[0]
        if whole and folder.path / place not in whole and state != "running":
            found.problems.append(
                Problem("names a checkpoint that is not here or not whole", str(best), found=place)
            )
        found.facts.append(("best", place if place.isprintable() else repr(place)))
    newest = next(iter(whole), None)
    if newest is None:
        return "is refused: no checkpoint is whole"
    return f"goes on from {newest.name}" if whole[newest] else f"is refused: {newest.name} is of another run"


def _shipped(found: Checkup, folder: RunFolder, state: FolderState) -> None:
    """Verify `tuned/` and what was made of it; `tuned/` must be the very folder that the run wrote."""
    if state == "finished" and not folder.tuned.is_dir():
        found.problems.append(
            Problem("is missing, though the run has finished", str(folder.tuned), remedy="use another copy")
        )
    for place in (folder.tuned, *(folder.path / name for name in SHIPPED)):
        if place.is_dir():
            said = found.attempt(partial(export.verify, place), place if state == "running" else None)
            found.facts.append((place.name, said or "IS DAMAGED"))
    if state == "finished" and folder.tuned.is_dir():
        found.attempt(partial(_refuse_other_tuned, folder))


def _records(found: Checkup, folder: RunFolder, state: FolderState) -> None:
    """The ids in the JSON files, and that every record can be read but the last of a run that was cut off."""
    for name in ("env.json", "summary.json"):
        path = folder.path / name
        if path.exists():
            found.attempt(partial(_refuse_other_id, path, folder.run_id()))
        elif state == "finished":
            found.problems.append(Problem("is missing, though the run has finished", str(path)))
    lines = folder.metrics.read_bytes().split(b"\n") if folder.metrics.is_file() else []
    bad = [at for at, line in enumerate(lines, 1) if line and record_of(line) is None]
    if bad and (bad != [len(lines)] or state == "finished"):
        found.problems.append(
            Problem("is not a record", f"{folder.metrics}:{bad[0]}", "a JSON object with a step")
        )
    found.facts.append(("records", f"{len([line for line in lines if line]) - len(bad)} in metrics.jsonl"))


def _refuse_other_id(path: Path, known: str | None) -> None:
    own = read_json(path).get("run_id")
    if known and own != known:
        raise FileError(
            "is of another run than resolved.yaml", where=str(path), expected=known, found=str(own)[:40]
        )


def _refuse_other_tuned(folder: RunFolder) -> None:
    noted = read_json(folder.path / "summary.json").get("tuned_sha256")
    if noted != (own := export.identity(folder.tuned)):
        expected, found = told_apart(str(noted), own)
        raise FileError(
            "is not what this run wrote",
            where=str(folder.tuned),
            expected=f"a manifest of sha256 {expected}",
            found=found,
            remedy="use another copy of the run",
        )
