"""One model, some ranks: forward, backward, and everything that has to be summed, counted once or made whole.
What the loop talks to.

A single process is a plan with axes of size 1 and takes the same path. The loss is a sum over trained tokens
divided by the count of the whole step, so gradients only ever add up: over micro-batches by autograd, over
the tp axis where `Placed` says they are partial, over dp because replicas have other rows, over pp where
several stages hold one tensor. Each sum happens once, before clipping.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petune.files.range_writer import ALONE, Crew
from petune.kernels.memory.offloaded_adamw import StreamedAdamW
from petune.models.damage import refuse_not_finite
from petune.parallel.collectives import alike, all_sum_, broadcast, gather_dims, portions
from petune.parallel.fsdp import allocated, copies, is_sharded, local, wholes
from petune.parallel.in_pieces import backward_in_pieces
from petune.parallel.launch import process_group
from petune.parallel.mesh import Axis
from petune.parallel.objective import Batch, Objective, Outputs
from petune.parallel.pipeline.schedule import Pipeline
from petune.parallel.placement import Placement, ShardPlace, parts_of, place_of
from petune.parallel.plan import apportion
from petune.parallel.tensor.vocabulary import has_cut_head, vocabulary_losses
from petune.rng.context import Running, bound, bound_to, moved, twins
from petune.rng.dropout import drawing

T = TypeVar("T")
CUTTING: tuple[Axis, ...] = ("tp", "ep")  # along which tensors are cut


class Runner:
    """A placed model that runs: `placement` says where it is, `objective` what it is trained for.

    model: whole or the first of this rank's stages. names, shapes, tuned, owned: see Placement. streamed:
    what updates a model whose blocks rest in host memory, inside `backward`; such a model is left where it is
    until `stream` is called. unfused_stage: whether a stage here cannot be fused, as ranks have told one
    another when they fused; None where they have not. contents: see Placement.
    """

    def __init__(self, placement: Placement, objective: Objective) -> None:
        self.plan, self.mesh = placement.plan, placement.mesh
        self.modules, self.names, self.shapes = placement.modules, placement.names, placement.shapes
        self.tuned, self.placed, self.owned = placement.tuned, placement.placed, placement.owned
        self.vocabulary, self.model = placement.vocabulary, placement.modules[0]
        self.contents = placement.contents
        self.streamed: StreamedAdamW | None = None
        self.unfused_stage: bool | None = None
        self.holders = self._holders()
        self.objective = self._over_cut_vocabulary(objective)
        family, plan = placement.family, self.plan
        self.pipeline: Pipeline | None = None
        if family is not None and plan.pp > 1:
            self.pipeline = Pipeline(self.modules, family, plan, self.mesh, self.objective)

    # ------------------------------------------------------------ set up

    def _over_cut_vocabulary(self, objective: Objective) -> Objective:
        """The same objective for logits of which each rank of tp has some columns, if that is so."""
        if not self.vocabulary or not has_cut_head(self.modules[-1]):
            return objective
        group, first = self.mesh.groups["tp"], sum(self.vocabulary[: self.mesh.at.tp])

        def loss(outputs: Outputs, batch: Batch) -> Tensor:
            losses = vocabulary_losses(*objective.select(outputs, batch), group, first)
            return objective.finish(losses, outputs, batch)

        return replace(objective, loss=loss)

    def _holders(self) -> dict[str, list[int]]:
        """The pipeline stages that hold each tuned tensor, by rank along pp."""
        held = torch.zeros(self.plan.pp, len(self.names), device=self.mesh.device)
        held[self.mesh.at.pp] = torch.tensor([float(name in self.tuned) for name in self.names])
        if self.plan.pp > 1:
            # over tp too: the bias of a row site lies on one rank of its stage
            dist.all_reduce(held, op=dist.ReduceOp.MAX)
        else:
            held.fill_(1)
        return {
            name: [stage for stage in range(self.plan.pp) if held[stage, at]]
            for at, name in enumerate(self.names)
        }

    def restart_whole(self) -> str | None:
        """Why all must load the model again when one rank is lost; None where the others keep theirs."""
        if self.plan.sharding is not None:
            return "FSDP's shards hold their process group"
        if (
            self.plan.cut is not None
            and self.plan.cut.overlap
            and self.plan.cut.connection == "sequence"
            and self.plan.tp > 2
        ):
            return "the route of overlapped tiles is measured when all start"
        return None

    def rejoin(self) -> None:
        """Do what a runner that is made now does with the others, in groups that were made anew. Gradients
        are dropped."""
        self.holders = self._holders()
        if self.unfused_stage is not None:
            self.any([self.unfused_stage])
        if self.pipeline is not None:
            self.pipeline.forget()
        for value in self.tuned.values():
            value.grad = None

    def stream(self, optimizer: StreamedAdamW) -> None:
        """Leave the blocks in host memory, and their updates to the backward pass. Between steps what rests
        there is whole."""
        self.streamed = optimizer
        optimizer.register_step_post_hook(lambda *_: optimizer.settle())

    def read_again(self, values: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Parameters like those of `modules`, by name, that are on the meta device, read from the files that
        they came from. Raises FileError where those hold a value that is not finite, or are not what their
        headers said."""
        assert self.contents is not None, "what was in memory has no files"
        made = {name: allocated(value, self.mesh.device) for name, value in values.items()}
        refuse_not_finite(
            self.contents.fill(parts_of(made.items(), self.placed, self.mesh)), self.contents.place
        )
        return made

    # ------------------------------------------------------------ rows

    @property
    def together(self) -> bool:
        """Whether all replicas go forward together, so that none may leave a pass out."""
        return self.plan.together or self.objective.meets

    def share(self, rows: Sequence[T]) -> list[T]:
        """This replica's rows of one forward pass; possibly none."""
        sizes = apportion(len(rows), self.plan.shares)
        start = sum(sizes[: self.mesh.at.dp])
        return list(rows[start : start + sizes[self.mesh.at.dp]])

    # ------------------------------------------------------------ a step

    def backward(
        self,
        batches: Sequence[Batch],
        total: float,
        key: int | None = None,
        meanwhile: Callable[[], None] | None = None,
        whole: bool = True,
    ) -> float:
        """Forward and backward over the micro-batches of one step; returns its loss, divided by `total`, on
        every rank; unless `whole` of this replica alone, which `clip_with_loss` sums.

        `batches` are this replica's, as many on each where all go together (`together`);
        `total` counts the trained tokens of all replicas; `key` is what dropout is drawn from; `meanwhile` is
        called when all of it is on its way to the device and before anything waits for it. Afterwards every
        gradient is complete, or, where the model is streamed, used up; a loss that is not finite is returned
        without a backward pass then, as no update can be taken back.
        """
        if self.pipeline is not None:
            loss: float | Tensor = sum(
                self._through_stages(self.pipeline, batch, total, key) for batch in batches
            )
        else:
            loss = sum(self._forward_backward(batch, total, key) for batch in batches)
        self._complete()
        if meanwhile is not None:
            meanwhile()
        if self.plan.dp == 1 or not whole:
            return float(loss)
        summed = torch.tensor([float(loss)], dtype=torch.float64, device=self.mesh.device)
        dist.all_reduce(summed, group=self.mesh.groups["dp"])
        return float(summed)

    def _through_stages(self, pipeline: Pipeline, batch: Batch, total: float, key: int | None) -> float:
        """One batch through the pipeline. torch takes gradients it finds on sharded stages for leftovers of a
        trial and clears them."""
        kept = {name: value.grad for name, value in self.tuned.items() if value.grad is not None}
        for name in kept:
            self.tuned[name].grad = None
        loss = pipeline.backward(batch, self.plan.microbatches, total, key)
        for name, grad in kept.items():
            now = self.tuned[name].grad
            self.tuned[name].grad = grad if now is None else now.add_(grad)
        return loss

    def _forward_backward(self, batch: Batch, total: float, key: int | None) -> Tensor:
        trained = int((batch["labels"] >= 0).sum())  # counted where nothing has to wait for it
        batch, host = moved(batch, self.mesh.device)
        objective = self.objective
        if objective.pieces is not None:
            with bound(host=twins(batch, host)):
                return backward_in_pieces(self.model, batch, objective, objective.pieces, total, key) / total
        here = Running(rows=batch.get("rows"), key=key, host=twins(batch, host))
        with drawing(here), objective.autocast():
            loss = objective.fused_loss(self.model, batch, trained)
            outputs = objective.forward(self.model, batch) if loss is None else None
        if outputs is not None:
            with bound_to(here):
                loss = objective.loss(outputs, batch)
        assert loss is not None
        if self.streamed is None or bool(loss.isfinite()):
            (loss / total).backward()
        return loss.detach() / total

    def _complete(self) -> None:
        """The sums of the gradient rule, each once."""
        if self.streamed is not None:
            return
        for parameter in self.tuned.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = {name: local(value.grad) for name, value in self.tuned.items() if value.grad is not None}
        if self.plan.tp > 1:
            self._sum_over([grads[name] for name in grads if name in self.placed.partial], "tp")
        if self.plan.pp > 1:
            self._sum_over_stages(grads)
        # FSDP has summed what it shards, and experts have seen the tokens of all ranks that share them
        if self.plan.dp > 1:
            whole = [name for name in grads if not is_sharded(self.tuned[name])]
            self._sum_over([grads[name] for name in whole if not self._over(name, "ep")], "dp")
        if self.plan.ep > 1 and self.plan.edp > 1:
            self._sum_over([grads[name] for name in grads if self._over(name, "ep")], "edp")

    def _sum_over(self, values: Sequence[Tensor], axis: Axis) -> None:
        """Sum in place along an axis, by way of the device for what rests on the CPU."""
        there = [value.to(self.mesh.device) for value in values]
        all_sum_(there, self.mesh.groups[axis])
        for value, summed in zip(values, there, strict=True):
            if value is not summed:
                value.copy_(summed)

    def _sum_over_stages(self, grads: Mapping[str, Tensor]) -> None:
        """Tensors on several stages (tied embeddings, modules outside the blocks); others add zero."""
        shared = [name for name in self.names if len(self.holders[name]) > 1]
        all_sum_(
            [grads[name] if name in grads else self._zeros(name) for name in shared], self.mesh.groups["pp"]
        )

    def clip_with_loss(self, max_norm: float | None, loss: float) -> tuple[float, float]:
        """The norm of the whole gradient, on every rank, which is scaled down where that exceeds `max_norm`,
        and the losses of all replicas summed, in one exchange. loss: of this replica.

        Streamed ones have been used by then, and are not scaled; without a backward pass in this step their
        norm is not a number.
        """
        if self.streamed is not None:
            return float(self.streamed.grad_norm) if self.streamed.updated else math.nan, loss
        grads = {name: local(value.grad) for name, value in self.tuned.items() if value.grad is not None}
        squares = self._squares(grads)
        if self.plan.world > 1:
            own = squares.new_tensor(loss if self.speaks else 0.0)
            both = torch.stack([squares, own])
            dist.all_reduce(both)
            squares, loss = both[0], float(both[1])
        total = math.sqrt(float(squares))
        process_group.check()  # the gradients of this step are those of all ranks
        if grads and max_norm is not None and math.isfinite(total) and total > max_norm:
            torch._foreach_mul_(list(grads.values()), max_norm / (total + 1e-6))
        return total, loss

    def _squares(self, grads: Mapping[str, Tensor]) -> Tensor:
        """The sum of squares of gradients, [] float64, each divided by the ranks that hold it; in a few
        launches for all, as the device waits for them."""
        squares = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        held: dict[int, list[Tensor]] = defaultdict(list)
        for name, value in grads.items():
            held[self._copies(name)].append(value)
        for ranks, values in held.items():
            for places in alike(values):
                wide = torch.promote_types(values[places[0]].dtype, torch.float32)
                norms = torch._foreach_norm([values[at] for at in places], 2, wide)
                squares += torch.stack(norms).double().square().sum().to(squares.device) / ranks
        return squares

    def _copies(self, name: str) -> int:
        """How many ranks hold the same piece of a tuned tensor."""
        along_tp = 1 if self._over(name, "tp") else self.plan.tp
        return along_tp * self._replicas(name) * len(self.holders[name])

    def _replicas(self, name: str) -> int:
        """How many of them lie along dp."""
        return self.plan.edp if self._over(name, "ep") else copies(self.tuned[name], self.plan)

    def _over(self, name: str, axis: Axis) -> bool:
        """Whether a tuned tensor is cut along an axis."""
        return name in self.placed.slices and self.placed.slices[name].axis == axis

    # ------------------------------------------------------------ evaluation and agreement

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor | None:
        """Whole logits of this replica's rows, on the last stage of a pipeline; None on the others."""
        if self.pipeline is not None:
            return self.pipeline.logits(batch)
        batch, host = moved(batch, self.mesh.device)
        with bound(host=twins(batch, host)), self.objective.autocast():
            return self.objective.forward(self.model, batch).logits

    @property
    def speaks(self) -> bool:
        """Whether this rank's results count: once per replica, where logits come out."""
        return self.mesh.at.tp == 0 and self.mesh.at.pp == self.plan.pp - 1

    def total(self, values: Tensor) -> Tensor:
        """`sum` of a tensor, on this rank's device, in float64."""
        whole = values.to(self.mesh.device, torch.float64) * self.speaks
        if self.plan.world > 1:
            dist.all_reduce(whole)
        return whole

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums of what the ranks that speak have counted, on every rank."""
        return self.meet(values, ())[0]

    def meet(self, values: Sequence[float], flags: Sequence[bool]) -> tuple[list[float], list[bool]]:
        """What `sum` gives of `values` and `any` of `flags`, in one exchange."""
        if self.plan.world == 1:
            return list(values), list(flags)
        own = [float(value) * self.speaks for value in values] + [float(flag) for flag in flags]
        whole = torch.tensor(own, dtype=torch.float64, device=self.mesh.device)
        dist.all_reduce(whole)
        found = whole.tolist()
        return found[: len(values)], [bool(flag) for flag in found[len(values) :]]

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank raised it."""
        return self.meet((), flags)[1]

    def gather(self, value: float) -> list[float]:
        """Every rank's value, in the order of ranks."""
        found = torch.zeros(self.plan.world, dtype=torch.float64, device=self.mesh.device)
        found[self.mesh.rank] = value
        if self.plan.world > 1:
            dist.all_reduce(found)
        return [float(one) for one in found]

    def barrier(self) -> None:
        """Wait for everyone, however long one works alone; a rank that dies meanwhile is noticed."""
        if process_group.inside():
            process_group.barrier()
        else:
            self.any([False])

    # ------------------------------------------------------------ whole tensors and slices of them

    @property
    def crew(self) -> Crew:
        """Who writes the tuned tensors into files: the main rank where it holds them whole, else all."""
        if self.uncut:
            return ALONE
        return Crew(self.mesh.rank, self.plan.world, process_group.gather)

    @property
    def uncut(self) -> bool:
        """Whether every rank holds every tuned tensor whole, so that the main one saves them alone."""
        whole = self.plan.pp == 1 and self.plan.sharding is None
        return whole and not self.placed.slices.keys() & set(self.names)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors shaped like this rank's parts of tuned tensors, by name, put together: on the main rank all
        of them, on the CPU.

        Every rank must call it with the tensors it has; elsewhere the result is empty.
        """
        found: dict[str, Tensor] = {}
        for names in portions(self.names, self._nbytes):
            parts = self._put_together(names, {name: tensors[name] for name in names if name in tensors})
            if self.mesh.main:
                found |= {name: parts[name].to("cpu", copy=True) for name in names}
        process_group.check()
        return found

    def _nbytes(self, name: str) -> int:
        """Of a whole tuned tensor."""
        shape, dtype = self.shapes[name]
        return shape.numel() * dtype.itemsize

    @torch.no_grad()
    def _put_together(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`names` whole, of this rank's `tensors`: along dp, tp or ep, and pp, one after the other."""
        parts = dict(zip(tensors, wholes([value.detach() for value in tensors.values()]), strict=True))
        for axis in (axis for axis in CUTTING if self.mesh.size(axis) > 1):
            here = [
                name for name in names if self.mesh.at.pp in self.holders[name] and self._over(name, axis)
            ]
            cuts = {name: cut for name in here if (cut := self.placed.slices[name]).dim != "owner"}
            sizes = [(cut.sizes, int(cut.dim)) for cut in cuts.values()]
            found = gather_dims([parts[name] for name in cuts], sizes, self.mesh.groups[axis])
            parts |= {
                name: cut.together(value) for (name, cut), value in zip(cuts.items(), found, strict=True)
            }
            parts |= self._sent([name for name in here if name not in cuts], parts, 0, axis)
        for stage in range(self.plan.pp) if self.plan.pp > 1 else ():
            there = [
                name
                for name in names
                if self.holders[name][0] == stage and len(self.holders[name]) < self.plan.pp
            ]
            parts |= self._sent(there, parts, stage, "pp")
        return parts

    def _sent(
        self, names: Sequence[str], parts: Mapping[str, Tensor], source: int, axis: Axis
    ) -> dict[str, Tensor]:
        """Whole tensors of rank `source` of an axis, for all of its ranks."""
        rooms = [parts[name] if name in parts else self._room(name) for name in names]
        return dict(zip(names, broadcast(rooms, source, self.mesh.groups[axis]), strict=True))

    def _room(self, name: str) -> Tensor:
        """Memory for a whole tuned tensor."""
        shape, dtype = self.shapes[name]
        return torch.empty(shape, dtype=dtype, device=self.mesh.device)

    def _zeros(self, name: str) -> Tensor:
        """In the shape of what this rank would hold of a tuned tensor."""
        whole, dtype = self.shapes[name]
        shape, cut = list(whole), self.placed.slices.get(name)
        if cut is not None and cut.dim != "owner":
            shape[cut.dim] = cut.sizes[self.mesh.index(cut.axis)]
        return torch.zeros(shape, dtype=dtype, device=self.mesh.device)

    def place(self, name: str) -> ShardPlace:
        """Where what this rank holds of a tuned tensor lies in the whole: the boxes that it reads and writes
        of files."""
        return place_of(name, self.tuned[name], self.placed, self.mesh)

    def writes(self, name: str) -> bool:
        """Whether, of the ranks that hold this very box of a tuned tensor, this is the first."""
        at = self.mesh.at
        first = at.dp < self.plan.dp // self._replicas(name)
        return first and at.pp == self.holders[name][0] and (at.tp == 0 or self._over(name, "tp"))
