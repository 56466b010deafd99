"""What a run was asked for, settled: a recipe and how to begin. The launcher writes it to a file, and every
rank reads that."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from petune.parallel.launch import orders, process_group
from petune.recipe import Recipe, differences
from petune.recipe.handing import hand_over, take_over
from petune.run.entrance import entered
from petune.run.folder import RunFolder
from petune.run.notebook import fitting_reporter
from petune.run.reporting import Reporter
from petune.saving import checkpoint


@dataclass(frozen=True)
class Job:
    """A recipe, its run folder and how to begin there.

    resume: True goes on from the newest state that verifies, a path from exactly that one. since: when the
    first ranks were started, in seconds since the epoch; 0 where no launcher of petune's has started any.
    reporter: what the first rank speaks with, as MODULE:NAME; None: lines, or a bar in a notebook.
    """

    recipe: Recipe
    folder: RunFolder
    resume: bool | str | Path = False
    overwrite: bool = False
    allow_change: Collection[str] = ()
    since: float = 0.0
    reporter: str | None = None

    @contextmanager
    def speaking(self) -> Iterator[Reporter]:
        """What this process speaks with, closed however the block ends."""
        if self.reporter is None or process_group.started()[0]:
            yield fitting_reporter()
            return
        module, _, name = self.reporter.partition(":")
        with closing(getattr(import_module(module), name)()) as found:
            yield found

    def entered(self) -> AbstractContextManager[None]:
        """Hold the lock of the run folder; raises as petune.run.entrance.entered."""
        begin = {"resume": bool(self.resume), "overwrite": self.overwrite}
        return entered(self.folder, **begin, allow_change=self.allow_change)

    def is_done(self) -> bool:
        """Whether the run that is to be resumed has ended already, with these very settings."""
        if self.resume is not True or not self.folder.finished():
            return False
        return not differences(self.folder.resolved(), self.recipe.resolved())

    def has_state(self, folder: RunFolder) -> bool:
        """Whether a run that is resumed in `folder` has a state to go on from; without, it begins anew."""
        return self.resume is not True or bool(checkpoint.candidates(folder.checkpoints))

    def again(self) -> Job:
        """The same, or, for a rank that was started anew after the run had begun, the job to take that up."""
        if not process_group.restarted() or not going_on(self.folder, self.since):
            return self
        return replace(self, resume=True, overwrite=False)

    def write(self, scratch: Path) -> Path:
        """The job as a file in `scratch`, an empty folder that lasts as long as the ranks do."""
        file, recipe = scratch / "job.json", hand_over(self.recipe, str(self.folder.path))
        if self.recipe.source is None:
            written = scratch / "recipe.yaml"  # what the run folder's recipe.yaml will say
            written.write_text(self.recipe.to_yaml(), encoding="utf-8")
            recipe |= {"source": str(written), "notes": []}  # the launcher has said that there was no file
        how: dict[str, Any] = {
            "reporter": self.reporter,
            "resume": self.resume if self.resume is True else str(self.resume or ""),
            "overwrite": self.overwrite,
        }
        facts = {"recipe": recipe, **how, "allow_change": list(self.allow_change), "since": self.since}
        file.write_text(json.dumps(facts), encoding="utf-8")
        return file

    @staticmethod
    def read(file: Path) -> Job:
        """What `write` has written."""
        facts = json.loads(file.read_text(encoding="utf-8"))
        recipe = take_over(facts.pop("recipe"))
        return Job(recipe, RunFolder.of(recipe), **facts)


def going_on(folder: RunFolder, since: float) -> bool:
    """Whether this rank was started anew for a run that has begun since the first ranks were: then it is
    taken up again.

    A rank that replaces one always is: nobody waits for it before the run has begun. Where all ranks start
    anew, nobody is left to ask.
    """
    if orders.generation():
        return True
    begun = process_group.restarted() > 0 and folder.has_resolved() and not folder.is_being_replaced()
    return begun and (folder.path / "resolved.yaml").stat().st_mtime >= since
