"""The objective of a recipe's task: how its model is asked, and the summed loss of its outputs over real
rows."""

from __future__ import annotations

from torch import Tensor, nn

from petune.kernels.head.hooks import has_fused_head, head_loss
from petune.methods import tuned_parameters
from petune.parallel import Batch, Objective, Outputs
from petune.run.evaluate import outputs_of, real_rows
from petune.tasks import Task, loss_sum, trained_positions


def objective_of(task: Task, weights: Tensor | None) -> Objective:
    """What a runner needs to know of `task`, without autocast. weights: the classes' in the loss, on the
    model's device."""

    def ask(model: nn.Module, batch: Batch) -> Outputs:
        return outputs_of(model, batch)

    def loss(outputs: Outputs, batch: Batch) -> Tensor:
        return loss_sum(*real_rows(outputs.logits, batch), task.name, weights)[0]

    def select(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
        kept, rows = real_rows(outputs.logits, batch)
        return trained_positions(kept, rows["labels"], task.name)

    def fused_loss(model: nn.Module, batch: Batch, trained: int) -> Tensor | None:
        if not task.over_vocabulary or not has_fused_head(model):
            return None
        return head_loss(model, batch, ask, shift=task.shifts, trained=trained)

    return Objective(ask, loss, select, fused_loss, tuned_parameters)
