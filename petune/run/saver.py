"""The state of a run on disk: checkpoints, snapshots, `best`, `tuned/`, and the way back from them.

A state is continued only where rows, base and method are those it was saved with. Whatever call a kill comes
in, `best` names a checkpoint that is there (docs/reliability.md has the table).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from petune.errors import FileError, TrainingFault
from petune.log import phase
from petune.methods import frozen_tensors
from petune.models.checksums import comparable, digest
from petune.parallel.launch import process_group
from petune.run import state
from petune.run.audit import Audit
from petune.run.evaluate import Metric
from petune.run.folder import RunFolder
from petune.run.progress import Progress
from petune.run.reporting import Logged
from petune.run.saves import Commit, Facts, Saves, lacks_room
from petune.run.signals import StopRequest
from petune.run.snapshot import KEPT, Snapshots, age
from petune.run.state import HeldState
from petune.run.step import OptimizerStep
from petune.run.summary import command_to_go_on
from petune.run.tuned_files import TunedFiles
from petune.saving import checkpoint, export
from petune.saving.optimizer_state import OptimizerPacker


class Saver:
    """Saves the state of `step` in a run folder and puts it back: the keeper of a run.

    run_id: of the run whose state it is. came_from: what the header says of a run that was resumed.
    """

    def __init__(
        self, step: OptimizerStep, folder: RunFolder, reporter: Logged, stop: StopRequest, metric: Metric
    ) -> None:
        self.step, self.folder, self.reporter, self.stop, self.metric = step, folder, reporter, stop, metric
        self.recipe, self.runner, self.run_id = step.recipe, step.runner, uuid.uuid4().hex
        self.main = self.runner.mesh.main
        self.packer = OptimizerPacker()
        root, device = folder.checkpoints, self.runner.mesh.device
        self.snapshots = Snapshots(
            root, device, state.write_packed, lambda: self.progress.step, folder.is_lost
        )
        self.saves = Saves(device, self.recipe.timeout / 2)
        self.on_its_way, self._told_of_room = False, False  # a checkpoint beside training, by some rank
        self._reserves = self._writes and self.runner.streamed is None and step.saves_before_its_end
        self.trusted = 0  # the last step at which the frozen weights were compared
        self.came_from: list[str] = []
        self.files = TunedFiles(step, reporter)
        step.keeper = self
        if self.main:
            self._check_disk()

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.step.progress

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hash the base's files while the device trains, and write at the end what is on its way."""
        with self.files.hashing(), self.snapshots, self.saves:
            yield

    def _check_disk(self) -> None:
        """Room, before step 1, for every checkpoint that can stand at once (kept, best, being written) and
        for the tuned files."""
        tuned, whole = state.bytes_of_state(self.runner, self.step.optimizer)
        kept = self.recipe.keep + (KEPT + 1 if self.recipe.snapshot_every else 0)
        checkpoint.require_free(self.folder.path, (kept + 2) * whole + tuned)

    def has_lost_folder(self) -> bool:
        """Whether the run folder is no longer this run's: nothing more is written there, and all stop; `save`
        keeps the state elsewhere."""
        if self.main and self.folder.is_lost(self.run_id):
            self.reporter.detach()
            self.stop.name = self.stop.name or "the loss of the run folder"
        return self.reporter.detached

    # ------------------------------------------------------------ saving

    def save(self, *, beside: bool = False) -> Path:
        """Commit a checkpoint of this very step, point `best` at the best one, rotate; where `beside` and the
        hosts have room for copies, while training goes on.

        Raises TrainingFault if a frozen tensor moved, and what a save on its way has met.
        """
        self._land()
        self._check_frozen()
        held = self._held_state()
        if beside and self._goes_beside(held):
            return self._save_beside(held)
        path = self.folder.checkpoints / f"step-{self.progress.step}"
        if self._writes:
            with phase("writing the checkpoint"):
                if self.main and self.has_lost_folder():
                    self._rescue(held)
                path = self._commit(self.folder.checkpoints, self._facts(), held)
        self._tidy(self.progress)
        self.runner.barrier()  # nobody reads it, or computes on, before it is whole
        return path

    @property
    def _writes(self) -> bool:
        """Whether this process has a part in writing a state."""
        return self.main or not self.runner.uncut

    def _tidy(self, progress: Progress) -> None:
        """Point `best` at what was the best as a checkpoint was taken, and rotate."""
        if self.main:
            root, best = self.folder.checkpoints, progress.best_step
            self.folder.point_best(best, self.metric.name, progress.best_value)
            checkpoint.rotate(root, self.recipe.keep, [] if best is None else [root / f"step-{best}"])

    def _goes_beside(self, held: HeldState) -> bool:
        """Whether a state can be written beside training: all ranks agree."""
        if self.runner.streamed is not None:
            return False  # it rests in host memory, and changes inside the backward pass
        lack = lacks_room(self.saves.needs(held.here) if self._writes else 0)
        if lack is not None and not self._told_of_room:
            self._told_of_room = True
            self.reporter.note(f"training waits while a checkpoint is written: {lack}")
        return lack is None and not self.runner.any([self.has_lost_folder()])[0]

    def _save_beside(self, held: HeldState) -> Path:
        """Copy a state to host memory, and commit it while training goes on."""
        root, facts, progress = self.folder.checkpoints, self._facts(), replace(self.progress)

        def put(commit: Commit) -> None:
            commit(root, facts)
            self._tidy(progress)

        self._put_beside(held, put)
        return root / f"step-{progress.step}"

    def _put_beside(self, held: HeldState, put: Callable[[Commit], None]) -> None:
        """Copy a state to host memory, and let `put` commit the copy while training goes on."""
        if self._writes:
            with phase("copying the state to host memory"):
                self.saves.commit(held, self.progress.step, self.run_id, self.runner.crew, put)
        self.on_its_way = True

    def _land(self) -> None:
        """Wait, on every rank, until the checkpoint on its way is committed; of one in a folder that is lost
        nothing is kept. Raises what has kept a rank from writing it."""
        if self.on_its_way:
            with phase("waiting until the last checkpoint is written"):
                if self.runner.any([self.has_lost_folder()])[0]:
                    self.saves.give_up()
                self.saves.drain()
                self.runner.barrier()  # however long one of them has to work alone
            self.on_its_way = False

    def check(self) -> None:
        """Raise what the threads that write snapshots and checkpoints have met, unless it is that the folder
        is lost: then `save` keeps the state elsewhere."""
        self.snapshots.check()
        if self.saves.fault is not None and not self.folder.is_lost(self.run_id):
            self.saves.check()

    def let_go(self) -> None:
        """End what is on its way when a rank is lost, which may have had a part in it."""
        self.snapshots.drain()
        if self.runner.uncut:
            self.saves.drain()
        self.saves.give_up()
        self.on_its_way = False

    def _held_state(self) -> HeldState:
        return state.held_state(self.runner, self.step.optimizer, self.step.make_optimizer)

    def _commit(self, root: Path, facts: Facts, held: HeldState) -> Path:
        """Commit a state as `root`/step-N: by all ranks, or by the main one where it holds all."""
        return checkpoint.commit(
            root,
            self.progress.step,
            held.begin,
            run_id=self.run_id,
            facts=facts,
            fill=held.fill,
            crew=self.runner.crew,
        )

    def _rescue(self, held: HeldState) -> NoReturn:
        """Keep the state in a new folder beside the one that is gone, from which the run can go on, and say
        where."""
        place = self.folder.beside()
        place.begin(self.run_id)
        path = self._commit(place.checkpoints, self._facts(), held)
        go_on = command_to_go_on(place.path, self.step.prepared.objects)
        what = f"the state of step {self.progress.step} is kept in {path}"
        raise self.folder.lost(what, f"go on with: {go_on}")

    def _check_frozen(self) -> None:
        """Raise TrainingFault if a frozen tensor moved; snapshots since it was last seen whole are set aside
        then."""
        try:
            with phase("comparing the frozen weights with their checksums"):
                self.step.audit.check_frozen()
        except TrainingFault:
            if self.main:
                self.snapshots.distrust(self.trusted)
            raise
        self.trusted = self.progress.step

    def snapshot(self) -> None:
        """Begin to copy the state of this step, to be written while all go on: by the main process, or, where
        it lies over the ranks, as a checkpoint beside training, unless one is on its way."""
        number = self.progress.step
        if self.runner.uncut:
            if self.main and not self.has_lost_folder():
                tensors, facts = state.pack_state(self.step.tuned, self.step.optimizer, self.packer)
                self.snapshots.take(number, tensors, facts, run_id=self.run_id, facts=self._facts())
        elif not any(self.runner.any([self.has_lost_folder(), self.saves.busy])):
            self.saves.drain()
            put = partial(self.snapshots.put, number, self._facts(), self.main)
            self._snapshot_of_all(self._held_state(), put)

    def _snapshot_of_all(self, held: HeldState, put: Callable[[Commit], None]) -> None:
        if self._goes_beside(held):
            self._put_beside(held, put)
        else:
            put(partial(self._commit, held=held))
            self.runner.barrier()

    def begin(self) -> None:
        """Begin to copy the snapshot that was taken last, and make room for a checkpoint's copy, once."""
        self.snapshots.begin()
        if self._reserves and self.step.optimizer.state:
            self._reserves = False
            self.saves.reserve(state.held_here(self.runner, self.step.optimizer), self.runner.uncut)

    def settle(self) -> None:
        """Wait, on the device, until that copy, and a checkpoint's, is whole."""
        self.snapshots.settle()
        self.saves.settle()

    def _facts(self) -> dict[str, Any]:
        """What must be the same for a state to be continued, and the progress it belongs to."""
        return {
            "progress": asdict(self.progress),
            "rows": self.step.prepared.rows.sha256,
            "frozen": self.step.frozen or digest(self.step.audit.frozen_before),
            "method": self.recipe.method_name,
            **self.step.row_mark(),
        }

    # ------------------------------------------------------------ going back

    def restore(self, resume: bool | str | Path, allow_change: Collection[str]) -> None:
        """Go back to a saved state, or say that the run was ended before its first save and starts from the
        beginning."""
        if self.main:
            self.folder.sweep()
        self.runner.barrier()
        found = checkpoint.candidates(self.folder.checkpoints)
        if process_group.inside() and resume is True:  # every machine must see the run folder
            process_group.agree({"newest checkpoint": found[0].name if found else "none"})
        if resume is True and not found:
            self.run_id = self.folder.run_id() or self.run_id
            self.reporter.note("this run has no checkpoint yet: it starts from the beginning")
            if self.main:
                self.folder.point_best(self.progress.best_step, self.metric.name, self.progress.best_value)
                self._cut_metrics(-1)
            return
        path, manifest = self._saved_state(None if resume is True else Path(str(resume)))
        same = not allow_change and manifest.facts.get("rows") == self.step.prepared.rows.sha256
        # else it may be longer
        progress = self._progress_of(path, manifest, self.step.steps.total if same else None)
        if self.main:
            self.folder.refuse_other_run(manifest.run_id, path)
            self._refuse_foreign(manifest.facts, path, allow_change)
        state.restore_parts(path, self.runner, self.step.optimizer, self.step.make_optimizer)
        self.step.progress, self.run_id = progress, manifest.run_id
        self.runner.barrier()
        self.trusted = manifest.step
        if self.main:
            # first: whatever call a kill comes in, `best` names a checkpoint that is there
            self.folder.point_best(progress.best_step, self.metric.name, progress.best_value)
            checkpoint.set_aside(self.folder.checkpoints, manifest.step)
        when = age(manifest, path)
        self.came_from = [f"resumed  at step {manifest.step}{when}"]
        self.reporter.note(f"resumed from {path} at step {manifest.step}{when}")
        if why := self.step.go_to_rows(manifest.facts.get("stream")):
            self.reporter.note(f"the rows before the next one are read again: {why}")
        if self.main:
            self._cut_metrics(manifest.step)

    def rewind(self) -> int:
        """Take the newest state on disk, but go on after the step that has spiked: the steps between count as
        made, and train nothing.

        Returns the step of that state.
        """
        self.snapshots.drain()
        self._land()
        self.runner.barrier()
        path, manifest = self._saved_state()
        self.folder.refuse_other_run(manifest.run_id, path)
        saved, now = self._progress_of(path, manifest, self.step.steps.total), self.progress
        state.restore_parts(path, self.runner, self.step.optimizer, self.step.make_optimizer)
        self.step.progress = replace(
            saved, step=now.step, seconds=now.seconds, recent=now.recent, spikes=now.spikes
        )
        self.runner.barrier()  # nobody saves while another reads
        return manifest.step

    def _progress_of(self, path: Path, manifest: checkpoint.Manifest, planned: int | None) -> Progress:
        return state.progress_of(path, manifest, self.folder.checkpoints, planned, *self.metric)

    def _cut_metrics(self, step: int) -> None:
        """Drop the records of steps that are trained again, and say how many those are."""
        if (last := self.folder.cut_metrics(step)) > max(step, 0):
            again = f"steps {max(step, 0) + 1} to {last}"
            self.reporter.note(f"lost since this state was saved, and trained again: {again}")

    def _saved_state(self, chosen: Path | None = None) -> tuple[Path, checkpoint.Manifest]:
        """The checkpoint at `chosen`, or else the newest checkpoint or snapshot that verifies; the same on
        every rank."""
        if chosen is None:
            path, manifest, skipped = checkpoint.newest_good(self.folder.checkpoints)
            for problem in skipped:
                self.reporter.note(f"NOT RESUMED FROM: {problem}")
        else:
            state.refuse_tuned_folder(chosen)
            path, manifest = chosen, checkpoint.verify(chosen)
        if process_group.inside():
            process_group.agree({"checkpoint": f"step {manifest.step} of run {manifest.run_id}"})
        return path, manifest

    def _refuse_foreign(self, facts: Mapping[str, Any], path: Path, allow_change: Collection[str]) -> None:
        self.step.audit = Audit({}, frozen_tensors(self.step.model) if self.step.frozen is None else {})
        now = self._facts()
        if not comparable(str(facts["frozen"])):
            what = "NOT COMPARED WITH THE BASE of this checkpoint"
            self.reporter.note(f"{what}: its checksum is of another version of petune")
            facts = {**facts, "frozen": now["frozen"]}
        state.refuse_foreign(facts, now, path, allow_change)

    def go_back_to_best(self) -> None:
        """Put the best state into the model; if its checkpoint is damaged, say so and keep the last."""
        progress, fault = self.progress, None
        if progress.best_step is None or progress.best_step == progress.step:
            return
        best = self.folder.checkpoints / f"step-{progress.best_step}"
        try:
            self.folder.refuse_other_run(checkpoint.verify(best).run_id, best)
            state.check_tuned(best, self.runner)
        except FileError as error:
            fault = error
        if self.runner.any([fault is not None])[0]:  # where one process cannot read it, none goes back
            why = fault or "another process cannot"
            self.reporter.note(f"THE BEST CHECKPOINT CANNOT BE READ, tuned/ holds the last state: {why}")
            progress.best_step, progress.best_scores = progress.step, progress.scores
            return
        state.read_tuned(best, self.runner)
        self.reporter.note(
            f"tuned/ holds step {progress.best_step}, the best by {self.metric.name}, not the last"
        )

    # ------------------------------------------------------------ tuned/

    def drain(self) -> None:
        """Wait until the newest states are on disk, and say how many snapshots there were."""
        self._land()
        self.saves.release()
        if not self.has_lost_folder():
            self.snapshots.drain()
        if (line := self.snapshots.summary()) is not None:
            self.reporter.note(line)

    def write_tuned(self) -> str | None:
        """Write `tuned/` in the main process; its identity there, None elsewhere.

        Raises MachineError where the folder was lost, after it was written elsewhere.
        """
        if not self.main:
            self.files.take_part()
            return None
        self.files.wait()
        lost = self.has_lost_folder()
        tuned = (self.folder.beside() if lost else self.folder).tuned
        self.files.write(tuned)
        if lost:
            raise self.folder.lost(
                f"what was trained is kept in {tuned}", "petune.load reads it; the run's records are gone"
            )
        return export.identity(tuned)
