"""The run folder: what lies where, which state it is in, and the writing of everything in it but checkpoints
and tuned weights.

recipe.yaml  resolved.yaml  env.json  setup.json  metrics.jsonl  loss.png  run.log  summary.json
             checkpoints/step-N/  best  tuned/  README.md  report.html

A run is what its resolved.yaml says, whose first line is the run's id. Whatever call a process is killed in,
the state that is left has a way on (docs/reliability.md has the table), and the next start removes what was
left half-made.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from petune.errors import FileError, MachineError
from petune.files.atomic import LEFTOVER, sweep
from petune.files.json_fields import sealed
from petune.files.lock import RunLock
from petune.files.safetensors import sync_folder, write_file, write_json, writing
from petune.recipe import Recipe, load_resolved, sealed_settings
from petune.report import page
from petune.report.files import RunFiles
from petune.report.results import record_of
from petune.run.plot import draw_loss
from petune.run.readme import readme
from petune.saving import checkpoint
from petune.saving.servers import ALIASES, SERVERS

# what a run folder holds
FolderState = Literal["absent", "begun", "running", "stopped", "finished", "replaced", "foreign"]

RANK_LOGS = "ranks"  # what processes other than the first have printed
APPENDED = ("metrics.jsonl", "run.log")
_RESOLVED, _SUMMARY, _REPLACING = "resolved.yaml", "summary.json", ".replacing"
# what an --overwrite replaces, or removes last, when all else is cleared
_LASTING = ("recipe.yaml", _RESOLVED, _REPLACING)
_PASSING = (
    *(*APPENDED, _SUMMARY, "env.json", "setup.json", "loss.png", "eval.json", "README.md", "best"),
    *("report.html", "forecast.json", "answers.json", "ranks.json"),
)
ACTIVATIONS = "activations"  # of frozen blocks, until the run is done
_WRITTEN = ("checkpoints", "tuned", ACTIVATIONS)  # by the run, which holds the lock
# by other commands, which do not
SHIPPED = ("merged", "hf", "peft", "adapters", "bitsandbytes", *SERVERS, *ALIASES)
FILES, FOLDERS = (*_LASTING, *_PASSING), (*_WRITTEN, *SHIPPED)
_PACKAGES = ("petune", "torch", "transformers", "safetensors", "datasets", "accelerate", "pydantic")
_ID = re.compile(rb"# run ([0-9a-f]{32})\n")


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, and the writing of everything in it but checkpoints."""

    path: Path
    recipe: Recipe

    @staticmethod
    def of(recipe: Recipe) -> RunFolder:
        """The folder a recipe writes to, from the working directory; without `out`, runs/<recipe>-<time>."""
        out = recipe.out or f"runs/{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        return RunFolder(Path(out), recipe)

    @property
    def checkpoints(self) -> Path:
        """Where step-N folders are committed."""
        return self.path / "checkpoints"

    @property
    def tuned(self) -> Path:
        """The tuned weights, as others read them."""
        return self.path / "tuned"

    @property
    def metrics(self) -> Path:
        """One JSON object per step and per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """Every line the run said, with the time, and the traceback of what ended it."""
        return self.path / "run.log"

    @property
    def picture(self) -> Path:
        """The loss curve, when the plot extra is installed."""
        return self.path / "loss.png"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.path / page.NAME

    # ------------------------------------------------------------ what is here

    def state(self) -> FolderState:
        """What the folder holds, by names alone: nothing in it is read. The lock of a process that lives
        counts first."""
        if RunLock(self.path).is_held():
            return "running"
        if not os.path.lexists(self.path) or (
            self.path.is_dir() and all(is_beginning(name) for name in os.listdir(self.path))
        ):
            return "absent"
        if not self.has_resolved():
            return "foreign"
        if self.is_being_replaced():
            return "replaced"
        if self.finished():
            return "finished"
        return "stopped" if checkpoint.candidates(self.checkpoints) else "begun"

    def leftovers(self) -> list[str]:
        """Names of what killed processes left half-made here: the next start removes them, or ends what they
        were at."""
        top = [name for name in names(self.path) if is_beginning(name) and name not in (RANK_LOGS, ".lock")]
        return top + [f"checkpoints/{name}" for name in checkpoint.leftovers(self.checkpoints)]

    def has_resolved(self) -> bool:
        """Whether a run began here."""
        return (self.path / _RESOLVED).is_file()

    def resolved(self) -> dict[str, Any]:
        """Every setting the run began with. Raises FileError where they were cut or edited since."""
        return load_resolved(self.path / _RESOLVED).resolved()

    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / _SUMMARY).is_file()

    def is_being_replaced(self) -> bool:
        """Whether an --overwrite of the run here was cut off: what is left of it is nobody's any more."""
        return (self.path / _REPLACING).is_file()

    def run_id(self) -> str | None:
        """The id of the run that began here; None where none did, or where it cannot be read."""
        try:
            with (self.path / _RESOLVED).open("rb") as file:
                match = _ID.match(file.read(64))
        except OSError:
            return None
        return match[1].decode() if match else None

    def is_lost(self, run_id: str) -> bool:
        """Whether the folder of this run was removed, moved or taken by another run while it trained.

        Raises MachineError where nobody can tell, as its disk does not answer.
        """
        with writing(self.path / _RESOLVED, "look at the run folder"):
            return not self.has_resolved() or self.run_id() not in (run_id, None)

    def refuse_other_run(self, run_id: str, path: Path) -> None:
        """Raise FileError for the checkpoint at `path`, of run `run_id`, where that is not the run that began
        here."""
        known = self.run_id() or run_id  # whoever reads the settings says that it cannot be read
        if run_id != known:
            remedy = (
                "move it out of this folder, or go on from another checkpoint; for its weights alone:"
                " init_adapter"
            )
            sides = {"expected": f"run {known}", "found": f"run {run_id}"}
            raise FileError(
                "is a checkpoint of another run than the one that began here",
                where=str(path),
                remedy=remedy,
                **sides,
            )

    def lost(self, kept: str, remedy: str) -> MachineError:
        """The error of a run whose folder is lost; `kept` says what is where instead."""
        return MachineError(
            f"the run folder was removed, moved or taken by another run; {kept}",
            where=str(self.path),
            remedy=remedy,
        )

    # ------------------------------------------------------------ its beginning

    def clear_rank_logs(self) -> None:
        """Delete what the processes of the run that is here have printed; before those of the next one start,
        which write there."""
        if (self.path / RANK_LOGS).is_dir():
            with writing(self.path / RANK_LOGS):
                shutil.rmtree(self.path / RANK_LOGS)

    def begin(self, run_id: str, *, overwrite: bool = False) -> None:
        """Write what is known before the first step; a run that is resumed counts as unfinished from here on.
        Call it holding the lock."""
        # it may lie in this very folder, so it is read before anything is cleared
        source = self.recipe.source
        written = (
            source.read_bytes() if source is not None and source.is_file() else self.recipe.to_yaml().encode()
        )
        with writing(self.path):
            self.sweep()
            replacing = self.has_resolved() and (overwrite or self.is_being_replaced())
            if replacing:
                self._clear()
            (self.path / _SUMMARY).unlink(missing_ok=True)
            write_file(self.path / _RESOLVED, [sealed_settings(self.recipe, run_id)], sync=True)
            if replacing or not (self.path / "recipe.yaml").exists():
                write_file(self.path / "recipe.yaml", [written])
            (self.path / _REPLACING).unlink(missing_ok=True)
            write_json(self.path / "env.json", {"run_id": run_id, **environment()})

    def _clear(self) -> None:
        """Delete the run that is here but for its recipe. The mark comes first: killed meanwhile, a start
        finds it and clears the rest."""
        write_file(self.path / _REPLACING, [b""], sync=True)
        for name in _PASSING:
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.path / name for name in FOLDERS):
            if folder.is_dir():
                shutil.rmtree(folder)
        sync_folder(self.path)

    def sweep(self) -> list[str]:
        """Remove what killed processes left half-made, or end what they were at; call it holding the lock.
        Returns the names."""
        swept = sweep(self.path, (*FILES, *_WRITTEN), alone=True)
        swept += sweep(self.path, SHIPPED)
        return swept + checkpoint.sweep(self.checkpoints)

    # ------------------------------------------------------------ its records

    def point_best(self, step: int | None, metric: str, value: float | None) -> None:
        """Say in `best` which checkpoint is the best so far; None: there is no such file."""
        if step is None:
            with writing(self.path / "best"):
                (self.path / "best").unlink(missing_ok=True)
            return
        write_file(self.path / "best", [f"checkpoints/step-{step}\n{metric} {value}\n".encode()], sync=True)

    def cut_metrics(self, step: int) -> int:
        """Drop records after `step`: the resumed run writes them again. Returns the last step that had a
        record, at least `step`."""
        if not self.metrics.exists():
            return step
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        whole = [(line, int(record["step"])) for line in lines if (record := record_of(line)) is not None]
        kept = [line for line, own in whole if own <= step]
        if len(kept) < len(lines):
            write_file(self.metrics, ["".join(f"{line}\n" for line in kept).encode()])
        return max([step, *(own for _, own in whole)])

    def note_setup(self, facts: Mapping[str, Any]) -> None:
        """Write what is known before the first step; when it began stays what it was when a run goes on."""
        known = RunFiles(self.path).setup
        same = known.get("run_id") == facts["run_id"] and "began" in known
        write_json(self.path / "setup.json", {**facts, **({"began": known["began"]} if same else {})})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write loss.png (with the plot extra), README.md, the page about the run and, last, summary.json,
        which marks the run as finished."""
        draw_loss(self.metrics, self.picture)
        write_file(self.path / "README.md", [readme(self.recipe, self.path, summary).encode()])
        if self.recipe.report:
            page.write_report([RunFiles(self.path, ending=summary)], self.report)
        write_json(self.path / _SUMMARY, sealed(summary), sync=True)

    def beside(self) -> RunFolder:
        """A new, empty folder next to this one, or where none can be made there in the working directory,
        under a name that says whose."""
        for parent in (self.path.parent, Path()):
            for number in range(1, 100):
                place = parent / f"{self.path.name}-rescued-{number}"
                try:
                    place.mkdir(parents=True)
                except FileExistsError:
                    continue
                except OSError:
                    break
                return replace(self, path=place)
        what = "the run folder is gone, and no other can be made"
        raise MachineError(what, where=str(self.path), remedy="look at the disk")


def names(folder: Path) -> list[str]:
    """What a folder holds, sorted; nothing where it is none, or a link."""
    return sorted(os.listdir(folder)) if folder.is_dir() and not folder.is_symlink() else []


def is_beginning(name: str) -> bool:
    """Whether a name is of what petune makes before a run has begun, or leaves when it is killed: a folder of
    such names alone is free."""
    match = LEFTOVER.fullmatch(name)
    return name in (".lock", RANK_LOGS, _REPLACING) or bool(match and match[1] in (*FILES, *FOLDERS))


@cache
def environment() -> dict[str, Any]:
    """Versions and machine, without names of users or hosts."""
    import torch

    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    devices = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    system = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    return {"packages": found, **system, "threads": torch.get_num_threads(), "cuda_devices": devices}
