"""The only training loop. `petune train recipe.yaml` ends here, and the optimizer step stands in `Training.step`.

The rows of step k are a pure function of seed, epoch and k, and the learning rate of k alone, so resuming needs no cursor but the step.
Gradients are sums over rows divided once by the trained tokens of the whole step, so accumulation changes memory and not numbers. The file
is over 300 lines long because stepping, saving and ending one run are one story and read best in order.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from petune.errors import FileError, RecipeError, Stopped, TrainingFault
from petune.files.hashes import FileHashes
from petune.log import phase
from petune.methods import count_parameters, describe, frozen_tensors, tuned_parameters
from petune.methods.configs import method_of
from petune.models.source import model_files
from petune.parallel import Mesh, alone, local
from petune.parallel.launch import process_group
from petune.rng.dropout import step_key
from petune.rng.generators import rng_state, seed_others, set_rng_state
from petune.run import distributed, state
from petune.run.audit import Audit, comparable, digest, frozen_checksums
from petune.run.build import Prepared, build, choose_place, run_on
from petune.run.callbacks import Callbacks
from petune.run.control import head_only_control, untouched_base
from petune.run.evaluate import Batch, evaluate, scoring, shortcomings, undecided
from petune.run.folder import RunFolder
from petune.run.objects import base_name
from petune.run.progress import Progress
from petune.run.reporting import Logged, Trackers
from petune.run.schedule import learning_rate, plan_steps, units_of_step
from petune.run.signals import StopAsked, StopRequest
from petune.run.snapshot import KEPT, Snapshots, age
from petune.run.spikes import SpikeRule, refuse_non_finite, report_spike, spike_fault
from petune.run.summary import closing_lines, command_to_go_on, explain_memory, header_lines, peak_memory
from petune.saving import checkpoint, export
from petune.tasks import METRICS, Example, class_weights, collate, count, pad_token_id

_T = TypeVar("_T")
Generators = tuple[dict[str, Tensor], dict[str, Any]]


class Training:
    """One run in memory: the runner with its model, optimizer, units and progress. In a group, every process has one."""

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        reporter: Logged,
        stop: StopRequest,
        mesh: Mesh | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        mesh = mesh or alone(choose_place(prepared.recipe).device)
        self.callbacks = callbacks or Callbacks()
        self.prepared, self.folder, self.reporter, self.stop = prepared, folder, reporter, stop
        self.recipe, self.task, self.tokenizer = prepared.recipe, prepared.task, prepared.tokenizer
        self.place = choose_place(self.recipe)
        self.metric, self.larger_is_better = self._metric()
        self.trackers = Trackers(self.recipe.trackers if mesh.main else ())
        self.progress, self.trusted = Progress(), 0  # `trusted`: the last step at which the frozen weights were compared
        self.units = prepared.encoded.train
        seed_others(self.recipe.seed)
        self.weights = self._class_weights()
        self._explain_memory = partial(explain_memory, self.recipe, lambda: self.progress.step + 1)
        with self._explain_memory("loading of the model"):
            model = build(prepared)
            self.described = describe(model), count_parameters(model)
            if process_group.inside():
                self.fingerprint = distributed.agree_on_model(model)
            whole = mesh.plan.world > 1 and mesh.main
            with phase("taking checksums of the whole model") if whole else nullcontext():
                self.frozen = digest(frozen_checksums(model)) if whole else None
            if process_group.inside():
                process_group.barrier()  # the main process had more to do
            self.runner = run_on(model, prepared, mesh, self.weights)
        self.model, self.tuned = self.runner.model, self.runner.tuned
        recipe = self.recipe
        self.steps = plan_steps(len(self.units), recipe.batch_size * recipe.accumulate, recipe.epochs, recipe.max_steps, recipe.warmup)
        self.make_optimizer = partial(state.make_optimizer, recipe)
        self.optimizer = self.runner.streamed or self.make_optimizer(self.tuned)
        self.run_id = uuid.uuid4().hex
        self.spikes = SpikeRule(recipe.on_spike, recipe.spike_window, recipe.spike_threshold)
        self.packer = checkpoint.OptimizerPacker()
        self.snapshots = Snapshots(folder.checkpoints, mesh.device, state.write_packed, lambda: self.progress.step, folder.is_lost)
        self.came_from: list[str] = []  # what the header says of a run that was resumed
        if mesh.main:
            self._check_disk()
        stop.save_first()

    # ------------------------------------------------------------ set up

    def _metric(self) -> tuple[str, bool]:
        name = self.recipe.metric or self.task.metric
        known = METRICS[self.task.name]
        if name not in known:
            raise RecipeError(f"task {self.task.name} has no metric {name!r}", where=self.recipe.where("metric"), expected=", ".join(known))
        direction = known[name] if self.recipe.direction == "auto" else self.recipe.direction
        return name, direction == "max"

    def _class_weights(self) -> Tensor | None:
        weights = class_weights(self.recipe.class_weights, self.units, self.prepared.rows.labels or ())
        return None if weights is None else torch.tensor(weights, dtype=torch.float64, device=self.place.device)

    # ------------------------------------------------------------ the whole run

    def run(self, resume: bool | str | Path, allow_change: Collection[str] = ()) -> None:
        """From wherever the run stands to its end. Raises Stopped after a signal, once the state is saved."""
        with FileHashes(self._base_files()) as self.base_hashes, self.snapshots:  # while the device trains
            self._run(resume, allow_change)

    def _run(self, resume: bool | str | Path, allow_change: Collection[str]) -> None:
        self.allow_change = allow_change
        if resume:
            with phase("reading the checkpoint"):
                self._restore(resume, allow_change)
            if self.runner.mesh.main:
                self.folder.begin(self.run_id)
        with phase("taking checksums of the frozen weights"):
            self.audit = self._audit()
        try:
            self.trackers.start(self.folder.path, self.recipe.resolved())
            facts = header_lines(self.prepared, self.described, self.steps, self.place, self.runner.plan, self.folder.path)
            self.reporter.header([*facts, *self.came_from], self.steps.total)
            self.runner.barrier()  # the main process had more to do
            if new := not self.progress.before:
                self._score_base()
            if (self.recipe.on_spike == "rewind" or process_group.replaces()) and (new or not self.came_from or resume is not True):
                self.save()  # there is always a state to go back to
            distributed.outlive(self._steps, self._meet_again, self.runner.restart_whole())
            if (reason := self._ended_early()) and self.progress.step < self.steps.total:
                self.reporter.note(f"stopped early: {reason}")
        except StopAsked as signal:
            path = self.save()
            raise Stopped(
                f"stopped by {signal} at step {self.progress.step} of {self.steps.total}; saved {path}",
                remedy=f"go on with: {command_to_go_on(self.folder.path, self.prepared.objects)}",
            ) from None
        finally:
            self.trackers.finish()
        self._finish()

    def _steps(self) -> None:
        if self._evaluation_due() and self.progress.scored_step != self.progress.step:
            self._after_step()  # a stop, or the loss of a rank, cut this evaluation off
        while self.progress.step < self.steps.total and not self._ended_early():
            self._check_stop()
            self.snapshots.check()
            with phase("first step, which prepares the kernels") if not self.audit.updates else nullcontext():
                record = self.step()
            self._has_lost_folder()
            self.reporter.step(record)
            self.trackers.log(record)
            self.callbacks.on_step(record)
            self._after_step()

    def _meet_again(self) -> None:
        """Join the group again after a rank was replaced, and go back with it to the newest saved state. The model stays where it is."""
        self.stop.at_once("while a rank was replaced", f"go on with: {command_to_go_on(self.folder.path, self.prepared.objects)}")
        self.snapshots.drain()
        distributed.rejoin(self.runner, self.folder, self.prepared, self.fingerprint)
        known = self.audit.frozen_before
        self._restore(True, self.allow_change)
        self.audit, self.audit.frozen_before = self._audit(), known
        self.runner.barrier()
        self.stop.save_first()

    def _check_stop(self) -> None:
        self._has_lost_folder()
        self.stop.check(self.runner.any)

    def _has_lost_folder(self) -> bool:
        """Whether the run folder is no longer this run's: nothing more is written there, and all stop; `save` keeps the state elsewhere."""
        if self.runner.mesh.main and self.folder.is_lost(self.run_id):
            self.reporter.detach()
            self.stop.name = self.stop.name or "the loss of the run folder"
        return self.reporter.detached

    def _audit(self) -> Audit:
        frozen = {name: value for module in self.runner.modules for name, value in frozen_tensors(module).items()}
        streamed = self.runner.streamed
        moving, has_gradient = (self.tuned, None) if streamed is None else (streamed.moving, streamed.has_gradient)
        return Audit(moving, {name: local(value) for name, value in frozen.items()}, self.runner.names, self.runner.any, has_gradient)

    def _after_step(self) -> None:
        """Evaluate and save where the recipe says so; an evaluation that is the best so far is always saved."""
        step = self.progress.step
        best = self._evaluation_due() and self._evaluate_and_compare()
        save_due = step % (self.recipe.save_every or self.steps.per_epoch) == 0 or step == self.steps.total
        if best or save_due or self._ended_early():
            self.save()
        elif self.recipe.snapshot_every and step % self.recipe.snapshot_every == 0:
            self._snapshot()

    def _evaluation_due(self) -> bool:
        step, last = self.progress.step, self.progress.step == self.steps.total or self.callbacks.ended_by is not None
        return step > 0 and (step % (self.recipe.eval_every or self.steps.per_epoch) == 0 or last)

    def _ended_early(self) -> str | None:
        """Why the run ends after this step though more were planned; None where it does not."""
        if self.recipe.patience is not None and self.progress.worse >= self.recipe.patience:
            return f"{self.progress.worse} evaluations without a better {self.metric}"
        return self.callbacks.ended_by and f"{self.callbacks.ended_by} asked for it at step {self.progress.step}"

    # ------------------------------------------------------------ one step

    def micro_batches(self, step: int) -> list[Batch]:
        """This replica's padded batches of step `step` (from 0), one per forward pass, on the CPU. `rows` numbers them within the step."""
        numbered = list(enumerate(self.rows_of(step)))
        found = (self._batch(chunk, self.prepared.encoded.packed) for chunk in _chunks(numbered, self.recipe.batch_size))
        return [batch for batch in found if batch is not None]

    def rows_of(self, step: int) -> list[Example]:
        """What step `step` (from 0) trains on, over all replicas; masks are drawn here, for all of it, whatever the plan."""
        seed = self.recipe.seed
        return self.prepared.encoded.drawn(
            [self.units[index] for index in units_of_step(step, self.steps, seed)], f"seed {seed} step {step}"
        )

    def _batch(self, numbered: Sequence[tuple[int, Example]], packed: bool = False) -> Batch | None:
        """This replica's rows of one forward pass; where all must go forward together, a row that counts for nothing stands in for none."""
        mine = self.runner.share(numbered)
        if not mine and self.runner.plan.sharding is None:
            return None
        rows = mine or [(-1, numbered[0][1])]
        pad, shortest = pad_token_id(self.tokenizer), self.runner.plan.tp
        batch = collate([example for _, example in rows], self.task.name, pad, packed=packed, shortest=shortest)
        return batch | {"rows": torch.tensor([number for number, _ in rows])}

    def _batches(self, units: Sequence[Example], size: int) -> Iterator[Batch | None]:
        """This replica's batches of an evaluation."""
        yield from (self._batch(chunk) for chunk in _chunks(list(enumerate(units)), size))

    def step(self) -> dict[str, Any]:
        """One optimizer step: forward and backward over its micro-batches, clip, update. Returns the record to log.

        Raises TrainingFault, before the update, when loss or gradient is not finite and when no label of the step is trained; where updates
        are made inside the backward pass, a gradient that is not finite is found after them.
        """
        began, number, runner = time.perf_counter(), self.progress.step, self.runner
        process_group.at_step(number)
        generators: Generators = ({}, {}) if self.recipe.on_spike == "off" else rng_state()
        micro = self.micro_batches(number)
        total = runner.sum([sum(count(_real(batch), self.weights) for batch in micro)])[0]
        if not total:
            raise TrainingFault(
                "every label of this step is masked", where=f"step {number + 1}", remedy="look at the rows with petune data"
            )
        lr = learning_rate(number, self.steps, self.recipe.learning_rate, self.recipe.schedule)
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        for module in runner.modules:
            module.train()
        with self._explain_memory("forward and backward pass"):
            loss = runner.backward(micro, total, self._dropout_key(number), self.snapshots.begin)
        norm = runner.clip(self.recipe.clip)
        refuse_non_finite(loss, norm, number + 1, lambda: self._places(number), made=runner.streamed is not None)
        found = self.spikes.judge(loss, norm, self.progress, runner.any)
        trained, back = found is None or self.recipe.on_spike == "warn", None
        if trained:
            self._update()
        self.optimizer.zero_grad(set_to_none=True)
        if found is not None and not trained:
            back = self._leave_out(found, number, generators)
        record = self._record(loss, norm, lr, time.perf_counter() - began, trained)
        if found is not None:
            line, more = report_spike(self.recipe.on_spike, found, number + 1, self._places(number), back)
            self.reporter.note(line)
            record |= more
        return record

    def _update(self) -> None:
        self.audit.after_backward()
        self.snapshots.settle()
        with self._explain_memory("optimizer step"):
            self.optimizer.step()
        self.audit.after_update()

    def _dropout_key(self, step: int) -> int | None:
        """What the masks of a step are drawn from; None leaves them to torch, where recomputing or compiling is not ours."""
        runner = self.runner
        theirs = self.recipe.compile or (not runner.owned and (runner.plan.world == 1 or self.recipe.gradient_checkpointing))
        return None if theirs else step_key(self.recipe.seed, step)

    def _places(self, step: int) -> list[str]:
        return [example.where for example in self.rows_of(step)]

    def _leave_out(self, found: str, number: int, generators: Generators) -> int | None:
        """End the run before a step that has spiked, or make no update of it; the step that the run has gone back to, where it has.

        `generators`: their state before the step, which the checkpoint of that moment has.
        """
        if self.spikes.ends(self.progress):
            set_rng_state(*generators, "before the step")
            in_a_row, self.progress.spikes = self.progress.spikes, 0  # a run that goes on from here may meet as many again
            raise spike_fault(found, number + 1, self._places(number), self.save(), in_a_row)
        return self._rewind() if self.recipe.on_spike == "rewind" else None

    def _rewind(self) -> int:
        """Take the newest state on disk, but go on after the step that has spiked: the steps between count as made, and train nothing.

        Returns the step of that state.
        """
        self.snapshots.drain()
        self.runner.barrier()
        path, manifest = self._saved_state()
        self.folder.refuse_other_run(manifest.run_id, path)
        saved, now = self._progress_of(path, manifest, self.steps.total), self.progress
        state.restore_parts(path, self.runner, self.optimizer, self.make_optimizer)
        self.progress = replace(saved, step=now.step, seconds=now.seconds, recent=now.recent, spikes=now.spikes)
        self.runner.barrier()  # nobody saves while another reads
        return manifest.step

    def _record(self, loss: float, norm: float, lr: float, seconds: float, trained: bool) -> dict[str, Any]:
        progress = self.progress
        tokens = sum(example.tokens for example in self.rows_of(progress.step))
        progress.advance(loss, tokens, seconds, trained=trained)
        return {
            "step": progress.step,
            "epoch": round(progress.step / self.steps.per_epoch, 4),
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens": progress.tokens,
            "tokens_per_s": round(tokens / max(seconds, 1e-9), 1),
        }

    # ------------------------------------------------------------ scores

    def evaluate(self) -> dict[str, float]:
        """Scores on the held-out rows. Raises StopAsked when a stop was asked for meanwhile."""
        held_out = self._batches(self.prepared.encoded.eval, self.recipe.eval_batch_size or self.recipe.batch_size)
        labels = self.prepared.rows.labels or ()
        doing = phase(f"evaluating on {len(self.prepared.encoded.eval)} rows")
        with doing, self._explain_memory("evaluation"), scoring(*self.runner.modules):
            return evaluate(self.runner.logits, held_out, self.task.name, labels, self.runner.sum, self._check_stop)

    def _score_base(self) -> None:
        """Scores of the untouched base and of the head-only control, kept in progress."""
        control = None
        with untouched_base(self.runner.modules, self.recipe.method):
            before = self.evaluate()
            if self.task.name == "classify" and self.recipe.head_only:
                with self._explain_memory("evaluation"):
                    control = head_only_control(self.runner, self.prepared, self._check_stop, self.weights)
        self.progress.before, self.progress.head_only = before, control  # both or, when a stop comes between, neither
        self._report_scores(self.progress.before)
        if self.progress.head_only is not None:
            self.reporter.note(f"control: a head trained on the frozen base reaches accuracy {self.progress.head_only:.4f}")

    def _report_scores(self, scores: Mapping[str, float]) -> dict[str, Any]:
        epoch = round(self.progress.step / self.steps.per_epoch, 4)
        record = {"step": self.progress.step, "epoch": epoch, **{f"eval_{name}": value for name, value in scores.items()}}
        self.reporter.evaluated(record)
        self.trackers.log(record)
        return record

    def _evaluate_and_compare(self) -> bool:
        """Evaluate; whether the named metric is the best so far. A value that is not finite never is."""
        scores = self.evaluate()
        better = self.progress.score(scores, self.metric, self.larger_is_better)
        self.callbacks.on_eval(self._report_scores(scores))
        return better

    # ------------------------------------------------------------ state on disk

    def save(self) -> Path:
        """Commit a checkpoint of this very step, point `best` at the best one, rotate. Raises TrainingFault if a frozen tensor moved."""
        self._check_frozen()
        root = self.folder.checkpoints
        tuned, optimizer = state.whole_state(self.runner, self.optimizer, self.make_optimizer)
        path = root / f"step-{self.progress.step}"
        if self.runner.mesh.main:
            with phase("writing the checkpoint"):
                if self._has_lost_folder():
                    self._rescue(tuned, optimizer)
                path = self._commit(root, tuned, optimizer)
            protect = []
            if self.progress.best_step is not None:
                protect.append(root / f"step-{self.progress.best_step}")
            self._point_best()
            checkpoint.rotate(root, self.recipe.keep, protect)
        self.runner.barrier()  # nobody reads it, or computes on, before it is whole
        return path

    def _commit(self, root: Path, tuned: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> Path:
        def write(place: Path) -> None:
            state.write_packed(place, *state.pack_state(tuned, optimizer))

        return checkpoint.commit(root, self.progress.step, write, run_id=self.run_id, facts=self._facts())

    def _rescue(self, tuned: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> NoReturn:
        """Keep the state in a new folder beside the one that is gone, from which the run can go on, and say where."""
        place = self.folder.beside()
        place.begin(self.run_id)
        path = self._commit(place.checkpoints, tuned, optimizer)
        what, go_on = f"the state of step {self.progress.step}", command_to_go_on(place.path, self.prepared.objects)
        raise self.folder.lost(f"{what} is kept in {path}", f"go on with: {go_on}")

    def _check_frozen(self) -> None:
        """Raise TrainingFault if a frozen tensor moved; snapshots since it was last seen whole are set aside then."""
        try:
            with phase("comparing the frozen weights with their checksums"):
                self.audit.check_frozen()
        except TrainingFault:
            if self.runner.mesh.main:
                self.snapshots.distrust(self.trusted)
            raise
        self.trusted = self.progress.step

    def _snapshot(self) -> None:
        """Begin to copy the state of this step; the main process writes it while all go on."""
        tuned, optimizer = state.whole_state(self.runner, self.optimizer, self.make_optimizer)
        if self.runner.mesh.main and not self._has_lost_folder():
            tensors, facts = state.pack_state(tuned, optimizer, self.packer if self.runner.uncut else None)
            own = not self.runner.uncut
            self.snapshots.take(self.progress.step, tensors, facts, run_id=self.run_id, facts=self._facts(), own=own)

    def _facts(self) -> dict[str, Any]:
        """What must be the same for a state to be continued, and the progress it belongs to."""
        return {
            "progress": asdict(self.progress),
            "rows": self.prepared.rows.sha256,
            "frozen": self.frozen or digest(self.audit.frozen_before),
            "method": self.recipe.method_name,
        }

    def _restore(self, resume: bool | str | Path, allow_change: Collection[str]) -> None:
        """Go back to a saved state, or say that the run was ended before its first save and starts from the beginning."""
        main = self.runner.mesh.main
        if main:
            self.folder.sweep()
        self.runner.barrier()
        found = checkpoint.candidates(self.folder.checkpoints)
        if process_group.inside() and resume is True:
            process_group.agree({"newest checkpoint": found[0].name if found else "none"})  # every machine must see the run folder
        if resume is True and not found:
            self.run_id = self.folder.run_id() or self.run_id
            self.reporter.note("this run has no checkpoint yet: it starts from the beginning")
            if main:
                self._point_best()
                self._cut_metrics(-1)
            return
        path, manifest = self._saved_state(None if resume is True else Path(str(resume)))
        same = not allow_change and manifest.facts.get("rows") == self.prepared.rows.sha256  # else the run may have another length
        progress = self._progress_of(path, manifest, self.steps.total if same else None)
        if main:
            self.folder.refuse_other_run(manifest.run_id, path)
            self._refuse_foreign(manifest.facts, path, allow_change)
        state.restore_parts(path, self.runner, self.optimizer, self.make_optimizer)
        self.progress, self.run_id = progress, manifest.run_id
        self.runner.barrier()
        self.trusted = manifest.step
        if main:
            self._point_best()  # first: whatever call a kill comes in, `best` names a checkpoint that is there
            checkpoint.set_aside(self.folder.checkpoints, manifest.step)
        when = age(manifest, path)
        self.came_from = [f"resumed  at step {manifest.step}{when}"]
        self.reporter.note(f"resumed from {path} at step {manifest.step}{when}")
        if main:
            self._cut_metrics(manifest.step)

    def _progress_of(self, path: Path, manifest: checkpoint.Manifest, planned: int | None) -> Progress:
        return state.progress_of(path, manifest, self.folder.checkpoints, planned, self.metric, self.larger_is_better)

    def _point_best(self) -> None:
        self.folder.point_best(self.progress.best_step, self.metric, self.progress.best_value)

    def _cut_metrics(self, step: int) -> None:
        """Drop the records of steps that are trained again, and say how many those are."""
        if (last := self.folder.cut_metrics(step)) > max(step, 0):
            self.reporter.note(f"lost since this state was saved, and trained again: steps {max(step, 0) + 1} to {last}")

    def _saved_state(self, chosen: Path | None = None) -> tuple[Path, checkpoint.Manifest]:
        """The checkpoint at `chosen`, or else the newest checkpoint or snapshot that verifies; the same on every rank."""
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
        self.audit = Audit({}, frozen_tensors(self.model) if self.frozen is None else {})
        now = self._facts()
        if not comparable(str(facts["frozen"])):
            self.reporter.note("NOT COMPARED WITH THE BASE of this checkpoint: its checksum is of another version of petune")
            facts = {**facts, "frozen": now["frozen"]}
        state.refuse_foreign(facts, now, path, allow_change)

    def _check_disk(self) -> None:
        """Room, before step 1, for every checkpoint that can stand at once (kept, best, being written) and for the tuned files."""
        tuned, whole = state.bytes_of_state(self.runner, self.optimizer)
        kept = self.recipe.keep + (KEPT + 1 if self.recipe.snapshot_every else 0)
        checkpoint.require_free(self.folder.path, (kept + 2) * whole + tuned)

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        """Go back to the best checkpoint, write `tuned/` and what a person wants to see."""
        progress = self.progress
        if not self._has_lost_folder():
            self.snapshots.drain()
        if (line := self.snapshots.summary()) is not None:
            self.reporter.note(line)
        if progress.best_step is not None and progress.best_step != progress.step:
            self._go_back_to_best(self.folder.checkpoints / f"step-{progress.best_step}")
        self.runner.barrier()  # the main process may have had more to read
        peak = max(self.runner.gather(float(peak_memory(self.place.device))))
        model = self._whole_model()  # which one process builds alone, while the others wait to leave
        if model is None:
            return
        with phase("waiting for the hashes of the base's files"):
            files = self._hashed_base()
        name, whole = base_name(self.recipe), self._hashed_object(model)
        lost = self._has_lost_folder()
        place = self.folder.beside() if lost else self.folder
        with phase("writing tuned/"):
            export.save(model, place.tuned, tokenizer=self.tokenizer, base_name=name, base_sha256=whole, base_files=files, overwrite=True)
        if lost:
            raise self.folder.lost(f"what was trained is kept in {place.tuned}", "petune.load reads it; the run's records are gone")
        summary = self._summary(progress.best_scores or progress.scores, int(peak)) | {"tuned_sha256": export.identity(self.folder.tuned)}
        with phase("drawing the loss"):
            self.folder.finish(summary)
        self.reporter.done(closing_lines(summary, self.recipe.method_name, self.folder))
        self.callbacks.on_end(summary)

    def _base_files(self) -> dict[str, Path]:
        """The files whose hashes name the base, in the process that writes `tuned/`; of random weights and a model in memory none."""
        source = self.prepared.source
        if not self.runner.mesh.main or source.kind in ("config", "object"):
            return {}
        return model_files(source.place, getattr(self.runner.model.config, "_commit_hash", None) or source.revision)

    def _hashed_base(self) -> dict[str, dict[str, Any]]:
        """Sizes and hashes of the base's files; without them, which is said, `tuned/` is written all the same."""
        try:
            return self.base_hashes.entries()
        except FileError as error:
            self.reporter.note(f"tuned/ STORES NO HASH OF ITS BASE: {error}")
            return {}

    def _hashed_object(self, model: nn.Module) -> str | None:
        """The hash of the tensors of a base that was given in memory; None where a full tuning has taken its place."""
        if self.prepared.objects.model is None or method_of(self.recipe.method).trains_base:
            return None
        with phase("hashing the base"):
            return export.full_hash(model)

    def _whole_model(self) -> nn.Module | None:
        """The tuned model in one piece: this one, or, where it is cut, one built anew and filled in the main process; None elsewhere."""
        if self.runner.plan.world == 1:
            return self.model
        trained = self.runner.whole({name: value.detach() for name, value in self.tuned.items()})
        if not self.runner.mesh.main:
            return None
        model = build(self.prepared)
        state.fill(tuned_parameters(model), trained, "the trained state")
        return model

    def _go_back_to_best(self, best: Path) -> None:
        """Put the best state into the model; if its checkpoint is damaged, say so and keep the last."""
        progress, saved, fault = self.progress, {}, None
        try:
            self.folder.refuse_other_run(checkpoint.verify(best).run_id, best)
            saved = state.tuned_of(best)
        except FileError as error:
            fault = error
        if self.runner.any([fault is not None])[0]:  # where one process cannot read it, none goes back
            why = fault or "another process cannot"
            self.reporter.note(f"THE BEST CHECKPOINT CANNOT BE READ, tuned/ holds the last state: {why}")
            progress.best_step, progress.best_scores = progress.step, progress.scores
            return
        self.runner.fill(saved)
        self.reporter.note(f"tuned/ holds step {progress.best_step}, the best by {self.metric}, not the last")

    def _summary(self, scores: Mapping[str, float], peak: int) -> dict[str, Any]:
        facts = {
            "run_id": self.run_id,
            "task": self.task.name,
            "format": self.prepared.rows.format,
            "rows": self.prepared.rows.sha256,
            "held_out": len(self.prepared.encoded.eval),
            "num_labels": len(self.prepared.rows.labels or ()),
            "metric": self.metric,
            "direction": "max" if self.larger_is_better else "min",
            **self.progress.summary(scores),
            "lr": self.recipe.learning_rate,
            "peak_memory_bytes": peak,
        }
        return facts | {"warnings": shortcomings(facts), "notes": undecided(facts)}


def _chunks(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    yield from (items[start : start + size] for start in range(0, len(items), size))


def _real(batch: Batch) -> Batch:
    """The batch without rows that only fill it up."""
    return {name: value[batch["rows"] >= 0] for name, value in batch.items()}
