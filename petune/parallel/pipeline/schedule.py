"""A pipeline over the pp axis: torch's schedules and transport, with the model's stages and what travels
between them known beforehand.

The rows of a batch go through the stages in pieces. Shapes change from batch to batch, and torch's own
inference of them costs a forward and a backward pass each time. Here the first call of each kind (training,
evaluation) sends one row through the stages, and each tells the next which tensors it will send, of which
dtype, and which of them have a gradient; from then on the shapes of any batch follow. What has no gradient is
not answered: under a ladder only the gradient of the side state comes back.

torch before 2.13 answers every tensor: there, what has no gradient is answered with zeros. `zero-bubble`
splits the backward pass of a stage in two where that is exact and takes nothing twice (`Chunk.splits`; before
torch 2.13 it is not exact where a tensor is used in two places); a stage of fused blocks leaves the products
of its weights for the second part (`Chunk.weights`); elsewhere the backward pass is made in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from petune.errors import UsageError
from petune.kernels.memory.offload import Passing
from petune.log import say
from petune.models import input_of
from petune.models.copied import copied
from petune.models.spec import Family
from petune.models.stack import Stack, own_stacks
from petune.parallel.collectives import least_of
from petune.parallel.mesh import Coordinate, Mesh
from petune.parallel.objective import Batch, Objective
from petune.parallel.pipeline.linked_stage import LinkedStage, Transfers, message_bytes
from petune.parallel.pipeline.stage_io import WORDS, Kinds, Slot, TensorMeta, decoded, encoded, lengths_of
from petune.parallel.pipeline.stage_module import LOSS, PADDING, Chunk, Now, filled_up, shared_out
from petune.parallel.pipeline.stages import cut_stage
from petune.parallel.plan import ParallelPlan
from petune.rng.context import moved

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
StageLoss = Callable[[Tensor, Tensor], Tensor]  # output of the last stage, target -> scalar
SEVERAL = ("interleaved", "zero-bubble")  # schedules with several stages on a rank
BACKWARD = ("FULL_BACKWARD", "BACKWARD_INPUT")  # torch's names of passes back


def stages_of(plan: ParallelPlan, pp: int) -> list[int]:
    """The numbers of the stages on rank `pp` of the axis."""
    return list(range(pp, len(plan.stages), plan.pp))


def cut_stages(model: nn.Module, family: Family, plan: ParallelPlan, at: Coordinate) -> list[nn.Module]:
    """The stages of the rank `at`, cut out of the whole model; the first of them is `model` itself. Works on
    meta tensors.

    The others are clones of its modules that share every tensor. Raises UsageError for a model that has not
    the blocks that its config says.
    """
    # every rank sees what is wrong with another's stage, and none waits for it
    for name, stack in own_stacks(model, family).items():
        spans = [stage.blocks[name] for stage in plan.stages if name in stage.blocks]
        if any(end != start for (_, end), (start, _) in pairwise([(0, 0), *spans, (len(stack), len(stack))])):
            what = f"the stages do not share out the {name}'s {len(stack)} blocks"
            remedy = "write stages that follow one another, from the first block to the last"
            raise UsageError(what, where="pp.stages", found=str(spans), remedy=remedy)
    mine = stages_of(plan, at.pp)
    modules = [model, *(_clone(model) for _ in mine[1:])]
    for module, number in zip(modules, mine, strict=True):
        cut_stage(module, family, plan.stages[number], number == 0, number == len(plan.stages) - 1)
    return modules


def _clone(model: nn.Module) -> nn.Module:
    """The modules again, with the same tensors in them."""
    return copied(model, {id(value): value for value in chain(model.parameters(), model.buffers())})


def made(plan: ParallelPlan, stages: Sequence[Any], pieces: int, loss: StageLoss | None) -> Any:
    """torch's schedule of `plan` over a rank's stages; the one of forward passes alone without a `loss`."""
    if plan.schedule in SEVERAL:
        schedule = SCHEDULES[plan.schedule if loss is not None else "interleaved"]
        return schedule(stages, pieces, loss_fn=loss, scale_grads=False)
    schedule = SCHEDULES[plan.schedule if loss is not None else "gpipe"]
    return schedule(stages[0], pieces, loss_fn=loss, scale_grads=False)


# ---------------------------------------------------------------- the pipeline


class Pipeline:
    """This rank's stages of a pipeline and the schedule that runs them. `modules` are those of `cut_stages`,
    on the mesh's device.

    All ranks of the pp axis call the same methods with the same batch.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        family: Family,
        plan: ParallelPlan,
        mesh: Mesh,
        objective: Objective,
    ) -> None:
        self.modules, self.plan, self.device = list(modules), plan, mesh.device
        self.group, self.at, self.main = mesh.groups["pp"], mesh.at.pp, mesh.main
        self.replicas = mesh.groups["dp"] if plan.together else None
        self.stacks = tuple(family.stacks)
        self.final, self.texts = len(plan.stages) - 1, objective.texts
        self.now = Now()
        numbers = stages_of(plan, mesh.at.pp)
        self.chunks = [
            Chunk(module, number, objective, self.now, number == self.final)
            for module, number in zip(self.modules, numbers, strict=True)
        ]
        # by training or not, and whether ladders climb
        self.kinds: dict[tuple[bool, bool], list[tuple[Kinds, Kinds]]] = {}
        self.schedules: dict[bool, tuple[Any, Any]] = {}  # training or not: (made for what, the schedule)
        self.said = False
        self.transfers = Transfers(self.group, self.device, self.final + 1) if mesh.linked("pp") else None

    def forget(self) -> None:
        """Ask the stages again what they send, as a rank that was replaced does not know, and drop what a
        broken step has left."""
        assert self.transfers is None, "ranks that are linked are not replaced"
        self.kinds.clear()
        self.schedules.clear()
        self.now.logits = []

    def backward(self, batch: Batch, pieces: int, total: float, key: int | None = None) -> float:
        """Forward and backward over all rows of `batch` in `pieces` pieces: the sum of the losses over
        `total`, on every rank.

        Gradients add to what is there. `key` is what dropout is drawn from.
        """
        self.now.total, self.now.key, self.now.training = total, key, True
        self.now.trained = _trained(batch, pieces, self.texts)  # counted where nothing has to wait for it
        batch, host = self._padded(batch, pieces)
        losses: list[Tensor] = []
        self._step(batch, host, pieces, target=batch["rows"], losses=losses)
        loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=LOSS, device=self.device)
        dist.broadcast(loss, group_src=self.final % self.plan.pp, group=self.group)
        return float(loss)

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor | None:
        """Logits of all rows on the last stage, None on the others."""
        self.now.key, self.now.training = None, False
        own = self._pieces(len(input_of(batch)))  # replicas may need one another for each
        pieces = -least_of([-own], self.device, self.replicas)[0]
        self._step(*self._padded(batch, pieces), pieces)
        found, self.now.logits = self.now.logits, []
        return torch.cat(found) if found else None

    def _step(self, batch: Batch, host: Batch, pieces: int, **more: Any) -> None:
        """Run the schedule on what `_padded` gives. torch wraps what a stage raises; it comes out as it was
        raised, as its kind decides what follows."""
        schedule = self._schedule(batch, pieces)
        for chunk in self.chunks:
            chunk.piece = 0
            chunk.late.clear()  # what a broken step has left
        self.now.passing = self._passing(schedule, pieces) if self.now.training else {}
        self.now.host = shared_out(host, pieces)
        try:
            schedule.step(return_outputs=False, **more, **batch)
            if self.transfers is not None:
                self.transfers.settle()
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        finally:
            self.now.passing, self.now.host = {}, ()

    def _passing(self, schedule: Any, pieces: int) -> dict[tuple[int, int], Passing]:
        """Each pass of this rank by stage and piece, which knows the pass that goes back after it."""
        standing = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        found: dict[tuple[int, int], Passing] = {}
        follower: Passing | None = None
        late = {chunk.number: chunk.late for chunk in self.chunks if self.plan.schedule == "zero-bubble"}
        for stage, piece in reversed(self._back(schedule, pieces)):
            found[stage, piece] = follower = Passing(follower, standing, late.get(stage))
        return found

    def _back(self, schedule: Any, pieces: int) -> list[tuple[int, int]]:
        """(stage, piece) in the order in which they go back on this rank; of a stage first in, first out."""
        if self.plan.schedule not in SEVERAL:
            return [(self.chunks[0].number, piece) for piece in range(pieces)]
        return [
            (action.stage_index, action.microbatch_index)
            for action in schedule.pipeline_order[self.at]
            if action is not None and action.computation_type.name in BACKWARD
        ]

    def _pieces(self, rows: int) -> int:
        """Pieces of a forward pass without a backward one: no more than rows, in whole rounds."""
        pieces = max(1, min(self.plan.microbatches, rows))
        return pieces if pieces < self.plan.pp else pieces - pieces % self.plan.pp

    def _padded(self, batch: Batch, pieces: int) -> tuple[Batch, Batch]:
        """(the batch on the device with rows numbered, and copies of its first row until it divides, those
        with the number PADDING; as many rows of what of it the CPU has and somebody may ask for)."""
        batch, host = moved(batch, self.device)
        # nobody waits for numbers of rows, nor for pictures and sounds
        host = {name: own for name, own in host.items() if name != "rows" and not own.is_floating_point()}
        number = len(input_of(batch))
        batch.setdefault("rows", torch.arange(number, device=self.device))
        missing = -number % (pieces * self.texts)
        self.now.padded = missing > 0
        if missing:
            batch, host = filled_up(batch, missing), filled_up(host, missing)
            batch["rows"][number:] = PADDING
        return batch, host

    def _schedule(self, batch: Batch, pieces: int) -> Any:
        """The schedule for batches of these shapes. Only the last one of each kind is kept: it holds what is
        received of every piece."""
        training = self.now.training
        stacks = (one for module in self.modules for one in module.modules() if isinstance(one, Stack))
        mode = training, all(stack.climbs for stack in stacks)
        if mode not in self.kinds:
            self.kinds[mode] = self._try({name: value[:1] for name, value in batch.items()})
        for chunk, (incoming, outgoing) in zip(self.chunks, self.kinds[mode], strict=True):
            chunk.incoming, chunk.outgoing = incoming, outgoing
            chunk.shapes = [
                shape for shape, _ in self._facts(chunk.ends.outgoing, chunk.outgoing, batch, pieces)
            ]
        made_for = (pieces, mode, tuple((name, value.shape) for name, value in batch.items()))
        if self.schedules.get(training, (None, None))[0] != made_for:
            self.schedules[training] = (made_for, self._make(batch, pieces))
        return self.schedules[training][1]

    def _make(self, batch: Batch, pieces: int) -> Any:
        if self.transfers is not None:
            sides = (side for chunk in self.chunks for side in chunk.sides)
            self.transfers.reserve(max(message_bytes(self._drawn(*side, batch, pieces)) for side in sides))
        stages = [self._stage(chunk, batch, pieces) for chunk in self.chunks]
        training = self.now.training
        if training and self.plan.schedule == "zero-bubble":
            self._say_what_is_not_split()
        return made(self.plan, stages, pieces, (lambda loss, rows: loss) if training else None)

    def _stage(self, chunk: Chunk, batch: Batch, pieces: int) -> PipelineStage:
        """torch's stage around a chunk, told what it will receive and send."""
        inputs, outputs = (self._drawn(*side, batch, pieces) for side in chunk.sides)
        if chunk.last:
            outputs = (torch.empty((), dtype=LOSS, device="meta"),)
        kind: Any = PipelineStage if self.transfers is None else partial(LinkedStage, self.transfers)
        stage: PipelineStage = kind(
            chunk,
            chunk.number,
            self.final + 1,
            self.device,
            input_args=inputs,
            output_args=outputs,
            group=self.group,
            dw_builder=None if chunk.splits else chunk.weights,
        )
        return stage

    def _drawn(self, slots: tuple[Slot, ...], kinds: Kinds, batch: Batch, pieces: int) -> tuple[Tensor, ...]:
        """The tensors that travel with a piece of `batch`, on the meta device."""
        return tuple(
            torch.empty(shape, dtype=kind.dtype, device="meta", requires_grad=kind.differentiable)
            for shape, kind in self._facts(slots, kinds, batch, pieces)
        )

    def _say_what_is_not_split(self) -> None:
        """Say once that passes for weights will fill no bubble."""
        if self.main and not self.said and not all(chunk.splits or chunk.leaves for chunk in self.chunks):
            say(
                "zero-bubble: some stages make their backward pass in one, as their weights do not train or"
                " torch cannot split it; interleaved does as well"
            )
        self.said = True

    def _facts(
        self, slots: tuple[Slot, ...], kinds: Kinds, batch: Batch, pieces: int
    ) -> list[tuple[tuple[int, ...], TensorMeta]]:
        """Shape and kind of each tensor that travels with a piece of `batch`."""
        rows, lengths = len(batch["rows"]) // pieces, lengths_of(self.modules[0], batch, self.stacks)
        return [
            (slot.shape(kind.sizes, rows, lengths), kind)
            for slot, kind in zip(slots, kinds, strict=True)
            if kind is not None
        ]

    def _try(self, row: Batch) -> list[tuple[Kinds, Kinds]]:
        """Send one row through the stages in turn; for each chunk, what it receives and what it sends."""
        found = []
        for chunk in self.chunks:
            kinds = self._received(chunk)
            chunk.incoming = kinds
            leaving: Kinds = ()
            if not chunk.last:
                with torch.enable_grad() if self.now.training else nullcontext():
                    zeros = [
                        torch.zeros(
                            k.sizes, dtype=k.dtype, device=self.device, requires_grad=k.differentiable
                        )
                        for k in kinds
                        if k
                    ]
                    chunk.run(zeros, row)
                    leaving = tuple(TensorMeta.of(value) for value in chunk.ends.collect())
                for module in chunk.modules():  # no backward pass will free what this one has gathered
                    if isinstance(module, FSDPModule):
                        module.reshard()
                following = (chunk.number + 1) % self.plan.pp
                dist.send(encoded(leaving, self.device), group_dst=following, group=self.group)
            found.append((kinds, leaving))
        return found

    def _received(self, chunk: Chunk) -> Kinds:
        if chunk.number == 0:
            return ()
        words = torch.empty(len(chunk.ends.incoming), WORDS, dtype=torch.int64, device=self.device)
        dist.recv(words, group_src=(chunk.number - 1) % self.plan.pp, group=self.group)
        return decoded(words)


def _trained(batch: Batch, pieces: int, texts: int) -> list[int]:
    """How many labels count at most in each piece of a batch, which no piece parts within `texts` rows; rows
    that only fill up the last have none."""
    labels = batch["labels"]
    rows = (labels >= 0).view(len(labels), -1).sum(1).tolist()
    each = -(-len(labels) // (pieces * texts)) * texts
    return [sum(rows[at * each : (at + 1) * each]) for at in range(pieces)]
