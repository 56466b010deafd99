"""In which order the ranks of a pipeline compute: torch's own schedules, run with stages that compute nothing
and write down what they are asked for. No group of processes and no model are needed. torch makes the order
of all ranks for each of them, so 1F1B, whose order is a simple one, is written here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from petune.parallel.pipeline.schedule import made, stages_of
from petune.parallel.plan import ParallelPlan

# forward, the whole backward pass, its part for inputs and its part for weights
Pass = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class StageStep:
    """One pass of one micro-batch, `piece`, through one stage."""

    kind: Pass
    stage: int
    piece: int


def order_of(plan: ParallelPlan) -> tuple[tuple[StageStep, ...], ...]:
    """What each rank of the pp axis computes in a training step, in its order."""
    way = one_forward_one_backward if plan.schedule == "1f1b" else recorded
    return tuple(way(plan, rank) for rank in range(plan.pp))


def one_forward_one_backward(plan: ParallelPlan, rank: int) -> tuple[StageStep, ...]:
    """The order of a rank under 1F1B (Narayanan et al. 2019): as many passes forward as stages are left, then
    one back and one forward in turns, then what is left to go back."""
    pieces = range(plan.microbatches)
    first = min(plan.microbatches, plan.pp - rank)
    ahead, back = ([StageStep(kind, rank, piece) for piece in pieces] for kind in ("F", "B"))
    turns = [step for pair in zip(back, ahead[first:], strict=False) for step in pair]
    return (*ahead[:first], *turns, *back[len(turns) // 2 :])


def recorded(plan: ParallelPlan, rank: int) -> tuple[StageStep, ...]:
    """The order of a rank as torch's schedule asks for passes."""
    steps: list[StageStep] = []
    stages = [_Recorder(number, plan, steps) for number in stages_of(plan, rank)]
    pieces = torch.zeros(plan.microbatches, 1)
    schedule = made(plan, stages, plan.microbatches, lambda output, target: output.sum())
    with torch.enable_grad():
        schedule.step(pieces, target=pieces, losses=[], return_outputs=False)
    return tuple(steps)


class _Recorder:
    """A stage for torch's schedules that writes its passes down and does nothing else."""

    def __init__(self, number: int, plan: ParallelPlan, steps: list[StageStep]) -> None:
        self.stage_index, self.num_stages = number, len(plan.stages)
        self.group_size, self.group_rank = plan.pp, number % plan.pp
        self.is_first, self.is_last = number == 0, number == self.num_stages - 1
        self.has_backward, self.submod, self.device = True, None, torch.device("cpu")
        self.stage_index_to_group_rank: dict[int, int] = {}
        # whom it hears and tells, which several stages on a rank are checked for
        self.args_recv_info: dict[int, tuple[()]] = {0: ()}
        self.act_send_info: dict[int, list[int]] = {}
        self.steps = steps

    def forward_one_chunk(self, piece: int, *_: Any, **__: Any) -> torch.Tensor:
        """See torch.distributed.pipelining.stage."""
        self._wrote("F", piece)
        return torch.zeros(())

    def backward_one_chunk(self, piece: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
        """See torch.distributed.pipelining.stage."""
        self._wrote("B" if full_backward else "I", piece)

    def backward_weight_one_chunk(self, piece: int, *_: Any, **__: Any) -> None:
        """See torch.distributed.pipelining.stage."""
        self._wrote("W", piece)

    def _wrote(self, kind: Pass, piece: int) -> None:
        self.steps.append(StageStep(kind, self.stage_index, piece))

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: []
