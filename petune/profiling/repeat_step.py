"""The first step of a run, as often as wanted: the same rows, the same dropout, a learning rate of zero,
nothing on disk."""

from __future__ import annotations

import torch

from petune.parallel import Batch, Mesh
from petune.run.build import Prepared
from petune.run.step import OptimizerStep


class Rehearsal:
    """Repeats the first step of a run. Weights stay as they are: every repetition computes the same loss and
    gradients."""

    def __init__(self, prepared: Prepared, mesh: Mesh) -> None:
        self.step = OptimizerStep(prepared, mesh)
        self.step.refer()
        self.runner, self.tuned, self.optimizer = self.step.runner, self.step.tuned, self.step.optimizer
        for options in self.optimizer.param_groups:
            options["lr"] = 0.0
        for module in self.runner.modules:
            module.train()

    def batches(self) -> list[Batch]:
        """The padded batches of the first step, on the CPU."""
        return self.step.micro_batches(0)

    def passes(self, micro: list[Batch]) -> float:
        """Forward and backward over the batches of one step, which leaves complete gradients; the loss."""
        # for dropout that is torch's, where the model's blocks are not ours
        torch.manual_seed(self.step.recipe.seed)
        return self.step.passes(micro, 0)

    def update(self) -> None:
        """Clip, step the optimizer, which changes its state alone, and drop the gradients."""
        self.runner.clip_with_loss(self.step.recipe.clip, 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
