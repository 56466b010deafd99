"""Stacks of blocks that are replayed without a device: what a CUDA graph has to be equal to."""

from __future__ import annotations

from functools import partial

from torch import nn

from petune.kernels.graphs.beneath import BeneathGraphs
from petune.kernels.graphs.recorder import Replay
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

    def record(self, *passes: Replay) -> list[Replay]:
        if self.error is not None:
            raise self.error
        self.recorded += 1
        return [partial(self._replay, at, run) for at, run in enumerate(passes)]

    def _replay(self, at: int, run: Replay) -> None:
        self.forwards += at == 0
        self.backwards += at == 1
        run()


def stacks(model: nn.Module) -> list[Stack]:
    return [module for module in model.modules() if isinstance(module, Stack)]


def replayed(model: nn.Module) -> Again:
    """The recorder of a model that is replayed from now on; of one with ladders, of these alone."""
    recorder = Again()
    for stack in stacks(model):
        stack.whole = Graphs(lambda device: recorder, beside=stack.ladder is not None)
    return recorder


def replayed_beneath(model: nn.Module) -> Again:
    """The recorder of the blocks of a model beside ladders, which are replayed from now on."""
    recorder = Again()
    for stack in stacks(model):
        stack.beneath = BeneathGraphs(lambda device: recorder)
    return recorder
