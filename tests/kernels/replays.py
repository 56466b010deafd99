"""Stacks of blocks that are replayed without a device: what a CUDA graph has to be equal to."""

from __future__ import annotations

from torch import nn

from petune.kernels.graphs.recorder import Run
from petune.kernels.graphs.replay import Graphs
from petune.models.stack import Stack


class Again:
    """Runs both passes anew on the same buffers: what a device's recorder has to be equal to."""

    refused: str | None = None
    error: RuntimeError | None = None

    def __init__(self) -> None:
        self.recorded = self.forwards = self.backwards = 0

    def refusal(self) -> str | None:
        return self.refused

    def record(self, forward: Run, backward: Run) -> tuple[Run, Run]:
        if self.error is not None:
            raise self.error
        self.recorded += 1

        def replay_forward() -> None:
            self.forwards += 1
            forward()

        def replay_backward() -> None:
            self.backwards += 1
            backward()

        return replay_forward, replay_backward


def stacks(model: nn.Module) -> list[Stack]:
    return [module for module in model.modules() if isinstance(module, Stack)]


def replayed(model: nn.Module) -> Again:
    """The recorder of a model that is replayed from now on."""
    recorder = Again()
    for stack in stacks(model):
        stack.whole = Graphs(lambda device: recorder, beside=stack.ladder is not None)
    return recorder
