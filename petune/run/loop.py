"""The only training loop: epochs, evaluations, saves, and the end of a run. `petune train recipe.yaml` ends
here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from petune.errors import Stopped, UsageError
from petune.log import phase
from petune.methods.configs import method_of
from petune.parallel import Mesh
from petune.parallel.launch import process_group
from petune.run import distributed, rank_health
from petune.run.activations import caching
from petune.run.build import Prepared
from petune.run.callbacks import Callbacks
from petune.run.control import head_only_control, untouched_base
from petune.run.evaluate import metric_of, scored, scorer_of, scoring, shortcomings, undecided
from petune.run.folder import RunFolder
from petune.run.pace import Pace, crowded
from petune.run.progress import Progress
from petune.run.reporting import Logged, Trackers
from petune.run.saver import Saver
from petune.run.setup import setup
from petune.run.signals import StopAsked, StopRequest
from petune.run.spikes import spike_line
from petune.run.step import OptimizerStep
from petune.run.summary import closing_lines, command_to_go_on, header_lines, peak_memory, resting
from petune.tasks.metrics import Scores


class Loop:
    """One run: takes steps, evaluates, saves, and stops where the recipe, a callback or a signal says so.

    In a group, every process has one. Making it loads the model and writes nothing.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        reporter: Logged,
        stop: StopRequest,
        mesh: Mesh | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.callbacks = callbacks or Callbacks()
        self.prepared, self.folder, self.reporter, self.stop = prepared, folder, reporter, stop
        self.recipe, self.task = prepared.recipe, prepared.task
        self.metric = metric_of(self.recipe, self.task, prepared.encoded.train[0])
        self.trackers = Trackers(self.recipe.trackers if mesh is None or mesh.main else ())
        self.step = OptimizerStep(prepared, mesh)
        self.runner, self.steps = self.step.runner, self.step.steps
        self.pace = Pace(several=self.runner.plan.world > 1)
        self.saver = Saver(self.step, folder, reporter, stop, self.metric)
        stop.save_first()

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.step.progress

    # ------------------------------------------------------------ the whole run

    def run(self, resume: bool | str | Path, allow_change: Collection[str] = ()) -> None:
        """From wherever the run stands to its end. Raises Stopped after a signal, once the state is saved."""
        with (
            self.saver.working(),
            caching(self.step, self.folder.path, self.reporter.note),
            self._ranks_told(),
        ):
            self._run(resume, allow_change)

    def _ranks_told(self) -> AbstractContextManager[None]:
        """How the ranks are, told to pages of the run by the first of several."""
        if self.runner.plan.world == 1 or not self.runner.mesh.main:
            return nullcontext()
        return rank_health.told(self.folder.path, lambda: self.folder.is_lost(self.saver.run_id))

    def _run(self, resume: bool | str | Path, allow_change: Collection[str]) -> None:
        self.allow_change = allow_change
        if resume:
            ended = resume is True and self.folder.finished()  # with other settings, or nobody would be here
            with phase("reading the checkpoint"):
                self.saver.restore(resume, allow_change)
            assert self.saver.came_from or not self.prepared.restored, "what trains has not begun"
            if ended and self.progress.step >= self.steps.total:
                what = f"all {self.steps.total} steps of this run are done: the change would train nothing"
                remedy = "raise epochs or max_steps as well and --allow-change it, or choose another out"
                raise UsageError(what, where=str(self.folder.path), remedy=remedy)
            if self.runner.mesh.main:
                self.folder.begin(self.saver.run_id)
        with phase("taking checksums of the frozen weights"):
            self.step.audit = self.step.make_audit()
        try:
            self._say_header()
            self.runner.barrier()  # the main process had more to do
            self.step.refer(self.check_stop)
            if new := not self.progress.before:
                self._score_base()
            if self._needs_a_state() and (new or not self.saver.came_from or resume is not True):
                self.saver.save()
            opened = "the activation cache is opened by all ranks together" if self.recipe.cache else None
            distributed.outlive(self._steps, self._meet_again, opened or self.runner.restart_whole())
            if (reason := self._ended_early()) and self.progress.step < self.steps.total:
                self.reporter.note(f"stopped early: {reason}")
        except StopAsked as signal:
            path = self.saver.save()
            what = f"stopped by {signal} at step {self.progress.step} of {self.steps.total}; saved {path}"
            raise Stopped(what, remedy=self._way_on()) from self.stop.cause
        finally:
            self.trackers.finish()
        self._finish()

    def _say_header(self) -> None:
        self.trackers.start(self.folder.path, self.recipe.resolved())
        if self.runner.mesh.main:
            found = setup(self.step, self.metric, self.saver.run_id)
            self.folder.note_setup(found)
            self.reporter.ranks(found["plan"]["ranks"])
        step, out = self.step, self.folder.path
        facts = header_lines(self.prepared, step.described, self.steps, step.place, self.runner.plan, out)
        facts += crowded() if step.place.device.type == "cpu" else []
        self.reporter.header([*facts, *self.saver.came_from, *self.trackers.places()], self.steps.total)

    def _needs_a_state(self) -> bool:
        """Whether there must always be a saved state to go back to."""
        return self.recipe.on_spike == "rewind" or process_group.replaces()

    def _way_on(self) -> str:
        return f"go on with: {command_to_go_on(self.folder.path, self.prepared.objects)}"

    def _steps(self) -> None:
        if self._evaluation_due() and self.progress.scored_step != self.progress.step:
            self._after_step()  # a stop, or the loss of a rank, cut this evaluation off
        while self.progress.step < self.steps.total and not self._ended_early():
            self.saver.has_lost_folder()
            self.step.check = self.stop.noted()
            self.saver.check()
            first = self.step.audit.counts and not self.step.audit.updates
            with phase("first step, which prepares the kernels") if first else nullcontext():
                record = self.step.take()
            if "spike" in record:
                self.reporter.note(spike_line(record))
            self.saver.has_lost_folder()
            self.reporter.step(record)
            if (slow := self.pace.look(record)) is not None:
                self.reporter.note(slow)
            self.trackers.log(record)
            self.callbacks.on_step(record)
            self._after_step()

    def _meet_again(self) -> None:
        """Join the group again after a rank was replaced, and go back with it to the newest saved state.

        The model stays where it is.
        """
        step = self.step
        self.stop.at_once("while a rank was replaced", self._way_on())
        self.saver.let_go()
        assert step.fingerprint is not None
        distributed.rejoin(self.runner, self.folder, self.prepared, step.fingerprint)
        known = step.audit.frozen_before
        self.saver.restore(True, self.allow_change)
        step.audit = step.make_audit()
        step.audit.frozen_before = known
        self.runner.barrier()
        step.refer()  # with the rank that is new
        self.stop.save_first()

    def check_stop(self) -> None:
        """Raise StopAsked where a stop was asked for, in any process, or the run folder was lost."""
        self.saver.has_lost_folder()
        self.stop.check(self.runner.any)

    def _after_step(self) -> None:
        """Evaluate and save where the recipe says so; an evaluation that is the best so far is always
        saved."""
        step = self.progress.step
        best = self._evaluation_due() and self._evaluate_and_compare()
        save_due = step % (self.recipe.save_every or self.steps.per_epoch) == 0
        ends = step == self.steps.total or bool(self._ended_early())
        if ends:
            self._complete_backbone()
        if best or save_due or ends:
            self.saver.save(beside=not ends)
        elif self.recipe.snapshot_every and step % self.recipe.snapshot_every == 0:
            self.saver.snapshot()

    def _complete_backbone(self) -> None:
        """Have all of the model in memory, for the last look at what is frozen and what comes after."""
        if self.step.backbone is not None:
            self.step.backbone.come_back()

    def _evaluation_due(self) -> bool:
        step = self.progress.step
        last = step == self.steps.total or self.callbacks.ended_by is not None
        return step > 0 and (step % (self.recipe.eval_every or self.steps.per_epoch) == 0 or last)

    def _ended_early(self) -> str | None:
        """Why the run ends after this step though more were planned; None where it does not."""
        if self.recipe.patience is not None and self.progress.worse >= self.recipe.patience:
            return f"{self.progress.worse} evaluations without a better {self.metric.name}"
        return (
            self.callbacks.ended_by and f"{self.callbacks.ended_by} asked for it at step {self.progress.step}"
        )

    # ------------------------------------------------------------ scores

    def score(self) -> Scores:
        """What the held-out rows say of the model as it is. Raises StopAsked when a stop was asked for
        meanwhile."""
        rows, runner = self.step.held_out, self.runner
        self.step.look_at_cache()
        held_out = self.step.batches(rows, self.recipe.eval_batch_size or self.recipe.batch_size)
        scorer = scorer_of(self.recipe, self.task, self.prepared.rows.labels or (), rows)
        explained = self.step.explain_memory("evaluation")
        with phase(f"evaluating on {len(rows)} rows"), explained, scoring(*runner.modules):
            add = runner.total if self.task.name == "embed" else runner.sum
            return scored(runner.logits, held_out, scorer, add, self.check_stop)

    def _score_base(self) -> None:
        """Scores of the untouched base and of the head-only control, kept in progress."""
        control = None
        with untouched_base(self.runner.modules, self.recipe.method):
            before = self.score()
            alone = method_of(self.recipe.method).head_alone  # which would be held against itself
            if self.task.names_classes and self.recipe.head_only and not alone:
                with self.step.explain_memory("evaluation"):
                    control = head_only_control(
                        self.runner, self.prepared, self.check_stop, self.step.weights
                    )
        # both or, when a stop comes between, neither
        self.progress.before, self.progress.head_only = before.result(), control
        self._report_scores(before)
        if control is not None:
            self.reporter.note(f"control: a head trained on the frozen base reaches accuracy {control:.4f}")

    def _report_scores(self, scored: Scores) -> dict[str, Any]:
        epoch = round(self.progress.step / self.steps.per_epoch, 4)
        record: dict[str, Any] = {
            "step": self.progress.step,
            "epoch": epoch,
            **{f"eval_{name}": value for name, value in scored.result().items()},
        }
        if (confusion := scored.confusion()) is not None:
            record["confusion"] = confusion
        self.reporter.evaluated(record)
        self.trackers.log(record)
        return record

    def _evaluate_and_compare(self) -> bool:
        """Evaluate; whether the named metric is the best so far. A value that is not finite never is."""
        scores = self.score()
        better = self.progress.score(scores.result(), *self.metric)
        self.callbacks.on_eval(self._report_scores(scores))
        return better

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        """Go back to the best checkpoint, write `tuned/` and what a person wants to see."""
        saver, progress = self.saver, self.progress
        saver.drain()
        saver.go_back_to_best()
        self.runner.barrier()  # the main process may have had more to read
        memory = self._memory()
        identity = saver.write_tuned()
        if identity is None:
            return
        summary = self._summary(progress.best_scores or progress.scores, memory) | {"tuned_sha256": identity}
        with phase("drawing the loss"):
            self.folder.finish(summary)
        self.reporter.done(closing_lines(summary, self.recipe.method_name, self.folder))
        self.callbacks.on_end(summary)

    def _memory(self) -> list[dict[str, int]]:
        """Bytes of each process: what rests on its device, by what it is, and the most it has held."""
        device = self.step.place.device
        own = resting(self.runner.modules, self.step.optimizer, device) | {"peak": peak_memory(device)}
        found = {name: self.runner.gather(float(size)) for name, size in own.items()}
        return [
            {name: int(sizes[rank]) for name, sizes in found.items()}
            for rank in range(self.runner.plan.world)
        ]

    def _summary(self, scores: Mapping[str, float], memory: Sequence[Mapping[str, int]]) -> dict[str, Any]:
        rows = self.prepared.rows
        facts = {
            "run_id": self.saver.run_id,
            "task": self.task.name,
            "format": rows.format,
            "rows": rows.sha256,
            "held_out": len(self.prepared.encoded.eval),
            "num_labels": len(self.task.outputs(rows.labels) or ()),
            "metric": self.metric.name,
            "direction": "max" if self.metric.larger_is_better else "min",
            **self.progress.summary(scores),
            "lr": self.recipe.learning_rate,
            "peak_memory_bytes": max(one["peak"] for one in memory),
            "memory": list(memory),
        }
        return facts | {"warnings": shortcomings(facts), "notes": undecided(facts)}
