"""One optimizer step of a recipe: forward and backward over its micro-batches, clip, judge, update. It knows
no folder.

The rows of step k are a pure function of seed, epoch and k, and the learning rate of k alone, so a run that
is resumed needs no cursor but the step. Gradients are sums over rows, divided once by the trained tokens of
the whole step, so accumulation changes memory and not numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn

from petune.errors import TrainingFault, UsageError
from petune.log import phase
from petune.methods import count_parameters, describe, frozen_tensors, learning_rates
from petune.methods.activation_cache import ActivationCache
from petune.methods.cached_backbone import identity_of
from petune.methods.token_rows import ROWS
from petune.methods.trainable import frozen_digest
from petune.models.contents import contents_of
from petune.parallel import Batch, Mesh, alone, local
from petune.parallel.launch import process_group
from petune.rng.dropout import step_key
from petune.rng.generators import rng_state, seed_others, set_rng_state
from petune.run import distributed, state
from petune.run.audit import Audit
from petune.run.backbone import Backbone, all_rows
from petune.run.balance import routes_are_whole
from petune.run.build import Prepared, build, run_on
from petune.run.control import untouched_base
from petune.run.evaluate import inputs_of, scoring
from petune.run.expert_load import ExpertLoad
from petune.run.fisher import agree_on_start
from petune.run.objective import idle_tensors
from petune.run.progress import Progress
from petune.run.references import referred, refuse_unreferable
from petune.run.schedule import Steps, learning_rate, plan_steps, units_of_step
from petune.run.spikes import SpikeRule, refuse_non_finite, spike_fault, spike_record
from petune.run.summary import explain_memory, peak_memory
from petune.tasks import Example, Mark, class_weights, collate, count, pad_token_id

_T = TypeVar("_T")
Anyone = Callable[[Sequence[bool]], list[bool]]  # for each flag, whether any process raised it
Generators = tuple[dict[str, Tensor], dict[str, Any]]


class Keeper(Protocol):
    """What saves the state that steps change, as a step calls it."""

    def begin(self) -> None:
        """Begin to copy the last state, if one is to be copied: the passes of the next step are on the
        device."""

    def settle(self) -> None:
        """Wait, on the device, until that copy is whole: an update changes the state next."""

    def save(self) -> object:
        """Save the state of a run that ends before its next update; where it is, in words or as a path."""

    def rewind(self) -> int:
        """Put back the newest saved state, with its progress but for the step; the step it was saved at."""


class KeepsNothing:
    """The keeper of steps that are only measured. A spike that would need a saved state raises UsageError."""

    def begin(self) -> None:
        """Nothing is copied."""

    def settle(self) -> None:
        """Nothing is copied."""

    def save(self) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(
            "this step is a spike, and nothing is saved here", where="on_spike", remedy="set on_spike=off"
        )

    rewind = save


class OptimizerStep:
    """The optimizer step of a recipe, in memory: runner, optimizer, rows, audit and spike rule.

    Each process of a group has one. described: the method in words; trained and all parameters. fingerprint:
    of the whole base, as all ranks agreed on it; None in one process. frozen: digest of the whole model's
    frozen tensors on the main one of several ranks, None elsewhere. base: what an activation cache knows the
    backbone by, None without one. check: may end the run before a step; it is given what says whether any
    process wants that, which is asked together with the count of trained tokens. audit: watches nothing
    until it is replaced by `make_audit`.
    """

    def __init__(self, prepared: Prepared, mesh: Mesh | None = None) -> None:
        self.prepared, self.recipe = prepared, prepared.recipe
        recipe, self.place = self.recipe, prepared.place
        mesh = mesh or alone(self.place.device)
        self.keeper: Keeper = KeepsNothing()
        self.progress, self.audit = Progress(), Audit({}, {})
        self.cache: ActivationCache | None = None
        self.backbone: Backbone | None = None
        self.early: dict[int, list[Batch]] = {}  # batches of the next step, where its rows are read ahead
        self.check: Callable[[Anyone], None] = _nobody
        self.units, self.held_out = prepared.encoded.train, prepared.encoded.eval
        self.texts = len(self.units[0].texts)  # rows of the model that make an example
        seed_others(recipe.seed)
        self.weights = self._class_weights()
        with self.explain_memory("loading of the model"):
            model = build(prepared)
            self.read_by_ranges = contents_of(model) is not None
            refuse_unreferable(model, prepared)
            self._note_whole(model, mesh)
            self.idle = idle_tensors(model, prepared.task, recipe.rerank)
            self.make_optimizer = partial(state.make_optimizer, recipe, rates=learning_rates(model))
            self.runner = run_on(model, prepared, mesh, self.weights)
        self.model, self.tuned = self.runner.model, self.runner.tuned
        # of several stages, or where experts see tokens of one rank, a rank counts some alone
        self.load = ExpertLoad(self.runner.modules if routes_are_whole(self.runner.plan) else ())
        self.steps = self._plan_steps(recipe.batch_size * recipe.accumulate)
        self.optimizer = self.runner.streamed or self.make_optimizer(self.tuned)
        self.spikes = SpikeRule(recipe.on_spike, recipe.spike_window, recipe.spike_threshold)

    # ------------------------------------------------------------ set up

    def _class_weights(self) -> Tensor | None:
        weights = class_weights(self.recipe.class_weights, self.units, self.prepared.rows.labels or ())
        return (
            None if weights is None else torch.tensor(weights, dtype=torch.float64, device=self.place.device)
        )

    def _plan_steps(self, rows: int) -> Steps:
        recipe = self.recipe
        if self.prepared.encoded.stream is not None and recipe.max_steps is not None:
            # how many rows there are nobody knows: the whole run counts as one epoch
            return plan_steps(rows * recipe.max_steps, rows, 1, recipe.max_steps, recipe.warmup)
        return plan_steps(len(self.units), rows, recipe.epochs, recipe.max_steps, recipe.warmup)

    def _note_whole(self, model: nn.Module, mesh: Mesh) -> None:
        """What can be said of the tuned model only before it is cut."""
        self.described = describe(model), count_parameters(model)
        self.fingerprint = distributed.agree_on_model(model) if process_group.inside() else None
        agree_on_start(model, self.prepared)
        # of what the files say, whatever a plan cuts and base_dtype rounds: another plan may go on
        asked = mesh.plan.world > 1 or self.recipe.base_dtype is not None
        needed = bool(self.recipe.cache) or (asked and (mesh.main or not process_group.replacement()))
        with phase("taking checksums of the whole model") if needed else nullcontext():
            found = frozen_digest(model, distributed.share_of_checksums()) if needed else None
        self.frozen = found if asked and mesh.main else None
        self.base = identity_of(model, found) if self.recipe.cache else None
        if process_group.inside():
            process_group.barrier()  # one that takes checksums alone had more to do

    def make_audit(self) -> Audit:
        """An audit of this process' tensors as they are now; rows of tokens may wait for texts with them."""
        runner, streamed = self.runner, self.runner.streamed
        here = {name: local(one) for module in runner.modules for name, one in frozen_tensors(module).items()}
        moving, has_gradient = (
            (self.tuned, None) if streamed is None else (streamed.moving, streamed.has_gradient)
        )
        names = [name for name in runner.names if name not in self.idle and not name.endswith(f".{ROWS}")]
        return Audit(moving, here, names, runner.any, has_gradient)

    def explain_memory(self, doing: str) -> AbstractContextManager[None]:
        """Turns want of memory inside the block into a MachineError that says where and what to change."""
        return explain_memory(self.recipe, lambda: self.progress.step + 1, doing)

    @property
    def saves_before_its_end(self) -> bool:
        """Whether a run of these steps saves before the last of them."""
        recipe, epoch = self.recipe, self.steps.per_epoch
        snapshots = None if self.runner.uncut else recipe.snapshot_every  # saved as checkpoints are
        often = recipe.save_every, recipe.eval_every, snapshots
        return min(one or epoch for one in often) < self.steps.total

    # ------------------------------------------------------------ rows

    def micro_batches(self, step: int) -> list[Batch]:
        """This replica's padded batches of step `step` (from 0), one per forward pass, on the CPU.

        `rows` numbers them within the step.
        """
        numbered, size = list(enumerate(self.rows_of(step))), self.recipe.batch_size
        found = (self._batch(chunk, self.prepared.encoded.packed) for chunk in _chunks(numbered, size))
        return [batch for batch in found if batch is not None]

    def rows_of(self, step: int) -> list[Example]:
        """What step `step` (from 0) trains on, over all replicas; masks are drawn here, for all of it,
        whatever the plan."""
        seed = self.recipe.seed
        stream = self.prepared.encoded.stream
        if stream is not None:
            units = stream.examples(step * self.steps.per_step, self.steps.per_step)
        else:
            units = [self.units[index] for index in units_of_step(step, self.steps, seed)]
        return self.prepared.encoded.drawn(units, f"seed {seed} step {step}")

    def row_mark(self) -> dict[str, Mark]:
        """What a checkpoint says to find the next rows of a stream without those before; else nothing."""
        stream = self.prepared.encoded.stream
        return {} if stream is None else {"stream": stream.mark(self.progress.step * self.steps.per_step)}

    def go_to_rows(self, mark: Mark | None) -> str | None:
        """Let a stream stand before the next rows; why it must read all those before, in words."""
        stream = self.prepared.encoded.stream
        return None if stream is None else stream.go_to(self.progress.step * self.steps.per_step, mark)

    def batches(self, units: Sequence[Example], size: int) -> Iterator[Batch | None]:
        """This replica's batches of an evaluation; None for one it has no part in."""
        yield from (self._batch(chunk) for chunk in _chunks(list(enumerate(units)), size))

    def _batch(self, numbered: Sequence[tuple[int, Example]], packed: bool = False) -> Batch | None:
        """This replica's rows of one forward pass, padded.

        Where all replicas must go forward together, a row that counts for nothing stands in for none.
        """
        mine = self.runner.share(numbered)
        if not mine and not self.runner.together:
            return None
        rows = mine or [(-1, numbered[0][1])]
        pad, shortest = pad_token_id(self.prepared.tokenizer), self.runner.plan.tp
        examples = [example for _, example in rows]
        batch = collate(examples, self.prepared.task.name, pad, packed=packed, shortest=shortest)
        numbers = [
            -1 if number < 0 else number * self.texts + at for number, _ in rows for at in range(self.texts)
        ]
        return batch | {"rows": torch.tensor(numbers)}

    def _places(self, step: int) -> list[str]:
        return [example.where for example in self.rows_of(step)]

    def look_at_cache(self) -> None:
        """Let rows count that were cached before, where all ranks are as far; see ActivationCache.look."""
        if self.cache is not None:
            self.cache.look()

    def _tell_cache(self, micro: Sequence[Batch], number: int) -> None:
        """Before step `number`: the backbone may leave memory, and rows that come next be read."""
        self.look_at_cache()
        if self.backbone is not None:
            rows = all_rows(self.prepared, self.units, self.held_out)
            self.backbone.leave_if_known(rows, number % self.steps.per_epoch == 0)
        if self.cache is not None and self.cache.reads_ahead and number + 1 < self.steps.total:
            self.early = {number + 1: self.micro_batches(number + 1)}
            coming = (*micro, *self.early[number + 1])
            self.cache.expect(inputs_of(self.model, batch) for batch in coming)

    def refer(self, check: Callable[[], None] = lambda: None) -> None:
        """Ask the untouched model about every text of the steps and of the held-out rows, where the loss
        compares with it. All ranks go together; `check` runs between passes and may raise."""
        recipe, runner = self.recipe, self.runner
        if self.prepared.task.name != "prefer" or not recipe.prefer.refers:
            return
        steps = range(self.steps.total)  # those taken too: padded alike, a run that goes on has the same bits
        used = sorted({index for step in steps for index in units_of_step(step, self.steps, recipe.seed)})
        asked = [*(self.units[index] for index in used), *self.prepared.encoded.eval]
        numbered, size = list(enumerate(asked)), recipe.eval_batch_size or recipe.batch_size
        # the held-out rows padded as in their evaluation, which else finds rounding before the first step
        sides = numbered[: len(used)], numbered[len(used) :]
        rows = (self._batch(chunk) for side in sides for chunk in _chunks(side, size))
        off, room = untouched_base(runner.modules, recipe.method), self.explain_memory("reference")
        with phase(f"asking the untouched base about {len(asked)} rows"), off, room, scoring(*runner.modules):
            found = referred(asked, runner.logits, rows, runner.sum, check)
        units, self.held_out = list(self.units), found[len(used) :]
        for index, unit in zip(used, found, strict=False):
            units[index] = unit
        self.units = units

    # ------------------------------------------------------------ the step

    def take(self) -> dict[str, Any]:
        """Forward and backward over the next step's micro-batches, clip, update. Returns the record to log.

        Raises what `check` does, before anything is done; TrainingFault, before the update, when loss or
        gradient is not finite, when no label of the step is trained and for a spike that ends the run; where
        updates are made inside the backward pass, a gradient that is not finite is found after them.
        """
        began, number, runner = time.perf_counter(), self.progress.step, self.runner
        process_group.at_step(number)
        micro = self.early.pop(number, None) or self.micro_batches(number)
        total = self._count(micro, self.check)
        self._tell_cache(micro, number)
        generators: Generators = ({}, {}) if self.recipe.on_spike == "off" else rng_state()
        lr = learning_rate(number, self.steps, self.recipe.learning_rate, self.recipe.schedule)
        state.set_rate(self.optimizer, lr)
        for module in (one for one in runner.modules if self.cache is None or not one.training):
            module.train()  # beside a cache the base stands still, in eval mode from step to step
        with self.explain_memory("forward and backward pass"):
            own = self._passes(micro, number, total, whole=False)
        norm, loss = runner.clip_with_loss(self.recipe.clip, own)
        refuse_non_finite(
            loss, norm, number + 1, lambda: self._places(number), made=runner.streamed is not None
        )
        found = self.spikes.judge(loss, norm, self.progress, runner.any)
        trained, back = found is None or self.recipe.on_spike == "warn", None
        if trained:
            self._update(lr / self.recipe.learning_rate, micro)
        self.optimizer.zero_grad(set_to_none=True)
        if found is not None and not trained:
            back = self._leave_out(found, number, generators)
        seconds = time.perf_counter() - began
        process_group.worked(seconds, partial(peak_memory, self.place.device), str(self.place.device))
        record = self._record(loss, norm, lr, seconds, trained)
        if found is not None:
            record |= spike_record(self.recipe.on_spike, found, self._places(number), back)
        return record

    def passes(self, micro: Sequence[Batch], number: int) -> float:
        """Forward and backward over the batches of step `number`, which leaves complete gradients; the loss.

        Raises TrainingFault where no label is trained.
        """
        return self._passes(micro, number, self._count(micro, _nobody), whole=True)

    def _count(self, micro: Sequence[Batch], check: Callable[[Anyone], None]) -> float:
        """The trained tokens of a step, over all replicas."""
        own, found = sum(count(_real(batch), self.weights, self.texts) for batch in micro), [0.0]

        def anyone(flags: Sequence[bool]) -> list[bool]:
            found[:], raised = self.runner.meet([own], flags)
            return raised

        check(anyone)
        return found[0]

    def _passes(self, micro: Sequence[Batch], number: int, total: float, *, whole: bool) -> float:
        if not total:
            what, remedy = "every label of this step is masked", "look at the rows with petune data"
            raise TrainingFault(what, where=f"step {number + 1}", remedy=remedy)
        key, meanwhile = self._dropout_key(number), self.keeper.begin
        loss = self.runner.backward(micro, total, key, meanwhile, whole)
        for name in self.idle & self.tuned.keys():
            if (grad := self.tuned[name].grad) is not None:
                grad.zero_()
        return loss

    def _update(self, share: float, micro: Sequence[Batch]) -> None:
        self.audit.after_backward([batch.get("attention_mask") for batch in micro])
        self.keeper.settle()
        with self.explain_memory("optimizer step"):
            self.optimizer.step()
        self.audit.after_update(share)

    def _dropout_key(self, step: int) -> int | None:
        """What the masks of a step are drawn from; None leaves them to torch, where recomputing or compiling
        is not ours."""
        runner, recipe = self.runner, self.recipe
        theirs = recipe.compile or (
            not runner.owned and (runner.plan.world == 1 or recipe.gradient_checkpointing)
        )
        return None if theirs else step_key(recipe.seed, step)

    def _leave_out(self, found: str, number: int, generators: Generators) -> int | None:
        """End the run before a step that has spiked, or make no update of it; the step that was gone back to,
        if any.

        `generators`: their state before the step, which the checkpoint of that moment has.
        """
        if self.spikes.ends(self.progress):
            set_rng_state(*generators, "before the step")
            # a run that goes on from here may meet as many again
            in_a_row, self.progress.spikes = self.progress.spikes, 0
            raise spike_fault(found, number + 1, self._places(number), self.keeper.save(), in_a_row)
        return self.keeper.rewind() if self.recipe.on_spike == "rewind" else None

    def _record(self, loss: float, norm: float, lr: float, seconds: float, trained: bool) -> dict[str, Any]:
        progress = self.progress
        tokens = sum(example.tokens for example in self.rows_of(progress.step))
        progress.advance(loss, tokens, seconds, trained=trained)
        load = self.load.take(self.runner.sum)
        return {
            "step": progress.step,
            "epoch": round(progress.step / self.steps.per_epoch, 4),
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens": progress.tokens,
            "tokens_per_s": round(tokens / max(seconds, 1e-9), 1),
            **({} if load is None else {"expert_load": round(load, 3)}),
        }


def _nobody(anyone: Anyone) -> None:
    anyone([])


def _chunks(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    yield from (items[start : start + size] for start in range(0, len(items), size))


def _real(batch: Batch) -> Batch:
    """The batch without rows that only fill it up."""
    return {name: value[batch["rows"] >= 0] for name, value in batch.items()}
