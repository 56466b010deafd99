"""The first step of a run, as often as wanted: the same rows, the same dropout, a learning rate of zero, nothing on disk."""

from __future__ import annotations

import torch

from petune.parallel import Mesh
from petune.run.build import Prepared
from petune.run.evaluate import Batch
from petune.run.folder import RunFolder
from petune.run.reporting import Silent
from petune.run.signals import StopRequest
from petune.run.trainer import Training
from petune.tasks import count


class Rehearsal(Training):
    """A run that repeats its first step. Weights stay as they are, so every repetition computes the same loss and gradients."""

    def __init__(self, prepared: Prepared, mesh: Mesh) -> None:
        super().__init__(prepared, RunFolder.of(prepared.recipe), Silent(), StopRequest(), mesh)
        for options in self.optimizer.param_groups:
            options["lr"] = 0.0
        for module in self.runner.modules:
            module.train()

    def _check_disk(self) -> None:
        """Nothing is saved, so no room is needed."""

    def batches(self) -> list[Batch]:
        """The padded batches of the first step, on the CPU."""
        return self.micro_batches(0)

    def passes(self, micro: list[Batch]) -> float:
        """Forward and backward over the batches of one step, which leaves complete gradients; the loss."""
        torch.manual_seed(self.recipe.seed)  # for dropout that is torch's, where the model's blocks are not ours
        real = ({name: value[batch["rows"] >= 0] for name, value in batch.items()} for batch in micro)
        total = self.runner.sum([sum(count(batch, self.weights) for batch in real)])[0]
        return self.runner.backward(micro, total, self._dropout_key(0))

    def update(self) -> None:
        """Clip, step the optimizer, which changes its state alone, and drop the gradients."""
        self.runner.clip(self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
