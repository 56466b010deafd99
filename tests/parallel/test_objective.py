"""An objective's loss is of all that a model answers, not of its logits alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from petune.parallel import ALONE, Batch, Objective, Runner, alone, parallelize
from petune.parallel.objective import rows_of


@dataclass
class Routed:
    """Logits, and what balancing experts costs."""

    logits: Tensor
    aux: Tensor


class Router(nn.Module):
    """A linear whose input costs something too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, inputs: Tensor) -> Routed:
        return Routed(self.linear(inputs), self.linear.weight.square().sum())


def test_a_loss_may_add_what_the_model_answers_beside_its_logits() -> None:
    inputs, labels = torch.eye(3), torch.tensor([0, 1, 0])
    model = Router()

    def loss(outputs: Routed, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="sum") + outputs.aux

    objective = Objective(lambda asked, batch: asked(batch["inputs"]), loss)  # type: ignore[arg-type]
    placement = parallelize(model, None, ALONE, alone(torch.device("cpu")))
    Runner(placement, objective).backward([{"inputs": inputs, "labels": labels}], 1.0)
    plain = Router()
    loss(plain(inputs), {"labels": labels}).backward()
    assert placement.tuned["linear.weight"] is model.linear.weight
    torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad, rtol=0, atol=0)


def test_some_rows_of_outputs_leave_the_outputs_and_all_else_as_they_are() -> None:
    whole = MoeCausalLMOutputWithPast(logits=torch.arange(12.0).view(3, 2, 2), aux_loss=torch.tensor(7.0))
    some = rows_of(whole, torch.tensor([True, False, True]))
    assert isinstance(some, MoeCausalLMOutputWithPast)
    assert torch.equal(some.logits, whole.logits[[0, 2]]) and some.aux_loss is whole.aux_loss
    assert len(whole.logits) == 3
