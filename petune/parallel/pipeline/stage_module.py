"""A stage as torch's schedules call it: tensors in and the piece's batch by name, tensors out, and a part of
the loss at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from petune.errors import DistributedError
from petune.kernels.block.rows import Late, learn_late
from petune.kernels.fuse import fused_blocks
from petune.kernels.head.hooks import has_fused_head
from petune.kernels.memory.offload import Passing
from petune.parallel.objective import Batch, Objective, Outputs, rows_of
from petune.parallel.pipeline.stage_io import Kinds, OwnOutputs, Slot, TensorMeta
from petune.parallel.pipeline.stages import ends_of
from petune.rng.context import Running, twins
from petune.rng.dropout import drawing

# torch 2.13: tensors without a gradient are not answered
SELECTIVE = "output_grads" in signature(PipelineStage.__init__).parameters
PADDING = -1  # the number of a row that only fills up the last piece
LOSS = torch.float64  # of the scalar that the last stage gives


@dataclass
class Now:
    """What holds for the call that is running. trained: labels that count at most, by piece; passing: of each
    stage and piece that will go back, which pass it is; host: of each piece, what of its batch the CPU
    has."""

    total: float = 1.0
    key: int | None = None
    training: bool = True
    padded: bool = False
    logits: list[Tensor] = field(default_factory=list)
    trained: Sequence[int] = ()
    passing: Mapping[tuple[int, int], Passing] = field(default_factory=dict)
    host: Sequence[Batch] = ()


class Chunk(nn.Module):
    """A stage: (what arrived, the piece's batch) -> what goes on; from the last stage its part of the loss,
    or nothing but `now.logits`."""

    def __init__(self, model: nn.Module, number: int, objective: Objective, now: Now, last: bool) -> None:
        super().__init__()
        self.model, self.number, self.objective, self.now, self.last = model, number, objective, now, last
        self.ends = ends_of(model)
        self.incoming: Kinds = ()
        self.outgoing: Kinds = ()
        self.shapes: list[tuple[int, ...]] = []
        self.piece = 0  # the next one of the call that is running
        self.late: list[Late] = []  # what fused blocks have left of the backward pass of one piece

    @property
    def sides(self) -> tuple[tuple[tuple[Slot, ...], Kinds], tuple[tuple[Slot, ...], Kinds]]:
        """Places and kinds of what comes in, and of what goes on."""
        return (self.ends.incoming, self.incoming), (self.ends.outgoing, self.outgoing)

    @property
    def splits(self) -> bool:
        """Whether torch makes its backward pass in two parts; see `Ends.splits`. Fused blocks do that
        themselves, a loss without logits gives its gradients away once. Where nothing that comes in asks for
        a gradient, torch would find no second part at all."""
        asked = self.number == 0 or any(kind is not None and kind.differentiable for kind in self.incoming)
        nodes = fused_blocks(self.model) or has_fused_head(self.model)
        return SELECTIVE and self.ends.splits and asked and not nodes

    @property
    def leaves(self) -> bool:
        """Whether its fused blocks leave products of weights for a pass of their own, as weights train."""
        return any(block.spec.learns for block in fused_blocks(self.model))

    def weights(self) -> Callable[[], None]:
        """What is left of the backward pass that was the last; torch asks for it after each, and calls it in
        its turn."""
        late = self.late.copy()
        self.late.clear()
        return partial(learn_late, late)

    def forward(self, *received: Tensor, **batch: Tensor) -> Any:
        """What torch sends on, a flat tuple of contiguous tensors, or the scalar loss."""
        answered = not SELECTIVE and self.now.training
        kinds = [kind for kind in self.incoming if kind is not None]
        constants = [
            value for value, kind in zip(received, kinds, strict=True) if answered and not kind.differentiable
        ]
        arrived = [
            value.detach() if not kind.differentiable else value
            for value, kind in zip(received, kinds, strict=True)
        ]
        if self.last and self.now.training:
            return self._linked(constants, [self._loss(arrived, batch)])[0]
        outputs = self.run(arrived, batch)
        if self.last:
            return self._keep(outputs.logits, batch)
        leaving = [value.contiguous() for value in self._expected(self.ends.collect())]
        return tuple(self._linked(constants, leaving))

    def run(self, arrived: Sequence[Tensor], batch: Batch) -> Outputs:
        """The model's forward pass with what came laid out for its stacks."""
        with self._running(arrived, batch):
            return self.objective.forward(self.model, _without_rows(batch))

    @contextmanager
    def _running(self, arrived: Sequence[Tensor], batch: Batch) -> Iterator[None]:
        """The next piece's pass, with what came laid out for its stacks."""
        values = iter(arrived)
        self.ends.put([None if kind is None else next(values) for kind in self.incoming])
        passing = self.now.passing.get((self.number, self.piece))
        host = twins(batch, self.now.host[self.piece]) if self.now.host else ()
        self.piece += 1
        here = Running(rows=batch["rows"], key=self.now.key, passing=passing, host=host)
        with drawing(here), self.objective.autocast():
            yield

    def _expected(self, leaving: Sequence[Tensor | None]) -> list[Tensor]:
        """The tensors that leave. Raises DistributedError when they are not what the next stage waits for,
        which would hang it."""
        found = [value for value in leaving if value is not None]
        if [TensorMeta.of(value) is None for value in leaving] != [
            kind is None for kind in self.outgoing
        ] or self.shapes != [tuple(value.shape) for value in found]:
            shapes = ", ".join(str(list(value.shape)) for value in found)
            wanted = ", ".join(str(list(shape)) for shape in self.shapes)
            what = f"stage {self.number} made other tensors than the next one expects"
            raise DistributedError(what, expected=wanted, found=shapes)
        return found

    def _linked(self, constants: Sequence[Tensor], leaving: Sequence[Tensor]) -> list[Tensor]:
        """What leaves, fit for torch's schedules; see `OwnOutputs`."""
        if constants:
            return list(cast("Any", OwnOutputs).apply(len(constants), *constants, *leaving))
        return [
            cast("Any", OwnOutputs).apply(0, value)[0] if value.requires_grad else value.detach()
            for value in leaving
        ]

    def _loss(self, arrived: Sequence[Tensor], batch: Batch) -> Tensor:
        """This piece's part of the loss, without logits where the model makes it so."""
        trained = self.now.trained[self.piece]
        with self._running(arrived, batch):
            lost = self.objective.fused_loss(self.model, batch, trained)
            outputs = self.objective.forward(self.model, _without_rows(batch)) if lost is None else None
        if outputs is not None:
            lost = self._of_logits(outputs, _without_rows(batch), batch["rows"] != PADDING)
        assert lost is not None
        return lost.to(LOSS) / self.now.total

    def _of_logits(self, outputs: Outputs, batch: Batch, real: Tensor) -> Tensor:
        """The loss of the rows that are `real`."""
        if self.now.padded:
            outputs, batch = rows_of(outputs, real), {name: value[real] for name, value in batch.items()}
        return self.objective.loss(outputs, batch) if len(outputs.logits) else outputs.logits.sum()

    def _keep(self, logits: Tensor, batch: Batch) -> Tensor:
        self.now.logits.append(logits[batch["rows"] != PADDING] if self.now.padded else logits)
        return torch.zeros((), dtype=LOSS, device=logits.device)


def filled_up(batch: Batch, missing: int) -> Batch:
    """The batch and so many copies of its first row."""
    return {
        name: torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) for name, value in batch.items()
    }


def shared_out(batch: Batch, pieces: int) -> list[Batch]:
    """The rows of each piece, as torch shares out those of a batch that divides."""
    parts = {name: value.tensor_split(pieces) for name, value in batch.items()}
    return [{name: part[at] for name, part in parts.items()} for at in range(pieces)]


def _without_rows(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "rows"}
