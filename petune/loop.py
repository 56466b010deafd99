"""The only training loop. `petune train recipe.yaml` ends here, and the optimizer step stands in `Training.step`.

The rows of step k are a pure function of seed, epoch and k, and the learning rate of k alone, so resuming needs no cursor but the step.
Gradients are sums over rows divided once by the trained tokens of the whole step, so accumulation changes memory and not numbers. The file
is over 300 lines long because stepping, saving and ending one run are one story and read best in order.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from petune import checkpoint, export, ranks
from petune.assemble import Prepared, build, choose_place, run_on
from petune.audit import Audit, comparable, digest, frozen_checksums
from petune.callbacks import Callbacks
from petune.dropout import step_key
from petune.errors import FileError, MachineError, Problem, RecipeError, Stopped, TrainingFault
from petune.evaluate import Batch, batches, evaluate, head_only, scoring, shortcomings
from petune.file_hashes import FileHashes
from petune.generators import seed_others
from petune.log import phase
from petune.methods import count_parameters, describe, frozen_tensors, tuned_parameters, without_tuning
from petune.methods.configs import FullConfig
from petune.methods.targets import head_modules
from petune.models import family_of
from petune.models.source import weight_files
from petune.objects import base_name
from petune.parallel import Mesh, alone, group, local
from petune.progress import Progress
from petune.reporting import Logged, Trackers
from petune.run_folder import RunFolder
from petune.schedule import learning_rate, plan_steps, units_of_step
from petune.state import fill, gather_state, make_optimizer, refuse_tuned_folder, restore_state, scatter_state, tuned_of, write_state
from petune.stopping import StopAsked, StopRequest
from petune.tasks import METRICS, Example, class_weights, collate, count, pad_token_id
from petune.wording import closing_lines, command_to_go_on, header_lines, peak_memory, ways_out

_T = TypeVar("_T")
_NO_MEMORY = (torch.OutOfMemoryError, MemoryError)


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
        self.progress = Progress()
        self.units = prepared.encoded.train
        seed_others(self.recipe.seed)
        self.weights = self._class_weights()
        with self._explain_memory("loading of the model"):
            model = build(prepared)
            self.described = describe(model), count_parameters(model)
            if group.inside():
                ranks.agree_on_model(model)
            self.frozen = self._digest_whole(model) if mesh.plan.world > 1 and mesh.main else None
            if group.inside():
                group.barrier()  # the main process had more to do
            self.runner = run_on(model, prepared, mesh, self.weights)
        self.model, self.tuned = self.runner.model, self.runner.tuned
        recipe = self.recipe
        self.steps = plan_steps(len(self.units), recipe.batch_size * recipe.accumulate, recipe.epochs, recipe.max_steps, recipe.warmup)
        self.make_optimizer = partial(make_optimizer, recipe)
        self.optimizer = self.runner.streamed or self.make_optimizer(self.tuned)
        self.run_id = uuid.uuid4().hex
        if mesh.main:
            self._check_disk()
        stop.save_first()

    # ------------------------------------------------------------ set up

    def _digest_whole(self, model: nn.Module) -> str:
        """The digest of the frozen tensors of a model that is about to be cut."""
        with phase("taking checksums of the whole model"):
            return digest(frozen_checksums(model))

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
        with FileHashes(self._base_files()) as self.base_hashes:  # while the device trains
            self._run(resume, allow_change)

    def _run(self, resume: bool | str | Path, allow_change: Collection[str]) -> None:
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
            self.reporter.header(facts, self.steps.total)
            self.runner.barrier()  # the main process had more to do
            if not self.progress.before:
                self._score_base()
            if self._evaluation_due() and self.progress.scored_step != self.progress.step:
                self._after_step()  # a stop cut this evaluation off
            while self.progress.step < self.steps.total and not self._ended_early():
                self._check_stop()
                with phase("first step, which prepares the kernels") if not self.audit.updates else nullcontext():
                    record = self.step()
                self._has_lost_folder()
                self.reporter.step(record)
                self.trackers.log(record)
                self.callbacks.on_step(record)
                self._after_step()
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
        group.at_step(number)
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
            loss = runner.backward(micro, total, self._dropout_key(number))
        norm = runner.clip(self.recipe.clip)
        self._refuse_non_finite(loss, norm, number)
        self.audit.after_backward()
        with self._explain_memory("optimizer step"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.audit.after_update()
        return self._record(loss, norm, lr, time.perf_counter() - began)

    def _dropout_key(self, step: int) -> int | None:
        """What the masks of a step are drawn from; None leaves them to torch, where recomputing or compiling is not ours."""
        runner = self.runner
        theirs = self.recipe.compile or (not runner.owned and (runner.plan.world == 1 or self.recipe.gradient_checkpointing))
        return None if theirs else step_key(self.recipe.seed, step)

    def _refuse_non_finite(self, loss: float, norm: float, number: int) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        places = [example.where for example in self.rows_of(number)]
        made = self.runner.streamed is not None and math.isfinite(loss)
        what = "its update was made inside the backward pass, so this state is lost" if made else "the update was not made"
        raise TrainingFault(
            f"the {'gradient' if math.isfinite(loss) else 'loss'} is not finite; {what}",
            where=f"step {number + 1}",
            found=f"loss {loss}, gradient norm {norm}; rows {', '.join(places[:5])}{' and more' if len(places) > 5 else ''}",
            remedy="lower lr, use dtype: fp32, or look at these rows; checkpoints hold only finite states",
        )

    def _record(self, loss: float, norm: float, lr: float, seconds: float) -> dict[str, Any]:
        progress = self.progress
        tokens = sum(example.tokens for example in self.rows_of(progress.step))
        progress.step += 1
        progress.tokens += tokens
        progress.seconds += seconds
        progress.first_loss = loss if progress.first_loss is None else progress.first_loss
        progress.last_loss = loss
        return {
            "step": progress.step,
            "epoch": round(progress.step / self.steps.per_epoch, 4),
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens": progress.tokens,
            "tokens_per_s": round(tokens / max(seconds, 1e-9), 1),
        }

    @contextmanager
    def _explain_memory(self, phase: str) -> Iterator[None]:
        try:
            yield
        except (*_NO_MEMORY, RuntimeError) as error:
            if not isinstance(error, _NO_MEMORY) and "allocate memory" not in str(error):
                raise
            first = (str(error).splitlines() or ["no detail"])[0]
            raise MachineError(
                f"out of memory in the {phase}, step {self.progress.step + 1}",
                found=first,
                remedy="try " + ", ".join(ways_out(self.recipe, phase)),
            ) from None

    # ------------------------------------------------------------ scores

    def evaluate(self) -> dict[str, float]:
        """Scores on the held-out rows. Raises StopAsked when a stop was asked for meanwhile."""
        held_out = self._batches(self.prepared.encoded.eval, self.recipe.eval_batch_size or self.recipe.batch_size)
        labels = self.prepared.rows.labels or ()
        doing = phase(f"evaluating on {len(self.prepared.encoded.eval)} rows")
        with doing, self._explain_memory("evaluation"), scoring(*self.runner.modules):
            return evaluate(self.runner.logits, held_out, self.task.name, labels, self.runner.sum, self._check_stop)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """The base model again, for as long as nothing has trained."""
        with ExitStack() as stack:
            if not isinstance(self.recipe.method, FullConfig):
                for module in self.runner.modules:
                    stack.enter_context(without_tuning(module))
            yield

    def _score_base(self) -> None:
        """Scores of the untouched base and of the head-only control, kept in progress."""
        control = None
        with self._untouched():
            before = self.evaluate()
            if self.task.name == "classify" and self.recipe.head_only:
                control = self._control()
        self.progress.before, self.progress.head_only = before, control  # both or, when a stop comes between, neither
        self._report_scores(self.progress.before)
        if self.progress.head_only is not None:
            self.reporter.note(f"control: a head trained on the frozen base reaches accuracy {self.progress.head_only:.4f}")

    def _control(self) -> float | None:
        """Accuracy of a head trained on the frozen base; None where the model has no head of its own."""
        model = self.runner.modules[-1]
        heads = head_modules(model, family_of(model), "auto")
        if not heads:
            return None
        encoded = self.prepared.encoded
        pad, shortest = pad_token_id(self.tokenizer), self.runner.plan.tp
        sides = [batches(rows, 32, self.task.name, pad, shortest) for rows in (encoded.train, encoded.eval)]
        doing = phase("training the control, a head on the frozen base")
        with doing, self._explain_memory("evaluation"), scoring(*self.runner.modules):
            found = head_only(
                model, heads[0], (sides[0], sides[1]), self.runner.logits, self._check_stop, seed=self.recipe.seed, weights=self.weights
            )
        self.runner.barrier()  # only where logits come out was there something to fit
        return self.runner.sum([found or 0.0])[0] / self.runner.plan.dp

    def _report_scores(self, scores: Mapping[str, float]) -> dict[str, Any]:
        epoch = round(self.progress.step / self.steps.per_epoch, 4)
        record = {"step": self.progress.step, "epoch": epoch, **{f"eval_{name}": value for name, value in scores.items()}}
        self.reporter.evaluated(record)
        self.trackers.log(record)
        return record

    def _evaluate_and_compare(self) -> bool:
        """Evaluate; whether the named metric is the best so far. A value that is not finite never is."""
        progress = self.progress
        progress.scores, progress.scored_step = self.evaluate(), progress.step
        self.callbacks.on_eval(self._report_scores(progress.scores))
        value = progress.scores[self.metric]
        best = progress.best_value
        better = math.isfinite(value) and (best is None or (value > best if self.larger_is_better else value < best))
        progress.worse = 0 if better else progress.worse + 1
        better = better or (value == best and progress.scores["loss"] < progress.best_scores["loss"])  # the loss decides between equals
        if better:
            progress.best_value, progress.best_step, progress.best_scores = value, progress.step, progress.scores
        return better

    # ------------------------------------------------------------ state on disk

    def save(self) -> Path:
        """Commit a checkpoint of this very step, point `best` at the best one, rotate. Raises TrainingFault if a frozen tensor moved."""
        with phase("comparing the frozen weights with their checksums"):
            self.audit.check_frozen()
        root = self.folder.checkpoints
        tuned, optimizer = self._whole_state()
        path = root / f"step-{self.progress.step}"
        if self.runner.mesh.main:
            with phase("writing the checkpoint"):
                if self._has_lost_folder():
                    self._rescue(tuned, optimizer)
                path = self._commit(root, tuned, optimizer)
            protect = []
            if self.progress.best_step is not None:
                protect.append(root / f"step-{self.progress.best_step}")
                self.folder.point_best(self.progress.best_step, self.metric, self.progress.best_value)
            checkpoint.rotate(root, self.recipe.keep, protect)
        self.runner.barrier()  # nobody reads it, or computes on, before it is whole
        return path

    def _commit(self, root: Path, tuned: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> Path:
        def write(place: Path) -> None:
            write_state(place, tuned, optimizer)

        return checkpoint.commit(root, self.progress.step, write, run_id=self.run_id, facts=self._facts())

    def _rescue(self, tuned: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> NoReturn:
        """Keep the state in a new folder beside the one that is gone, from which the run can go on, and say where."""
        place = self.folder.beside()
        place.begin(self.run_id)
        path = self._commit(place.checkpoints, tuned, optimizer)
        what, go_on = f"the state of step {self.progress.step}", command_to_go_on(place.path, self.prepared.objects)
        raise self.folder.lost(f"{what} is kept in {path}", f"go on with: {go_on}")

    def _whole_state(self) -> tuple[Mapping[str, nn.Parameter], torch.optim.Optimizer]:
        """Tuned tensors and optimizer as they are saved: of the whole model, whatever the plan."""
        if self.runner.plan.world == 1:
            return self.tuned, self.optimizer
        return gather_state(self.runner, self.optimizer, self.make_optimizer)

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
        root, main = self.folder.checkpoints, self.runner.mesh.main
        if main:
            self.folder.sweep()
        self.runner.barrier()
        found = checkpoint.candidates(root)
        if group.inside() and resume is True:
            group.agree({"newest checkpoint": found[0].name if found else "none"})  # every machine must see the run folder
        if resume is True and not found:
            self.run_id = self.folder.run_id() or self.run_id
            self.reporter.note("this run has no checkpoint yet: it starts from the beginning")
            if main:
                self._cut_metrics(-1)
            return
        if resume is True:
            path, manifest, skipped = checkpoint.newest_good(root)
            for problem in skipped:
                self.reporter.note(f"NOT RESUMED FROM: {problem}")
        else:
            path = Path(str(resume))
            refuse_tuned_folder(path)
            manifest = checkpoint.verify(path)
        if group.inside():
            group.agree({"checkpoint": f"step {manifest.step} of run {manifest.run_id}"})
        if main:
            self.folder.refuse_other_run(manifest.run_id, path)
            self._refuse_foreign(manifest.facts, path, allow_change)
        self._restore_tensors(path)
        self.progress, self.run_id = Progress(**manifest.facts["progress"]), manifest.run_id
        self.runner.barrier()
        if main:
            checkpoint.set_aside(root, manifest.step)
        self.reporter.note(f"resumed from {path} at step {manifest.step}")
        if main:
            self._cut_metrics(manifest.step)

    def _cut_metrics(self, step: int) -> None:
        """Drop the records of steps that are trained again, and say how many those are."""
        if (last := self.folder.cut_metrics(step)) > max(step, 0):
            self.reporter.note(f"lost since this state was saved, and trained again: steps {max(step, 0) + 1} to {last}")

    def _restore_tensors(self, path: Path) -> None:
        """Fill this process' parts from the whole state at `path`."""
        if self.runner.plan.world == 1:
            restore_state(path, self.tuned, self.optimizer)
            return
        whole = {name: nn.Parameter(torch.empty(shape, dtype=dtype)) for name, (shape, dtype) in self.runner.shapes.items()}
        optimizer = self.make_optimizer(whole)
        restore_state(path, whole, optimizer)
        scatter_state(self.runner, self.optimizer, whole, optimizer)

    def _refuse_foreign(self, facts: Mapping[str, Any], path: Path, allow_change: Collection[str]) -> None:
        self.audit = Audit({}, frozen_tensors(self.model) if self.frozen is None else {})
        now = self._facts()
        if not comparable(str(facts["frozen"])):
            self.reporter.note("NOT COMPARED WITH THE BASE of this checkpoint: its checksum is of another version of petune")
            facts = {**facts, "frozen": now["frozen"]}
        reasons = {"rows": "the data has changed", "frozen": "the base model is another one", "method": "the method is another one"}
        problems = [
            Problem(f"{reason} since this checkpoint was saved", where=str(path), expected=str(facts[key])[:16], found=str(now[key])[:16])
            for key, reason in reasons.items()
            if facts[key] != now[key] and not (key == "rows" and any(name.split(".")[0] == "data" for name in allow_change))
        ]
        if problems:
            raise FileError(problems)

    def _check_disk(self) -> None:
        """Room, before step 1, for every checkpoint that can stand at once (kept, best, being written) and for the tuned files."""
        tuned = sum(shape.numel() * dtype.itemsize for shape, dtype in self.runner.shapes.values())
        held = sum(value.nbytes for own in self.optimizer.state.values() for value in own.values())
        state = tuned + (held or 2 * tuned)  # AdamW makes its two moments in the first step, unless they have a place from the start
        checkpoint.require_free(self.folder.path, (self.recipe.keep + 2) * state + tuned)

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        """Go back to the best checkpoint, write `tuned/` and what a person wants to see."""
        progress = self.progress
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
        """The files whose hashes name the base, in the process that writes `tuned/`; of a full tuning and of random weights none."""
        source = self.prepared.source
        if not self.runner.mesh.main or isinstance(self.recipe.method, FullConfig) or source.kind in ("config", "object"):
            return {}
        return weight_files(source.place, getattr(self.runner.model.config, "_commit_hash", None) or source.revision)

    def _hashed_base(self) -> dict[str, str]:
        """The hashes of the base's files; without them, which is said, `tuned/` is written all the same."""
        try:
            return self.base_hashes.result()
        except FileError as error:
            self.reporter.note(f"tuned/ STORES NO HASH OF ITS BASE: {error}")
            return {}

    def _hashed_object(self, model: nn.Module) -> str | None:
        """The hash of the tensors of a base that was given in memory; None where a full tuning has taken its place."""
        if self.prepared.objects.model is None or isinstance(self.recipe.method, FullConfig):
            return None
        with phase("hashing the base"):
            return export.full_hash(model)

    def _whole_model(self) -> nn.Module | None:
        """The tuned model in one piece: this one, or, where it is cut, one built anew and filled in the main process; None elsewhere."""
        if self.runner.plan.world == 1:
            return self.model
        state = self.runner.whole({name: value.detach() for name, value in self.tuned.items()})
        if not self.runner.mesh.main:
            return None
        model = build(self.prepared)
        fill(tuned_parameters(model), state, "the trained state")
        return model

    def _go_back_to_best(self, best: Path) -> None:
        """Put the best state into the model; if its checkpoint is damaged, say so and keep the last."""
        progress, saved, fault = self.progress, {}, None
        try:
            self.folder.refuse_other_run(checkpoint.verify(best).run_id, best)
            saved = tuned_of(best)
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
            "num_labels": len(self.prepared.rows.labels or ()),
            "metric": self.metric,
            "direction": "max" if self.larger_is_better else "min",
            **self.progress.summary(scores),
            "lr": self.recipe.learning_rate,
            "peak_memory_bytes": peak,
        }
        return facts | {"warnings": shortcomings(facts)}


def _chunks(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    yield from (items[start : start + size] for start in range(0, len(items), size))


def _real(batch: Batch) -> Batch:
    """The batch without rows that only fill it up."""
    return {name: value[batch["rows"] >= 0] for name, value in batch.items()}
